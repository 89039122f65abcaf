"""Per-sample gradients, clipped and summed.

- clipped_gradients: `ClippedGradients`: sums of what norms and factors leave
- engine: stand-ins for the layers' forward passes, and one backward pass
- notes: what the layers note for it
- copies: a copy of a tensor for each example, which notes its gradient
- per_sample_gradient: the forms of a per-sample gradient, and its sums
- kernels: norms and sums on a GPU
- norms: norms of all forms, and the factors by which gradients are clipped
- torch_layers, attention, recurrence: rules for the layers of torch
- experts: mixtures of experts, one example after another
- transformers_layers, other_layers: rules for layers of Transformers and PEFT, and for all others
- layers, refused_layers: a layer's own parameters and modes; layers that mix examples
"""

from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Engine, Granularity
from doppler_hf.privacy.clipping.norms import Clipping

__all__ = ["ClippedGradients", "Clipping", "Engine", "Granularity"]
