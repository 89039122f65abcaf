"""The engine of per-sample gradients, compared with plain autograd on a few examples.

- beside: whether a loss changes with the examples beside it, by ranks, counts or a shared capacity
- comparison: gradients of a batch against those of its examples alone
- coupling: whether a loss reads the rows of other examples, exactly
- exact_sums: reference gradients in half precision, added up in float32
- moved_weights: trained weights moved for a second look, and given back
- numbers_of_rows: random numbers that belong to examples
- rounding: what rounding alone does to gradients
- trial: the reference gradients, and why an example's change with the others
- without_randomness: the model in training mode, without chance
"""
