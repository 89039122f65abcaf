"""Heads among very many independent coins, by the gaps between them: exact in law, and tails cost nothing.

With P(head) = q and r = 1 − q the number G of tails ahead of a head has P(G = g) = q·r^g. As r^g is the product of r^(2^i)
over those binary digits i of g that are 1, the digits of G are independent:

    P(digit i of G is 1) = r^(2^i) / (1 + r^(2^i)),        P(G ≥ 2^m) = r^(2^m).

So a gap is a comparison of integers for each digit, without logarithms, whose rounding would favour some places over
others. Each comparison is of 128 uniform bits with a probability that was rounded to 128 bits; the last 64 are drawn only
if the first 64 are equal. A training of 2⁴⁰ gaps of at most 64 digits is thus within 2⁴⁰·2⁶·2⁻¹²⁸ = 2⁻⁸² of independent
coins in total variation. That is what it may add to δ, but for a factor of at most 1 + e^ε.

See also: K. Bringmann, T. Friedrich, *Exact and Efficient Generation of Geometric Random Variates and Random Graphs*,
2013, who draw the high and the low digits of a gap apart.
"""

import math
from fractions import Fraction
from typing import Final, final

import numpy as np
from jaxtyping import Int

from doppler_hf.privacy.bits import BitStream

_WORD: Final = 64
# Each of at most 64 squarings doubles an error of 2⁻²⁵⁶, which leaves more than the 128 bits that are compared.
_PRECISION: Final = 256
_AT_ONCE: Final = 1 << 15  # gaps, of at most 64 words of 8 bytes: 16 MiB


def digit_probabilities(rate: Fraction, *, count: int) -> list[int]:
    """Return the probabilities of the digits of a gap, and of one of 2^m or more that ends the coins, in units of 2⁻¹²⁸."""
    one = 1 << _PRECISION
    power = one - (rate.numerator << _PRECISION) // rate.denominator
    probabilities: list[int] = []
    while power >> _WORD * 2 and 1 << len(probabilities) < count:
        probabilities.append((power << 2 * _WORD) // (one + power))
        power = power * power >> _PRECISION
    return [*probabilities, power >> _PRECISION - 2 * _WORD]


@final
class RareCoins:
    """Independent coins, each heads with the same probability."""

    def __init__(self, rate: Fraction, *, count: int, stream: BitStream) -> None:
        self._rate, self._count, self._stream = float(rate), count, stream
        probabilities = digit_probabilities(rate, count=count)
        self._first, self._last = (
            np.array([value >> shift & 2**_WORD - 1 for value in probabilities], dtype=np.uint64) for shift in (_WORD, 0)
        )
        self._values = 1 << np.arange(len(probabilities))

    def heads(self, *, step: int) -> Int[np.ndarray, " heads"]:
        """Return which coins show heads, ascending, at an optimizer step."""
        found, decided = [], 0
        while decided < self._count:
            # Enough for what is left, mostly. However many gaps are drawn, the coins behind them are independent of them.
            mean = self._rate * (self._count - decided)
            gaps = self._gaps(min(_AT_ONCE, math.ceil(mean + 4 * math.sqrt(mean) + 1)), step=step)
            places = decided + np.cumsum(gaps + 1) - 1
            found.append(places[places < self._count])
            decided = int(places[-1]) + 1
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _gaps(self, number: int, *, step: int) -> Int[np.ndarray, " number"]:
        words = self._stream.bits(number * len(self._values), step=step).reshape(number, -1)
        digits = words < self._first
        ties = words == self._first
        if ties.any():
            digits[ties] = self._stream.bits(int(ties.sum()), step=step) < self._last[np.nonzero(ties)[1]]
        return digits @ self._values
