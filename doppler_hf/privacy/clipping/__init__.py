"""Per-sample gradients, clipped and summed.

- clipped_gradients: `ClippedGradients`: sums of what norms and factors leave
- clip_factors: norms, and by what gradients of such norms are multiplied
- sharded_sums: sums of which each process keeps its own rows
- engine: stand-ins for the layers' forward passes, and one backward pass
- book: the notes of the layers for it
- per_sample_gradient: what a per-sample gradient is, and the one in full
- factored: its forms that need no matrix for each example
- ghost_norm: the norm of a product from its factors, with a bound on rounding
- torch_layers, attention, recurrence: rules for the layers of torch
- host_layers, other_layers: rules for those of transformers and PEFT, and for all others
- out_of_memory: errors that say nothing about a layer
- refused_layers: layers that mix examples
- self_check: a comparison of the engine with plain autograd
- plain_autograd: the gradients that it is compared with
- at_fault: what makes an example's gradient change with the others
- as_in_training: the model for that comparison, without coins, autocast and zeros
- held_coins: torch's random numbers at their mean, for what attributes do not switch off
- model_coins: whether a loss depends on its example and on the global generators alone
- memory: what it remembers outside of the model's tensors
- first_pass: what the first pass keeps of its batch, outside of them
- writes: what a forward pass writes into a model
"""

from doppler_hf.privacy.clipping.clip_factors import Clipping
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Engine, Granularity
from doppler_hf.privacy.clipping.self_check import check_per_sample_gradients

__all__ = ["ClippedGradients", "Clipping", "Engine", "Granularity", "check_per_sample_gradients"]
