"""Composition of rounds: dp-accounting composes their privacy loss distributions, for removal and for addition of a unit.

Every number is rounded such that ε and δ only grow, and mass beyond a grid counts as an infinite loss. A unit takes part at
most once in a round, so all rounds together are never worse than the Gaussian mechanism with (Σ σ⁻²)^(−1/2). This holds
without amplification, and bounds ε if the noise is too small for a grid.
"""

import functools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, identity
from scipy.optimize import brentq
from scipy.stats import norm

from doppler_hf.privacy.accounting.round_loss import LARGEST_SHIFT, mixed, round_ratio

SMALLEST_DELTA: Final = 1e-10  # For a smaller δ, the rounding of Fourier transforms is not small in comparison.
_LARGEST_GRID: Final = 2**16  # The largest number of points for the loss of a round.
# Attacks are bounded up to ε = ln 10⁴, because a larger ε matters only for false-positive rates below 10⁻⁴.
_CURVE_EPSILONS: Final = np.linspace(0.0, math.log(1e4), 500)
_LOST_OF_A_CURVE: Final = 1e-8
_MOST_BEYOND: Final = 0.01  # If all rounds together have more mass beyond the grid, the bound is useless.


class Rounds(NamedTuple):
    """A number of equal rounds. A unit takes part at most once in each of them."""

    noise_multiplier: float  # σ > 0
    rate: float  # the probability with which a unit takes part in one turn
    turns: int  # n, the turns of a round
    number: int
    longer: float = 0.0  # In an incomplete round, the share of groups that have one turn more.

    def of_group(self, *, is_longer: bool) -> "Rounds":
        """Return the rounds of one group."""
        return self._replace(turns=self.turns + (is_longer and self.longer > 0.0), longer=0.0)


def epsilons_of(rounds: Sequence[Rounds], *, delta: float, coarsening: int = 1) -> tuple[float, float]:
    """Return upper bounds on ε at δ ≥ SMALLEST_DELTA for at least one round: for removing and for adding a unit.

    They hold on every grid, also if it is coarser than usual.
    """
    gaussian = gaussian_epsilon(_joint_mu(rounds), delta=delta)
    # Mass beyond the grid counts as an infinite loss. A ten-thousandth of δ hardly changes ε.
    composed = _composed(rounds, lost=1e-4 * delta, coarsening=coarsening)
    if composed is None:
        return gaussian, gaussian
    removal, addition = (min(float(each.get_epsilon_for_delta(delta)), gaussian) for each in composed)
    return removal, addition


def delta_curve(rounds: Sequence[Rounds], epsilons: np.ndarray = _CURVE_EPSILONS) -> tuple[np.ndarray, np.ndarray]:
    """Return values of ε ≥ 0, and an upper bound on δ for each, of removing and of adding a unit."""
    deltas = gaussian_delta(_joint_mu(rounds), epsilons)
    composed = _composed(rounds, lost=_LOST_OF_A_CURVE, coarsening=4)
    if composed is not None:
        deltas = np.minimum(deltas, np.max([each.get_delta_for_epsilon(epsilons) for each in composed], axis=0))
    return epsilons, np.clip(deltas, 0.0, 1.0)


def gaussian_delta(mu: float, epsilon: np.ndarray) -> np.ndarray:
    """Return δ of a Gaussian mechanism with sensitivity µ in units of its noise.

    Balle & Wang 2018, https://arxiv.org/abs/1805.06530, Theorem 8.
    """
    return np.asarray(norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)))


def gaussian_epsilon(mu: float, *, delta: float) -> float:
    """Return an upper bound on ε of a Gaussian mechanism with sensitivity µ in units of its noise."""

    def excess(epsilon: float) -> float:
        return float(gaussian_delta(mu, np.array(epsilon))) - delta

    if excess(0.0) <= 0.0:
        return 0.0
    largest = mu**2 / 2 - mu * float(norm.ppf(delta)) + 1.0  # Here the first of the two terms is below δ.
    return float(brentq(excess, 0.0, largest)) * (1.0 + 1e-9)


def _joint_mu(rounds: Sequence[Rounds]) -> float:
    return math.sqrt(sum(each.number / each.noise_multiplier**2 for each in rounds))


def _composed(rounds: Sequence[Rounds], *, lost: float, coarsening: int) -> list[PrivacyLossDistribution] | None:
    """Return the distributions of all rounds together, for removal and for addition; None if the noise is too small.

    Mass of about `lost` is beyond their grid.
    """
    if any(each.noise_multiplier * LARGEST_SHIFT < 1.0 for each in rounds):
        return None
    total = sum(each.number for each in rounds)
    # A power of 2 stays the same for similar numbers of rounds, which the cache needs.
    lost_of_each = 2.0 ** math.floor(math.log2(lost / total))
    scales = [_scales(each, lost_of_each) for each in rounds]
    # A spacing h adds about h²/6 to the variance of a round's loss. If h is a 25th of the root of the mean variance, ε is
    # about 1e-4 too large. For losses that are rarely large, the length of the grid is capped, and the spread is capped at a
    # 40th of the largest loss.
    variance = sum(
        min(spread, farthest / 40.0) ** 2 * each.number for (spread, farthest), each in zip(scales, rounds, strict=True)
    )
    spacing = coarsening * max(math.sqrt(variance / total) / 25.0, max(far for _, far in scales) / _LARGEST_GRID)
    composed = [identity(spacing)] * 2
    for each in rounds:
        *distributions, beyond = _one_round(each._replace(number=1), spacing, lost_of_each)
        if beyond * each.number > _MOST_BEYOND:
            return None
        composed = [
            so_far.compose(distribution.self_compose(each.number))
            for so_far, distribution in zip(composed, distributions, strict=True)
        ]
    return composed


def _scales(of: Rounds, lost: float) -> tuple[float, float]:
    """Return the standard deviation of a round's ratio without the unit, and approximately the largest loss that matters."""
    shift = 1.0 / of.noise_multiplier
    spread = of.rate * math.sqrt((of.turns + of.longer) * math.expm1(min(shift**2, 100.0)))
    farthest = math.sqrt(-2.0 * math.log(lost)) * shift + shift**2 / 2
    others = max(1.0 - of.rate, 1e-300)
    return spread, float(np.logaddexp(math.log(others), math.log(of.rate) + farthest))


@functools.lru_cache(maxsize=8)  # The same round is composed for many different numbers of rounds.
def _one_round(of: Rounds, spacing: float, lost: float) -> tuple[PrivacyLossDistribution, PrivacyLossDistribution, float]:
    """Return the distributions of one round, for removal and for addition, and the mass beyond their grid.

    The group of a unit is a coin that does not depend on data. An attacker who knows the group sees the ratio of that group,
    so the distribution of an incomplete round is the mean of the groups' distributions.
    """
    ratio = round_ratio(*of[:3], spacing=spacing, lost=lost)
    if of.longer:
        longer = round_ratio(*of.of_group(is_longer=True)[:3], spacing=spacing, lost=lost)
        ratio = mixed(ratio, longer, share=of.longer)
    last = ratio.first + len(ratio.without) - 1
    removal = DensePLDPmf(spacing, ratio.first, ratio.with_unit, ratio.at_infinity, pessimistic_estimate=True)
    addition = DensePLDPmf(spacing, -last, ratio.without[::-1], ratio.at_zero, pessimistic_estimate=True)
    return PrivacyLossDistribution(removal), PrivacyLossDistribution(addition), max(ratio.at_zero, ratio.at_infinity)
