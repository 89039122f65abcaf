"""Optimizers on gradients that are already private, right of the privacy boundary. Nothing here may import the left side.

- optimizer, update: Algorithm 3 with the filter, for all parameters (`DopplerOptimizer.step`) and for one (`update`)
- fused_update: the update of all parameters on a GPU, in one kernel
- galore: the subspaces of GaLore
- muon: updates with equal singular values
- checkpoint: loads the optimizer's state without loss of precision
"""

from doppler_hf.optim.optimizer import DopplerOptimizer

__all__ = ["DopplerOptimizer"]
