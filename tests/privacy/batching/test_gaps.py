"""Gaps give independent coins: exact probabilities by fractions, and statistics with their false alarms."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

from doppler_hf.privacy.batching.gaps import RareCoins, digit_probabilities
from doppler_hf.privacy.bits import BitStream, bit_stream

RATES = [Fraction(1, 3), Fraction(1, 2), Fraction(999, 1000), Fraction(1, 100_000_000), Fraction(1)]


@pytest.mark.parametrize("rate", RATES)
def test_the_law_of_a_gap_is_geometric(rate):
    """Computed from the probabilities that are compared, in whole numbers: each gap up to 63, and that of more."""
    unit, count = Fraction(1, 2**128), 64
    *digits, beyond = (value * unit for value in digit_probabilities(rate, count=count))
    total = Fraction(0)
    for gap in range(count):
        chance = 1 - beyond
        for place, digit in enumerate(digits):
            chance *= digit if gap >> place & 1 else 1 - digit
        if gap >> len(digits):
            chance = Fraction(0)
        total += chance
        assert abs(chance - rate * (1 - rate) ** gap) <= 7 * unit  # six digits and the end, rounded down each
    assert abs(1 - total - (1 - rate) ** count) <= 7 * unit


def shown_by(rate, count):
    shown = np.zeros(count, dtype=int)
    heads = RareCoins(rate, count=count, stream=bit_stream(None, purpose="test")).heads(step=0)
    assert np.all(np.diff(heads) > 0)  # none twice, where one portion ends and the next begins
    shown[heads] = 1
    return shown


@pytest.mark.parametrize("at_once", [1 << 15, 1000], ids=["as in training", "in many portions"])
def test_coins_are_as_likely_and_independent(at_once, monkeypatch):
    monkeypatch.setattr("doppler_hf.privacy.batching.gaps._AT_ONCE", at_once)
    size, trials, rate = 10, 40_000, 0.3
    # All 1,024 outcomes of ten coins at once, χ² goodness of fit: one false alarm in a million runs.
    outcomes = np.bincount(shown_by(Fraction(3, 10), size * trials).reshape(trials, size) @ (1 << np.arange(size)))
    heads = np.array([number.bit_count() for number in range(2**size)])
    expected = trials * rate**heads * (1 - rate) ** (size - heads)
    rare, found = expected < 5, np.pad(outcomes, (0, 2**size - len(outcomes)))
    observed, wanted = np.append(found[~rare], found[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-6


@pytest.mark.parametrize(("rate", "count", "found"), [(Fraction(1), 7, [*range(7)]), (Fraction(1, 2), 0, [])])
def test_all_coins_and_none(rate, count, found):
    coins = RareCoins(rate, count=count, stream=bit_stream(None, purpose="test"))
    assert coins.heads(step=0).tolist() == found


class Told(BitStream):
    """Words that are told."""

    is_secret = False

    def __init__(self, *calls):
        self._calls = list(calls)

    def fill(self, words, *, step):
        """Never asked: `bits` is."""
        raise AssertionError

    def bits(self, count, *, step):
        found = np.array(self._calls.pop(0), dtype=np.uint64)
        assert len(found) == count
        return found


@pytest.mark.parametrize(("difference", "gap"), [(-1, 1), (0, 0)])
def test_the_next_64_bits_decide_where_the_first_are_equal(difference, gap):
    digit, _ = digit_probabilities(Fraction(1, 3), count=2)
    first, last = divmod(digit, 2**64)
    assert last > 0
    stream = Told([first, 2**64 - 1], [last + difference])
    coins = RareCoins(Fraction(1, 3), count=2, stream=stream)
    assert coins._gaps(1, step=0).tolist() == [gap]
