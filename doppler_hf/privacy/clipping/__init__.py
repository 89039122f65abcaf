"""Per-sample gradients, clipped and summed.

- clipped_gradients: `ClippedGradients`: sums of what norms and factors leave
- clip_factors: the factors by which gradients are clipped
- engine: stand-ins for the layers' forward passes, and one backward pass
- book: the notes of the layers for it
- per_sample_gradient: the forms of a per-sample gradient, and its sums
- groups: gradients of several parameters together
- kernels: norms and sums on a GPU
- norms: norms of all forms, from their factors where they have some
- torch_layers, attention, recurrence: rules for the layers of torch
- experts: mixtures of experts, one example after another
- transformers_layers, other_layers: rules for layers of Transformers and PEFT, and for all others
- refused_layers: layers that mix examples
"""

from doppler_hf.privacy.clipping.clip_factors import Clipping
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Engine, Granularity

__all__ = ["ClippedGradients", "Clipping", "Engine", "Granularity"]
