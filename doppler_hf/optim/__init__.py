"""What happens to a private gradient after it was made: post-processing, which costs no privacy."""

from doppler_hf.optim.optimizer import DopplerOptimizer

__all__ = ["DopplerOptimizer"]
