"""The digest of a data set tells other examples, and the same ones in another order."""

import numpy as np
import pytest

from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.same_data import digest_of_data
from doppler_hf.privacy.batching.sampling import AllocationSampler
from tests.support.tiny import text_data


def digest(data, *, units=None):
    sampler = AllocationSampler(num_examples=len(data), expected_batch_size=2, lengths=lengths_of(data), units=units)
    return digest_of_data(data, sampler)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.shuffle(seed=1),
        lambda data: data.select(range(23)),
        lambda data: data.remove_columns("input_ids").shuffle(seed=1),
    ],
    ids=["another order", "one less", "labels alone, in another order"],
)
def test_other_data_have_another_digest(change):
    data = text_data()
    changed = change(data)
    assert digest(changed) != digest(data.select_columns(changed.column_names))
    assert digest(data) == digest(text_data())


def test_other_units_have_another_digest():
    units = np.arange(24) // 2
    assert digest(text_data(), units=units) != digest(text_data(), units=units[::-1].copy())
