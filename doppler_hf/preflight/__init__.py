"""All checks before the first step, so that a mistake costs no ε.

- order: which checks there are, and when each is made
- trainer: the trainer's methods, its optimizer, and a checkpoint
- launcher: settings that come from `accelerate launch` rather than from the arguments
- signatures: overrides and callbacks that Transformers cannot call
- own_step: a `training_step` of the user's own, tried once
- data: the training set and its collator
- records: copies of rows, rows of one text or person, and users in both sets
- values, limits: numbers of the data that the model cannot take
- text_labels: labels that are texts
- rows_without_numbers: rows of NaN or without tokens, for which a loss of the user's own has no value
- answers: positions of answers outside of their rows
- model: models that are refused by their settings
- examples: losses and the engine's gradients of a few examples, against plain autograd
- autograd_check: how the check of `examples` compares them
- loss: whether the model's own loss is the one that is trained
- loop: the optimizer and the learning rate
- saved_weights: whether the saved files will hold the model that is trained
- loaded_adapters: whether a saved adapter, once it is loaded, gives the trained model back
- rehearsal: a small evaluation and checkpoint
- search: a hyperparameter search, before its first trial
- metrics: compute_metrics on the labels of the whole evaluation set
- user_errors: reasons for errors that the user's own code raises later
"""
