"""Right of the privacy boundary: optimizers on gradients that are private already. Nothing here may import the left.

- optimizer, update: Algorithm 3: `step` for all parameters, and for one
- checks: the ranges of its arguments
- low_pass, adaptive_fir: a fixed filter, and one that follows the gradients
- galore: its subspaces
- one_pass: `update` in one pass over memory
- rounding, state: bfloat16 second moments; checkpoints without loss
- low_pass_optimizer: the filter ahead of any torch optimizer
- weight_filter: the filter on the weights
"""

from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.low_pass_optimizer import LowPassOptimizer
from doppler_hf.optim.optimizer import DopplerOptimizer
from doppler_hf.optim.weight_filter import WeightFilter

__all__ = ["DopplerOptimizer", "LowPassOptimizer", "OptimalFIR", "WeightFilter"]
