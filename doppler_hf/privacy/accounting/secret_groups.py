"""What removing a unit costs when its group is secret too: a bound on ε by simulation, which fails with a stated probability.

With R_g the likelihood ratio of group g, a product over its rounds, the ratio is their mean R over b groups, and
δ = E(R − e^ε)₊ without the unit (docs/method/accounting.md). Samples come from the density R_g^K / E R_g^K of a random group:

    δ = E w,   w = (R − e^ε)₊ / Π_runs mean_g(R_g^K / E R_g^K)   ≤   Π_runs E R_g^K · max_R (R − e^ε)₊ / R^K,

where the second step is Jensen's inequality. E R_g^K is a finite sum. With the range of w known, the empirical Bernstein bound
(Maurer and Pontil 2009, https://arxiv.org/abs/0907.3740, Theorem 4) turns n samples into an upper bound on δ, which fails
with a probability that is added to δ. Mean, second moment and range of w fall with ε. So a wrong ε needs the bound to fail
at the true one: one event, whatever ε is tried.

The seed is fixed, so that everybody who repeats the computation has the same ε.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from doppler_hf.privacy.accounting.composition import Rounds

Array = NDArray[np.floating]

FAILURE: Final = 0.01  # the probability that the bound fails, as a share of δ, which it is added to
_SEED: Final = 0
_NUMBERS: Final = 8_000_000  # normal random numbers of one bound
_MOST_SAMPLES: Final = 100_000
_LEAST_SAMPLES: Final = 800  # of which 10,000 steps are left; fewer show nothing at a probability of δ/100
_ROUGHER: Final = 10
_LEAST_NOISE: Final = 0.2  # σ below which next to nothing is hidden
_AT_ONCE: Final = 1 << 16  # numbers in memory together
_LARGEST_POWER: Final = 96  # K
_SPACING: Final = 5e-5  # of ε
_LARGEST_EXPONENT: Final = 700.0


class Run:
    """The rounds of one run, whose units keep their groups.

    Args:
        rounds: The rounds, of one σ and rate.
        strategy: c of the noise, shape (b,). Negative numbers count as positive ones, which raises δ.
    """

    def __init__(self, rounds: Sequence[Rounds], strategy: Sequence[float]) -> None:
        self.rounds, self.groups = rounds, len(strategy)
        self._c = np.abs(strategy) / math.hypot(*strategy)
        self.steps = self.groups * sum(each.turns * each.number for each in rounds)
        self._shares = [_shares(each) for each in rounds]
        powers = np.arange(_LARGEST_POWER + 1)
        # ln E R_g^K by K
        self.log_moments = sum(
            each.number * (share[-1] + gammaln(powers + 1)) for each, share in zip(rounds, self._shares, strict=True)
        )

    def sample(self, count: int, power: int, random: np.random.Generator) -> tuple[Array, Array]:
        """Return ln R, and ln of the mean of R_g^K, of so many samples."""
        group = random.integers(self.groups, size=(count, 1, 1))
        places = [
            _powers_of_turns(each, share, count, power, random)
            for each, share in zip(self.rounds, self._shares, strict=True)
        ]
        turns = np.concatenate([each.reshape(count, -1) for each in places], axis=1)[:, :, None]
        found = np.empty((2, count))
        rows = max(1, _AT_ONCE // self.steps)
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            powers = np.where(group[part] == np.arange(self.groups), turns[part], 0).reshape(-1, self.steps)
            logs = self._log_ratios(powers, random)
            found[0, part] = logsumexp(logs, axis=1) - math.log(self.groups)
            found[1, part] = logsumexp(power * logs, axis=1) - math.log(self.groups)
        return found[0], found[1]

    def _log_ratios(self, powers: NDArray[np.int64], random: np.random.Generator) -> Array:
        """Return ln R_g, shape (samples, b), where each step's density is weighted by its ratio to this power."""
        shift, ends = 1.0 / self.rounds[0].noise_multiplier, len(self._c) - 1
        noise = random.standard_normal((len(powers), self.steps + ends))
        for lag, c in enumerate(self._c):
            noise[:, lag : lag + self.steps] += c * shift * powers
        along = sum(c * noise[:, lag : lag + self.steps] for lag, c in enumerate(self._c))
        ratios = np.exp(shift * along - shift**2 / 2)
        logs, first = np.zeros((len(powers), self.groups)), 0
        for each in self.rounds:
            last = first + each.number * each.turns * self.groups
            sums = ratios[:, first:last].reshape(len(powers), each.number, each.turns, self.groups).sum(axis=2)
            logs += np.log(max(1.0 - each.turns * each.rate, 0.0) + each.rate * sums).sum(axis=1)
            first = last
        return logs


def epsilon_of_removal(runs: Sequence[Run], *, delta: float, known: float, is_rough: bool = False) -> float:
    """Return a bound on ε.

    Args:
        runs: All runs on the same data.
        delta: δ, of which `FAILURE` is for the bound to fail.
        known: A bound on ε, at most which is returned.
        is_rough: Whether to return an estimate in place of a bound, from fewer samples.
    """
    log_moments = sum(run.log_moments for run in runs)
    powers = np.arange(2, _LARGEST_POWER + 1)
    power = int(powers[np.argmin(log_moments[2:] + _log_peak(known, powers))])
    count = min(_MOST_SAMPLES, _NUMBERS // sum(run.steps for run in runs))
    if count < _LEAST_SAMPLES or any(each.noise_multiplier < _LEAST_NOISE for run in runs for each in run.rounds):
        return known
    if is_rough:
        count //= _ROUGHER
    random = np.random.default_rng(_SEED)
    samples = [run.sample(count, power, random) for run in runs]
    log_ratio, log_weight = (sum(each) for each in zip(*samples, strict=True))
    log_weight = log_weight - log_moments[power]
    log_failure = math.log(2.0 / (FAILURE * delta)) if not is_rough else 0.0
    inverse = np.exp(np.minimum(-log_weight, _LARGEST_EXPONENT))
    times_ratio = np.exp(np.minimum(log_ratio - log_weight, _LARGEST_EXPONENT))

    def bound(epsilon: float) -> float:
        values = np.maximum(times_ratio - math.exp(epsilon) * inverse, 0.0)
        largest = math.exp(log_moments[power] + _log_peak(epsilon, power))
        second = float(values @ values) / (count - 1)
        return (
            float(values.sum()) / count
            + math.sqrt(2.0 * second * log_failure / count)
            + 7.0 * largest * log_failure / (3.0 * (count - 1))
        )

    low, high = 0.0, known
    while high - low > _SPACING * high:
        middle = (low + high) / 2
        low, high = (low, middle) if bound(middle) <= (1.0 - FAILURE) * delta else (middle, high)
    return high


def _log_peak(epsilon: float, power: Array | int) -> Array:
    """Return ln max_R (R − e^ε) / R^K, which is at R = e^ε·K / (K − 1)."""
    rest = np.subtract(power, 1.0)
    return np.asarray(-epsilon * rest + rest * np.log(rest) - power * np.log(power))


def _shares(of: Rounds) -> Array:
    """Return ln of the coefficients of x^r in e^((1 − nq)x)·(Σ_a q^a·E Y^a·x^a / a!)^j, shape (n + 1, K + 1), by j and r.

    K!·[x^K] for j = n is E ρ^K, ρ = 1 − nq + q·(Y_1 + … + Y_n), with E Y^a = exp(a(a − 1)/2σ²).
    """
    powers = np.arange(_LARGEST_POWER + 1)
    left = 1.0 - of.turns * of.rate
    nobody = powers * math.log(left) if left > 1e-12 else np.where(powers == 0, 0.0, -np.inf)
    found = np.empty((of.turns + 1, len(powers)))
    found[0] = nobody - gammaln(powers + 1)
    turn = _log_turn(of)
    lags = powers[:, None] - powers
    kernel = np.where(lags >= 0, turn[np.maximum(lags, 0)], -np.inf)
    for number in range(of.turns):
        found[number + 1] = logsumexp(kernel + found[number], axis=1)
    return found


def _log_turn(of: Rounds) -> Array:
    powers = np.arange(_LARGEST_POWER + 1)
    return powers * math.log(of.rate) + powers * (powers - 1) / (2 * of.noise_multiplier**2) - gammaln(powers + 1)


def _powers_of_turns(of: Rounds, shares: Array, count: int, power: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw terms of ρ^K, multiplied out, with their share in E ρ^K: the power of each Y, shape (count, rounds, n)."""
    turn, some = _log_turn(of), np.arange(power + 1)
    found = np.zeros((count * of.number, of.turns), dtype=np.int64)
    left = np.full(count * of.number, power)
    for place in range(of.turns):
        # The probability of at most so many factors, in columns, of those left, in rows.
        others = np.where(some <= some[:, None], shares[of.turns - place - 1, some[:, None] - some], -np.inf)
        at_most = np.cumsum(np.exp(turn[some] + others - shares[of.turns - place, some, None]), axis=1)
        uniform = random.random(len(left))
        taking = np.flatnonzero(uniform >= at_most[left, 0])
        taken = np.minimum((uniform[taking, None] >= at_most[left[taking]]).sum(axis=1), left[taking])
        found[taking, place] = taken
        left[taking] -= taken
    return found.reshape(count, of.number, of.turns)
