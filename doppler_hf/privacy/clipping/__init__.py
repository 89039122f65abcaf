"""Per-sample gradients, clipped and summed.

- clipped_gradients: `ClippedGradients`: norms, factors, sums
- engine: stand-ins for the layers' forward passes, and one backward pass
- book: what layers note for it
- factored: the forms that a per-sample gradient has
- torch_layers, host_layers, other_layers: rules of layers: torch's, transformers' and PEFT's, and any other's
- unbatched: what the forward pass computes once for all examples
- refused_layers: layers that mix examples
- self_check: the engine held against plain autograd
"""

from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Clipping, Engine, Granularity
from doppler_hf.privacy.clipping.self_check import check_per_sample_gradients

__all__ = ["ClippedGradients", "Clipping", "Engine", "Granularity", "check_per_sample_gradients"]
