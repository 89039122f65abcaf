"""The likelihood ratio of one round of random allocation, exact except for rounding that only adds privacy loss.

A unit takes part in a round with probability n·q, in one of n turns that is chosen uniformly and in secret. In units of the
noise, its gradient shifts a standard normal by s = 1/σ. With R the density with the unit over that without it,

    R = 1 − n·q + q·(Y_1 + … + Y_n),    Y_i = exp(s·z_i − s²/2),    z_i independent standard normals without the unit.

With one turn this is Poisson sampling. No adaptive mechanism is worse (docs/method/accounting.md). At ε, the removal of a
unit costs δ = E(R − e^ε)₊ and its addition δ = E(1 − e^ε·R)₊, both convex in R. So each step below may replace a value by a
smaller and a larger value with the same mean, which raises both δ (Doroshenko et al. 2022,
https://arxiv.org/abs/2207.04380). Beyond the ends of a grid, these two values are 0 and infinity.

The distribution of the sum is a power of a Fourier transform. The terms differ by many orders of magnitude, so terms above a
limit are treated separately. The limit is set so that two such terms in one round have negligible probability.
"""

import functools
import itertools
import math
import operator
from typing import Final, NamedTuple

import numpy as np
import scipy.fft
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

Array = NDArray[np.floating]

LARGEST_SHIFT: Final = 25.0  # At this s the privacy loss is about 300; the exponential of a larger loss may overflow.
_REACH: Final = 8.2  # Standard deviations of a normal on the grid; a probability of 10⁻¹⁶ is beyond.
_OF_SHIFT: Final = 0.02  # The smallest spacing of ln Y, in standard deviations: a thousand points.
# The largest spacing of a sum, relative to the spacing of its mean, and to a term's standard deviation and variance.
_OF_SPACING, _OF_STD, _OF_VARIANCE = 0.5, 0.04, 0.005
_LARGEST_SUM: Final = 2**18  # The largest number of points for a sum.
_CAPPED: Final = 0.02  # The share of rounds in which a term is capped, for addition.
_BESIDE_A_LARGE_TERM: Final = 128  # The points for the sum of the small terms beside a large one.
# The rounding error of all values of a power of a Fourier transform together, for each thousand terms.
_ROUNDING: Final = 1e-12
_LARGEST_GRID: Final = 2**18  # points to either side of ln R = 0


class Ratio(NamedTuple):
    """The distribution of a ratio on the grid e^(h·k): its masses without and with the unit.

    In addition, the ratio may be 0 without the unit, and infinite with the unit.
    """

    first: int  # k of the first point
    without: Array
    with_unit: Array
    at_zero: float
    at_infinity: float


class _Masses(NamedTuple):
    """Values in any order, and their masses without and with the unit."""

    values: Array
    without: Array
    with_unit: Array


def round_ratio(noise_multiplier: float, rate: float, turns: int, *, spacing: float, lost: float) -> Ratio:
    """Return the distribution of R for σ ≥ 1/LARGEST_SHIFT and n turns of probability q ≤ 1/n each; with no turn R is 1.

    The grid has the spacing h in ln R. Mass of about `lost` may move to 0 and to infinity.
    """
    if turns == 0:
        return Ratio(0, np.ones(1), np.ones(1), 0.0, 0.0)
    share = min(turns * rate, 1.0)
    shift = 1.0 / noise_multiplier
    term = _lognormal(shift, max(spacing, _OF_SHIFT * shift))
    parts, errors = ([term], 0.0) if turns == 1 else _means(term, turns, spacing=spacing, lost=lost)
    values, without, with_unit = (np.concatenate(each) for each in zip(*parts, strict=True))
    at_zero, at_infinity = (max(0.0, 1.0 - float(mass.sum())) + errors for mass in (without, with_unit))
    if share < 1.0:
        values, without, with_unit = np.append(values, 0.0), np.append(without, at_zero), np.append(with_unit, 0.0)
        values, with_unit = 1.0 - share + share * values, (1.0 - share) * without + share * with_unit
        at_zero, at_infinity = 0.0, share * at_infinity
    ratio = _on_log_grid(_Masses(values, without, with_unit), at_zero, at_infinity, spacing=spacing, lost=lost)
    if turns == 1 or ratio.at_zero <= 2.0 * lost:
        return ratio
    # Often, most terms are smaller than the spacing of a grid that reaches up to the largest term. Then the terms are capped
    # for the part without the unit.
    at_zero = _ROUNDING * max(1.0, turns / 1000.0)
    lower = _on_log_grid(_capped_ratio(term, shift, turns, share), at_zero, 0.0, spacing=spacing, lost=lost)
    first, ((without, _), (_, with_unit)) = _padded(lower, ratio)
    return Ratio(first, without, with_unit, lower.at_zero, ratio.at_infinity)


def _capped_ratio(term: _Masses, shift: float, count: int, share: float) -> _Masses:
    """Return R without the unit on a fine grid, with large terms lowered to a cap, which raises δ of addition."""
    cap = math.exp(-float(ndtri(_CAPPED / count)) * shift - shift**2 / 2)
    step = count * cap / (_LARGEST_SUM - 2)
    capped = _Masses(np.minimum(term.values, cap), term.without, np.zeros_like(term.values))
    without, _ = _on_multiples(capped, step, _LARGEST_SUM)
    without[0] += max(0.0, 1.0 - float(without.sum()))
    sums = np.maximum(scipy.fft.irfft(scipy.fft.rfft(without) ** count, _LARGEST_SUM), 0.0)
    return _Masses(1.0 - share + share / count * step * np.arange(_LARGEST_SUM), sums, np.zeros_like(sums))


def mixed(first: Ratio, second: Ratio, *, share: float) -> Ratio:
    """Return the ratio for an attacker who faces `second` with probability `share`, else `first`, and knows which."""
    low, (one, other) = _padded(first, second)
    without, with_unit = ((1.0 - share) * a + share * b for a, b in zip(one, other, strict=True))
    at_zero, at_infinity = ((1.0 - share) * a + share * b for a, b in zip(first[3:], second[3:], strict=True))
    return Ratio(low, without, with_unit, at_zero, at_infinity)


def _padded(*ratios: Ratio) -> tuple[int, list[list[Array]]]:
    """Return the first point of a common grid, and the masses of all ratios on it."""
    first, last = min(each.first for each in ratios), max(each.first + len(each.without) for each in ratios)
    return first, [
        [np.pad(mass, (each.first - first, last - each.first - len(mass))) for mass in (each.without, each.with_unit)]
        for each in ratios
    ]


def _lognormal(shift: float, spacing: float) -> _Masses:
    """Return Y = exp(s·z − s²/2)."""
    most = math.ceil((_REACH * shift + shift**2 / 2) / spacing)
    grid = spacing * np.arange(-most, most + 1)
    # The masses of the standard normal between neighbouring edges are computed with all digits in both tails.
    edges = (grid / shift + sign * shift / 2 for sign in (1, -1))
    without, with_unit = (np.where(x[:-1] > 0.0, -np.diff(ndtr(-x)), np.diff(ndtr(x))) for x in edges)
    # The mass of a cell is divided between its ends such that the mean of Y stays the same.
    up = np.clip((with_unit * np.exp(-grid[:-1]) - without) / math.expm1(spacing), 0.0, without)
    up_with_unit = np.clip(np.exp(grid[1:]) * up, 0.0, with_unit)
    return _Masses(
        np.exp(grid),
        np.append(without - up, 0.0) + np.append(0.0, up),
        np.append(with_unit - up_with_unit, 0.0) + np.append(0.0, up_with_unit),
    )


def _means(term: _Masses, count: int, *, spacing: float, lost: float) -> tuple[list[_Masses], float]:
    """Return the mean of `count` terms, one of which has the unit, in parts, and the mass that may be misplaced."""
    # The limit is chosen such that two terms above it in one round have negligible mass.
    above, above_with_unit = (np.append(np.cumsum(mass[:0:-1])[::-1], 0.0) for mass in term[1:])
    limit = 1 + int(np.argmax(count * above * np.maximum(above_with_unit, count * above) <= lost / 4.0))
    small, large = (_Masses(*(each[part] for each in term)) for part in (slice(limit), slice(limit, None)))
    variance = math.expm1(min(2.0 * float(term.with_unit @ np.log(term.values)), 600.0))
    finest = min(_OF_SPACING * count * spacing, _OF_STD * math.sqrt(variance), _OF_VARIANCE * variance)
    at_zero = max(0.0, 1.0 - float(small.without.sum()) - float(large.without.sum()))
    largest = float(small.values[-1])
    for reach in itertools.accumulate(itertools.repeat(2.0), operator.mul, initial=max(1.5 * largest, 2.0 * count)):
        size = min(int(scipy.fft.next_fast_len(math.ceil(reach / finest) + 2, real=True)), _LARGEST_SUM)
        whole, beside, wrapped = _sums(small, at_zero, count, step=max(finest, reach / (size - 2)), size=size)
        if wrapped <= lost / 4.0 or reach > count * largest:
            break
    parts = [_Masses(whole.values / count, whole.without, whole.with_unit)]
    if len(large.values):
        # Without the unit, any term may be the large one. With the unit, it is the unit's own turn or another turn.
        values = np.add.outer(large.values, beside.values) / count
        without = count * np.outer(large.without, beside.without)
        with_unit = np.outer(large.with_unit, beside.without) + (count - 1) * np.outer(large.without, beside.with_unit)
        parts.append(_Masses(values.ravel(), without.ravel(), with_unit.ravel()))
    return parts, wrapped + _ROUNDING * max(1.0, count / 1000.0)


def _sums(term: _Masses, at_zero: float, count: int, *, step: float, size: int) -> tuple[_Masses, _Masses, float]:
    """Return the sum of `count` terms, the sum of one term less on fewer points, and the mass that wraps around."""
    without, with_unit = _on_multiples(term, step, size)
    without[0] += at_zero
    first, second = scipy.fft.rfft(without), scipy.fft.rfft(with_unit)
    others = first ** (count - 2)

    def masses(*factors: NDArray[np.complex128]) -> Array:
        return np.maximum(scipy.fft.irfft(functools.reduce(np.multiply, factors), size), 0.0)

    at = step * np.arange(size)
    whole = _Masses(at, masses(others, first, first), masses(others, first, second))
    fewer = _Masses(at, masses(others, first), masses(others, second))
    # Mass that wraps around lowers the mean by the length of the circle. The true mean is known, so the mass follows.
    total, total_with_unit = float(without.sum()), float(with_unit.sum())
    mean = float(at @ with_unit) * total + (count - 1) * total_with_unit * float(at @ without)
    mean *= total ** (count - 2)
    wrapped = max(0.0, mean - float(at @ whole.with_unit)) / (step * size)
    coarse = at[-1] / (_BESIDE_A_LARGE_TERM - 1)
    beside = _Masses(coarse * np.arange(_BESIDE_A_LARGE_TERM + 1), *_on_multiples(fewer, coarse, _BESIDE_A_LARGE_TERM + 1))
    return whole, beside, wrapped


def _on_multiples(masses: _Masses, step: float, size: int) -> tuple[Array, Array]:
    """Return the masses on 0, step, 2 step, ..., each divided between its two neighbours such that the mean stays."""
    below = np.floor(masses.values / step).astype(np.int64)
    return _between(masses, below, step * below, step * (below + 1), size=size)


def _on_log_grid(masses: _Masses, at_zero: float, at_infinity: float, *, spacing: float, lost: float) -> Ratio:
    """Return the masses on e^(h·k), without the ends of the grid, whose mass is negligible."""
    farthest = min(spacing * _LARGEST_GRID, 700.0)
    is_near = (masses.values > math.exp(-farthest)) & (masses.values < math.exp(farthest))
    kept = _Masses(*(each[is_near] for each in masses))
    at_zero += float(masses.without[~is_near].sum())
    at_infinity += float(masses.with_unit[~is_near].sum())
    index = np.floor(np.log(kept.values) / spacing).astype(np.int64)
    first, size = int(index.min()), int(np.ptp(index)) + 2
    without, with_unit = _between(kept, index - first, np.exp(spacing * index), np.exp(spacing * (index + 1)), size=size)
    either = without + with_unit
    begin = int(np.searchsorted(np.cumsum(either), lost / 8.0))
    end = size - int(np.searchsorted(np.cumsum(either[::-1]), lost / 8.0))
    # Mass at the removed ends moves to 0 and infinity, like mass beyond the grid.
    at_zero += float(without[:begin].sum() + without[end:].sum())
    at_infinity += float(with_unit[:begin].sum() + with_unit[end:].sum())
    return Ratio(first + begin, without[begin:end], with_unit[begin:end], at_zero, at_infinity)


def _between(masses: _Masses, index: NDArray[np.int64], low: Array, high: Array, *, size: int) -> tuple[Array, Array]:
    up = np.clip((masses.values - low) / (high - low), 0.0, 1.0)
    # The masses with the unit are the values times the masses without it, which determines how they are divided.
    scale = np.divide(1.0, masses.values, out=np.ones_like(up), where=masses.values > 0.0)
    shares = ((masses.without, 1.0 - up, up), (masses.with_unit, (1.0 - up) * low * scale, up * high * scale))
    without, with_unit = (
        np.asarray(np.bincount(index, down * mass, size) + np.bincount(index + 1, rise * mass, size), dtype=np.float64)
        for mass, down, rise in shares
    )
    return without, with_unit
