"""Moments and samples of rounds of random allocation, under densities that make a large privacy loss likely.

    ρ = 1 − nq + q·(Y_1 + … + Y_n),    Y_i = exp(x_i/σ − 1/2σ²),    x_i independent standard normals without the unit.

`Removal` has the densities ρ^(k+1)/E ρ^(k+1), and `Addition` ρ^(−k)/E ρ^(−k), for orders k = 1, 2, .... For each k,
`log_moments` has the logarithm of the mean in the denominator, and `is_cheap` says whether samples are cheap.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from doppler_hf.privacy.accounting.composition import Rounds

Array = NDArray[np.floating]

ORDERS: Final = np.arange(1, 96)  # k
_LARGEST_EXPONENT: Final = 600.0
_LEAST_ACCEPTED: Final = 0.1  # If a smaller share of proposals is accepted, samples are too expensive.
_REACH: Final = 8.5  # A normal variable has a probability of 10⁻¹⁷ beyond so many standard deviations.
_OF_NORMAL: Final = 0.04  # Spacing of the trapezoidal rule over the normal variable.
_OF_LOG: Final = 0.06  # Spacing of the trapezoidal rule over ln t.


class Removal:
    """Samples under powers of ρ. The power is multiplied out: each term shifts every x_i by its power of Y_i, over σ."""

    def __init__(self, of: Rounds) -> None:
        self.of = of
        powers = np.arange(ORDERS[-1] + 2)
        logs = powers * math.log(of.rate) + powers * (powers - 1) / (2 * of.noise_multiplier**2) - gammaln(powers + 1)
        most = int(np.searchsorted(np.cumsum(logs > _LARGEST_EXPONENT), 1))
        # Entry a is q^a·E Y^a / a!, with E Y^a = exp(a(a − 1)/2σ²).
        self._turn = np.exp(logs[:most])
        # Entry (j, r) is the coefficient of x^r in e^((1 − nq)x)·(Σ_a q^a·E Y^a·x^a / a!)^j.
        self._shares = np.empty((of.turns + 1, most))
        self._shares[0] = max(1.0 - of.turns * of.rate, 0.0) ** powers[:most] * np.exp(-gammaln(powers[:most] + 1))
        for number in range(of.turns):
            self._shares[number + 1] = np.convolve(self._shares[number], self._turn)[:most]
        self.log_moments = np.full(len(ORDERS), np.inf)
        self.log_moments[: most - 2] = np.log(self._shares[-1, 2:]) + gammaln(powers[2:most] + 1)
        self.is_cheap = np.isfinite(self.log_moments)

    def sample(self, count: int, order: int, random: np.random.Generator) -> Array:
        """Return samples of x for `count` rounds, shape (count, n)."""
        some = np.arange(order + 2)
        powers = np.zeros((count, self.of.turns))
        left = np.full(count, order + 1)
        for place in range(self.of.turns):
            # Entry (row, column) is the probability that this turn takes at most `column` of the `row` factors that are
            # left.
            later = np.where(some <= some[:, None], self._shares[self.of.turns - place - 1, some[:, None] - some], 0.0)
            total = self._shares[self.of.turns - place, some, None]  # 0 if the case is too improbable to occur
            at_most = np.cumsum(self._turn[some] * later / np.maximum(total, np.finfo(np.float64).tiny), axis=1)
            uniform = random.random(count)
            taking = np.flatnonzero(uniform >= at_most[left, 0])
            taken = np.minimum((uniform[taking, None] >= at_most[left[taking]]).sum(axis=1), left[taking])
            powers[taking, place] = taken
            left[taking] -= taken
        return random.standard_normal(powers.shape) + powers / self.of.noise_multiplier


class Addition:
    """Samples under negative powers of ρ, by rejection.

    Proposals have the density of the same power of the weighted geometric mean of 1 and Y_i, which is never above ρ.
    """

    def __init__(self, of: Rounds) -> None:
        self.of = of
        self.log_moments = _log_negative_moments(of)
        # The geometric mean has a normal logarithm, so ln E of its power −k is known.
        spread = of.turns * of.rate / of.noise_multiplier**2
        self._log_accepted = self.log_moments - spread * ORDERS * (1.0 + of.rate * ORDERS) / 2
        # The power −k shifts the turns by up to k·q/σ, which must be within the range of the integral.
        is_near = ORDERS * of.rate / of.noise_multiplier < _REACH
        self.is_cheap = (self._log_accepted > math.log(_LEAST_ACCEPTED)) & is_near

    def sample(self, count: int, order: int, random: np.random.Generator) -> Array:
        """Return samples of x for `count` rounds, shape (count, n)."""
        found = np.empty((0, self.of.turns))
        shift, rate = 1.0 / self.of.noise_multiplier, self.of.rate
        left = max(1.0 - self.of.turns * rate, 0.0)
        while len(found) < count:
            size = math.ceil(1.1 * (count - len(found)) / math.exp(self._log_accepted[order - 1])) + 16
            proposed = random.standard_normal((size, self.of.turns)) - order * rate * shift
            logs = shift * proposed - shift**2 / 2
            above = np.log(left + rate * np.exp(logs).sum(axis=1)) - rate * logs.sum(axis=1)
            found = np.concatenate([found, proposed[random.random(size) < np.exp(-order * above)]])
        return found[:count]


def _log_negative_moments(of: Rounds) -> Array:
    """Return ln E ρ^(−k) for each k.

    ρ^(−k) = ∫ t^(k−1) e^(−tρ) dt / (k − 1)!, so the mean over n independent turns is a power. Both integrals have analytic
    integrands that decay at both ends, for which the error of the trapezoidal rule is exponentially small.
    """
    shift, left = 1.0 / of.noise_multiplier, max(1.0 - of.turns * of.rate, 0.0)
    farthest = 2.0 * _REACH + shift
    normals = np.arange(-farthest, _REACH + shift, _OF_NORMAL)
    weights = np.exp(-np.square(normals) / 2) * _OF_NORMAL / math.sqrt(2 * math.pi)
    terms = np.exp(shift * normals - shift**2 / 2)
    # The grid covers all t for which the integrand is not negligible, up to some k / ρ for the smallest ρ.
    logs = np.arange(-40.0, math.log(ORDERS[-1]) + farthest * shift + 6.0, _OF_LOG)
    with np.errstate(divide="ignore", under="ignore"):
        transform = np.log(np.exp(-of.rate * np.exp(logs)[:, None] * terms) @ weights)
    of_turns = of.turns * transform if of.turns else np.zeros_like(logs)
    integrand = ORDERS[:, None] * logs - left * np.exp(logs) + of_turns
    return np.asarray(logsumexp(integrand, axis=1) + math.log(_OF_LOG) - gammaln(ORDERS))
