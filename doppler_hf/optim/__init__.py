"""Right of the privacy boundary: optimizers on gradients that are private already. Nothing here may import the left.

- optimizer: Algorithm 2, step by step
- checks: what it refuses
- low_pass, second_moment, galore, adaptive_fir: its stages, as functions of tensors
- update, one_pass: the stages in one pass over memory: of one tensor, of all
- rounding, state: bfloat16 second moments; checkpoints without loss
- low_pass_optimizer: the filter ahead of any torch optimizer
- weight_filter: the filter on the weights
"""

from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.low_pass_optimizer import LowPassOptimizer
from doppler_hf.optim.optimizer import DopplerOptimizer
from doppler_hf.optim.weight_filter import WeightFilter

__all__ = ["DopplerOptimizer", "LowPassOptimizer", "OptimalFIR", "WeightFilter"]
