"""The examples of a step: the random batch, and its micro-batches.

- sampling: random batches, and their sample rate
- columns: lengths, units of privacy and labels of all examples, read from their table
- data_digest: a digest of the rows in their order, by which a resumed run recognises its data
- places: where the rows of a data set lie
- repeats: whether the data set contains a row more than once
- shared_rows: how many rows of a data set are also in another one
- cutting: how a batch is cut into the passes of the model
- probe: a few examples for the checks before the first step
- collators: collators in which no example decides for the others
- micro_batches: the loader that fetches a random batch, cuts it into micro-batches and collates them
"""

from doppler_hf.privacy.batching.sampling import AllocationSampler

__all__ = ["AllocationSampler"]
