"""Compare the engine of per-sample gradients with plain autograd on a few examples.

- batch_dependence: whether a loss changes with the other examples of its batch, by ranks, counts or a shared capacity
- comparison: gradients of a batch against gradients of its examples alone
- coupling: an exact check whether a loss reads the rows of other examples
- exact_sums: reference gradients in half precision, added up in float32
- moved_weights: trained weights, moved for a second check and restored
- row_randomness: random numbers that belong to examples
- rounding: the effect of rounding alone on gradients
- compared_examples: the reference gradients, and why an example's gradient changes with the other examples
- without_randomness: the model in training mode, without randomness
"""
