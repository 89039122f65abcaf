"""The engine of per-sample gradients, compared with plain autograd on a few examples.

- comparison: gradients of a batch against those of its examples alone
- coupling: whether a loss reads the rows of other examples, exactly
- plain_autograd: the reference gradients
- explanation: what makes an example's gradient change with the others
- without_randomness: the model in training mode, without chance
"""

from doppler_hf.privacy.autograd_check.comparison import check_per_sample_gradients

__all__ = ["check_per_sample_gradients"]
