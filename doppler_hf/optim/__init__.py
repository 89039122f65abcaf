"""Right of the privacy boundary: optimizers on gradients that are private already. Nothing here may import the left."""

from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.low_pass_optimizer import LowPassOptimizer
from doppler_hf.optim.optimizer import DopplerOptimizer
from doppler_hf.optim.weight_filter import WeightFilter

__all__ = ["DopplerOptimizer", "LowPassOptimizer", "OptimalFIR", "WeightFilter"]
