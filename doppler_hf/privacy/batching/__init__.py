"""The examples of a step: the Poisson draw, and its micro-batches.

- sampling: the draw, and its rate
- micro_batches: lengths, units of privacy, and collating a draw
- loader: the private data loader
"""

from doppler_hf.privacy.batching.sampling import PoissonSampler

__all__ = ["PoissonSampler"]
