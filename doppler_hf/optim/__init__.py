"""Right of the privacy boundary: optimizers on gradients that are private already. Nothing here may import the left.

- optimizer, update: Algorithm 3: `step` for all parameters, and for one, with the filter
- fused_update: for all on a GPU, in one kernel
- galore: its subspaces
- muon: updates with equal singular values
- checkpoint: states are loaded without loss
"""

from doppler_hf.optim.optimizer import DopplerOptimizer

__all__ = ["DopplerOptimizer"]
