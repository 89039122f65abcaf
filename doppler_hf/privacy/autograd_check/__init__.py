"""The engine of per-sample gradients, compared with plain autograd on a few examples.

- beside: whether an example's loss changes with the examples beside it
- comparison: gradients of a batch against those of its examples alone
- coupling: whether a loss reads the rows of other examples, exactly
- exact_sums: gradients in half precision that add up in float32
- moved_weights: the model with trained weights that have moved, for a second look
- rounding: what rounding alone does to gradients
- trial: the reference gradients, and why an example's change with the others
- without_randomness: the model in training mode, without chance
"""
