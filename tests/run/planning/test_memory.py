"""Memory is a contract: what a private step has in use at most, against a plain one of the same micro-batches."""

import pytest

from scripts.bench.memory import CONTRACT, SIZES, WAYS, WORKS, peak_bytes
from tests.support.pairwise import pairwise
from tests.support.tiers import further

VOCABULARIES = [1000, None]  # a small head hides nothing
QUICK = [("gpt2", "lora", SIZES[0], None), ("gpt2", "full", SIZES[0], 1000)]
CASES = further([*dict.fromkeys([*QUICK, *pairwise([*WORKS], WAYS, SIZES, VOCABULARIES)])], quick=QUICK)


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(("name", "way", "size", "vocabulary"), CASES)
def test_a_private_step_takes_little_more_memory_than_a_plain_one(name, way, size, vocabulary):
    changes = {} if vocabulary is None else {"vocab_size": vocabulary}
    plain, private = (
        peak_bytes(name, way, size=size[0], length=size[1], is_private=each, layers=2, **changes)[0]
        for each in (False, True)
    )
    assert private <= CONTRACT[way] * plain, private / plain
