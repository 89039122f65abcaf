"""The examples of a step: the draw, and its micro-batches.

- sampling: the draw, and its rate
- columns: lengths, units of privacy and labels of all examples, read off their table
- data_digest: a digest of the rows in their order, by which a resumed run recognises its data
- repeats: whether a row stands in the data more than once
- probe: a few examples for the check before the first step
- collators: batches of them, from which no example is read off for all
- micro_batches: the loader that fetches, cuts and collates a draw
"""

from doppler_hf.privacy.batching.sampling import AllocationSampler

__all__ = ["AllocationSampler"]
