"""Whether all processes have the same examples in the same order, by what can be read of all of them at once.

Shares of processes, turns of shaped noise and units of privacy are by the numbers of examples. One that has one number here
and another there is drawn more often than is accounted for.
"""

import hashlib
from typing import Any

import numpy as np

from doppler_hf.privacy.batching.columns import labels_of
from doppler_hf.privacy.batching.sampling import AllocationSampler


def digest_of_data(dataset: Any, sampler: AllocationSampler) -> str:
    """Return a digest of the number of examples, their lengths, units and labels, 8 hexadecimal digits."""
    digest = hashlib.sha256(f"{sampler.num_examples}".encode())
    for values in (sampler.lengths, sampler.units, labels_of(dataset)):
        if values is not None:
            digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()[:8]
