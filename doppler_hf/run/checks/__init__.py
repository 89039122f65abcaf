"""All that is checked before the first step, in this order, so that a mistake costs no ε.

- trainer: the trainer's methods, its optimizer, and a checkpoint
- data: the training set and its collator
- values, limits: numbers of the data that the model cannot take
- model: models that are refused by their settings
- examples: losses and the engine's gradients of a few examples, against plain autograd
- loss: whether the model's own loss is the one that is trained
- rehearsal: a small evaluation and checkpoint
- user_errors: errors of the user's own code later, with their reason
"""
