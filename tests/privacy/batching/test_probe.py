"""The examples of the check before the first step."""

from types import SimpleNamespace

import numpy as np

from doppler_hf.privacy.batching import probe


def test_of_very_many_examples_the_short_ones_come_from_all_and_the_longest_is_the_longest(monkeypatch):
    monkeypatch.setattr(probe, "_SORTED", 1000)
    lengths = np.arange(5000, 0, -1)
    *short, longest = probe.candidates(SimpleNamespace(lengths=lengths, examples=[None] * 5000))
    assert longest == 0
    assert len(short) == 16
    assert lengths[short].max() <= 500  # of a thousand, the hundred shortest
