"""The engine of per-sample gradients, compared with plain autograd on a few examples.

- comparison: gradients of a batch against those of its examples alone
- coupling: whether a loss reads the rows of other examples, exactly
- trial: the reference gradients, and why an example's change with the others
- without_randomness: the model in training mode, without chance
"""
