"""What is written into the output folder: models and checkpoints with their ledger, and the model card with its picture.

- saving: models, checkpoints, cards and logs
- beside_model: the ledger next to a saved model
- json_state: the state of a checkpoint in a form that JSON can hold
- renamed_weights: weights that are saved under different names than the model's own
- model_card: the file, of which a run writes a part and people the rest
- card_part: how the part of a card that a run writes is told from what people write
- card_sections: that part, with privacy first
- training_curve: a picture of the training
"""
