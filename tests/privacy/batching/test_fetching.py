"""Of what is fetched with it, an example does not depend on the others."""

import numpy as np
import pytest
from datasets import Dataset

from doppler_hf.privacy.batching.fetching import fetch


@pytest.mark.parametrize("form", [None, "torch", "numpy", "pandas"])
def test_a_null_of_one_example_does_not_round_the_numbers_of_others(form):
    """`datasets` makes floats of all integers that it converts at once, if one of them is missing."""
    data = Dataset.from_dict({"seen": [[2**24 + 1, 1], [None, 2], [5, 6]], "at": [2**24 + 1, None, 5]}).with_format(form)
    alone, beside = (fetch(data, indices, fill=lambda: None)[0] for indices in ([0], [0, 1, 2]))
    for name in ("seen", "at"):
        assert np.asarray(beside[name]).dtype == np.asarray(alone[name]).dtype
        assert np.array_equal(beside[name], alone[name])


def test_a_subclass_that_makes_several_rows_of_one_is_refused():
    class Pieces(Dataset):
        def __getitems__(self, keys):
            return [piece for row in super().__getitems__(keys) for piece in [row] * row["number"]]

    data = Dataset.from_dict({"number": [1, 1, 2]})
    data.__class__ = Pieces
    assert fetch(data, [1, 0], fill=lambda: None) == [{"number": 1}] * 2
    with pytest.raises(ValueError, match="train_dataset must return one row for each example, got more or fewer"):
        fetch(data, [0, 2], fill=lambda: None)
