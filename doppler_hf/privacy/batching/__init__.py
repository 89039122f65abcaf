"""The examples of a step: the draw, and its micro-batches.

- sampling: the draw, and its rate
- columns: lengths, units of privacy and labels of all examples
- repeats: whether a row stands in the data more than once
- same_data: whether all processes have the same examples
- probe: a few examples for the check before the first step
- fetching: examples, each as it is by itself
- collators: batches of them, from which no example is read off for all
- micro_batches: the loader that cuts and collates a draw
"""

from doppler_hf.privacy.batching.sampling import AllocationSampler

__all__ = ["AllocationSampler"]
