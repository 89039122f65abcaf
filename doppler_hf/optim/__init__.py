"""Right of the privacy boundary: optimizers on gradients that are private already. Nothing here may import the left.

- optimizer, update: Algorithm 3: `step` for all parameters, and for one
- fused_update: for all on a GPU, in one kernel
- checks: the ranges of its arguments
- low_pass, adaptive_fir: a fixed filter, and one that follows the gradients
- galore: its subspaces
- state: checkpoints without loss
"""

from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.optimizer import DopplerOptimizer

__all__ = ["DopplerOptimizer", "OptimalFIR"]
