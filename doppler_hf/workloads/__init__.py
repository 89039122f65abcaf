"""From a recipe to model and data: what the scripts and the command line train.

- recipe: a recipe, whichever kind of workload it is for
- arguments: a recipe and the flags after it, read into dataclasses
- workload: what all kinds have in common
- launch: train, save, evaluate
- glue, language_model, images: the kinds, the second for TRL too
- data_sources: the data, from the hub, a package or a folder
- metrics: scores
- mean_pooling: a head on the mean of all tokens
- lora: adapters
- frozen_layers: the lowest layers of an encoder, computed once
- random_model: a model and inputs by a configuration alone
- hub: one line when a download from the hub fails
"""
