"""What the training scripts share. Each script itself reads from top to bottom.

- arguments: a recipe and the flags after it, read into dataclasses
- recipe: the script that a recipe is for
- data_sources: the data, from the hub, a package or a folder
- language_model: arguments, rows and model of the four scripts for language models
- models: tokenizers, and the names of classes
- labelled_texts, samples, synthetic_card: prompts of labels, texts sampled from a model, and the folder of them
- label_histogram: how many records have each label, with noise
- finished_model: what the model in a folder was trained with
- hub: one line when a download from the hub fails
- lora: adapters
- frozen_layers: the lowest layers of an encoder, computed once
- metrics: scores
"""
