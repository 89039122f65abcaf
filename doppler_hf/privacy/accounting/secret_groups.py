"""Bounds on ε by simulation, for units whose group is secret too; a bound fails with a stated probability.

With R_g the likelihood ratio of group g, a product over its rounds, the ratio is their mean R over b groups. Removal costs
δ = E(R − e^ε)₊ and addition δ = E(1 − e^ε·R)₊ without the unit (docs/method/accounting.md). Let p = k + 1 for removal and −k
for addition, and A the mean of E R_g^p over groups, which differ if a round ends between their turns. Samples come from the
density mean_g(R_g^p)/A, which is that of R_g^p / E R_g^p for a group drawn in proportion to E R_g^p. Hence

    δ = E w,   w = (R − e^ε)₊ / Π_runs mean_g(R_g^p)/A   ≤   Π_runs A · max_R (R − e^ε)₊ / R^p,

where the second step is Jensen's inequality; the same holds for addition. A is known. Since the range of w is known too, the
empirical Bernstein bound (Maurer and Pontil 2009, https://arxiv.org/abs/0907.3740, Theorem 4) turns samples into an upper
bound on δ, which fails with a probability that is added to δ. Mean, second moment and range of w fall with ε. So ε can be
too small only if the bound fails at the true ε, which is one event, whatever ε is tried.

The seed is a hash of the arguments, so everybody who repeats the computation gets the same ε, and a search for σ has as many
chances to fail as it tries values. The seed is public, so the probability is a statement of confidence: the random numbers
of a training run cannot make the bound fail, but this seed, which was chosen before anybody saw its results, might.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from doppler_hf.privacy.accounting.composition import Rounds
from doppler_hf.privacy.accounting.importance_sampling import ORDERS, Addition, Removal

Array = NDArray[np.floating]
OfRun = tuple[Sequence[Rounds], Sequence[float]]  # Rounds with the same σ and rate, and the strategy.

FAILURE: Final = 5e-4  # The probability that one bound fails, as a share of δ. A calibration computes up to about twenty.
_FAILURES: Final = 0.01  # The share of δ that is reserved for all failures.
_FAILURE_OF_A_CURVE: Final = 1e-7  # The probability that any bound of a curve fails, for removal or for addition.
_NEAR_OF_A_CURVE: Final = 2.0  # This ε matters most for attacks with false-positive rates of 10⁻² or 10⁻³.
_MOST_OF_A_CURVE: Final = 10_000  # samples
_NUMBERS: Final = 5_000_000  # Normal random numbers for one bound.
_MOST_SAMPLES: Final = 50_000
_LEAST_SAMPLES: Final = 800  # This many allow 6,250 steps; fewer samples prove nothing at such a probability of failure.
_ROUGHER: Final = 10
_LEAST_NOISE: Final = 0.2  # With a smaller σ, secret groups hide almost nothing.
_AT_ONCE: Final = 1 << 16  # Numbers in memory at the same time.
_SPACING: Final = 5e-5  # Spacing of ε.
_LARGEST_EXPONENT: Final = 700.0


class _Kind(NamedTuple):
    """The groups of a run that have the same number of turns."""

    first: int
    groups: int
    tilts: Sequence[Removal | Addition]
    log_moments: Array  # For each k, ln of E R_g^p of one such group times their share of all groups.


class Run:
    """The rounds of one run with one σ and rate, in which units keep their groups."""

    def __init__(self, rounds: Sequence[Rounds], strategy: Sequence[float], tilt: type[Removal] | type[Addition]) -> None:
        # Negative coefficients are replaced by their absolute values, which raises δ.
        self.groups, self._c = len(strategy), np.abs(strategy) / math.hypot(*strategy)
        self.steps = _steps(rounds, strategy)
        # If a round ends between two groups, the first groups have one turn more.
        more = round(self.groups * max(each.longer for each in rounds)) or self.groups
        self._rounds, shorter = ([each.of_group(is_longer=is_longer) for each in rounds] for is_longer in (True, False))
        made = {of: tilt(of) for of in {*self._rounds, *shorter}}
        self._kinds = []
        for first, size, of_kind in ((0, more, self._rounds), (more, self.groups - more, shorter)):
            if size:
                log_moments = np.sum([of.number * made[of].log_moments for of in of_kind], axis=0)
                self._kinds.append(
                    _Kind(first, size, [made[of] for of in of_kind], log_moments + math.log(size / self.groups))
                )
        # For each k, ln of the mean of E R_g^p over all groups.
        self.log_moments: Array = np.logaddexp.reduce([kind.log_moments for kind in self._kinds])
        self.is_cheap: NDArray[np.bool_] = np.all([each.is_cheap for each in made.values()], axis=0)

    def sample(self, count: int, order: int, power: int, random: np.random.Generator) -> tuple[Array, Array]:
        """Return ln R and ln of the mean of R_g^p for `count` samples, both of shape (count,)."""
        own, group = self._sample_own_turns(count, order, random)
        found = np.empty((2, count))
        rows = max(1, _AT_ONCE // self.steps)
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            logs = self._log_ratios(own[part], group[part], random)
            found[0, part] = logsumexp(logs, axis=1) - math.log(self.groups)
            found[1, part] = logsumexp(power * logs, axis=1) - math.log(self.groups)
        return found[0], found[1]

    def _sample_own_turns(self, count: int, order: int, random: np.random.Generator) -> tuple[Array, NDArray[np.int64]]:
        """Return x at the turns of one group, shape (samples, turns), and the group, drawn in proportion to E R_g^p."""
        own = np.empty((count, sum(each.turns * each.number for each in self._rounds)))
        group, is_longer = np.empty(count, dtype=np.int64), np.ones(count, dtype=np.bool_)
        if len(self._kinds) > 1:
            of_longer = self._kinds[0].log_moments[order - 1]
            is_longer = random.random(count) < math.exp(of_longer - self.log_moments[order - 1])
            # A turn that the record's own group lacks still gets noise, because the ratios of the other groups contain it.
            own[:, -1] = random.standard_normal(count)
        for kind, rows in zip(self._kinds, (np.flatnonzero(is_longer), np.flatnonzero(~is_longer)), strict=False):
            group[rows] = kind.first + random.integers(kind.groups, size=len(rows))
            first = 0
            for tilt, of in zip(kind.tilts, self._rounds, strict=True):
                drawn = tilt.sample(len(rows) * of.number, order, random).reshape(len(rows), of.number * tilt.of.turns)
                own[rows, first : first + drawn.shape[1]] = drawn
                first += of.number * of.turns
        return own, group

    def _log_ratios(self, own: Array, group: NDArray[np.int64], random: np.random.Generator) -> Array:
        """Return ln R_g, shape (samples, b), given x at the turns of one group, shape (samples, turns)."""
        steps = own.shape[1] * self.groups
        noise = random.standard_normal((len(own), steps + len(self._c) - 1))
        x = self._along_columns(noise, steps)
        # The columns of one group's turns have no row in common, so the noise along each can be replaced separately.
        change = np.zeros_like(x).reshape(len(own), -1, self.groups)
        samples = np.arange(len(own))
        change[samples, :, group] = own - x.reshape(change.shape)[samples, :, group]
        for lag, c in enumerate(self._c):
            noise[:, lag : lag + steps] += c * change.reshape(x.shape)
        x = self._along_columns(noise, steps)
        shift = 1.0 / self._rounds[0].noise_multiplier
        ratios = np.exp(shift * x - shift**2 / 2)
        # In an incomplete round, a turn that a group lacks gets Y = 1, since 1 − nq + q·(Y_1 + … + Y_(n−1) + 1) is the ratio
        # of n − 1 turns.
        ratios[:, self.steps :] = 1.0
        logs, first = np.zeros((len(own), self.groups)), 0
        for _, rate, turns, number, _ in self._rounds:
            last = first + number * turns * self.groups
            sums = ratios[:, first:last].reshape(len(own), number, turns, self.groups).sum(axis=2)
            logs += np.log(max(1.0 - turns * rate, 0.0) + rate * sums).sum(axis=1)
            first = last
        return logs

    def _along_columns(self, noise: Array, steps: int) -> Array:
        """Return ⟨C_t, z⟩ by step, shape (samples, steps)."""
        return np.asarray(sum(c * noise[:, lag : lag + steps] for lag, c in enumerate(self._c)))


def epsilon_of_runs(runs: Sequence[OfRun], *, is_removal: bool, delta: float, known: float, is_rough: bool = False) -> float:
    """Return a bound on ε of removal or of addition in all runs on the same data, at most one that is `known`.

    A hundredth of δ is for bounds to fail. A rough one is estimated from fewer samples.
    """
    if known > _LARGEST_EXPONENT:
        return known
    simulated = _simulated(runs, near=known, is_removal=is_removal, is_rough=is_rough)
    if simulated is None:
        return known
    low, high = 0.0, known
    while high - low > _SPACING * high:
        middle = (low + high) / 2
        is_bound = simulated(middle, FAILURE * delta) <= (1.0 - _FAILURES) * delta
        low, high = (low, middle) if is_bound else (middle, high)
    return high


def deltas_of_runs(runs: Sequence[OfRun], epsilons: Array, *, is_removal: bool) -> Array:
    """Return bounds on δ of removal or of addition at all these ε together.

    They contain the probability with which any of them fails: a mechanism that tells all with a probability of β has a δ
    larger by β.
    """
    simulated = _simulated(runs, near=_NEAR_OF_A_CURVE, is_removal=is_removal, most=_MOST_OF_A_CURVE)
    if simulated is None:
        return np.ones(len(epsilons))
    # An attack is bounded by both directions together.
    failure = _FAILURE_OF_A_CURVE / (2 * len(epsilons))
    return np.array([simulated(each, failure) for each in epsilons]) + _FAILURE_OF_A_CURVE


def _simulated(
    runs: Sequence[OfRun], *, near: float, is_removal: bool, is_rough: bool = False, most: int = _MOST_SAMPLES
) -> Callable[[float, float], float] | None:
    """Return an upper bound on δ by ε and the probability to fail, small near one ε; None if it would be of no use."""
    usual = min(most, _NUMBERS // sum(itertools.starmap(_steps, runs)))
    if usual < _LEAST_SAMPLES or any(each.noise_multiplier < _LEAST_NOISE for rounds, _ in runs for each in rounds):
        return None
    count = usual // _ROUGHER if is_rough else usual
    made = [Run(rounds, strategy, Removal if is_removal else Addition) for rounds, strategy in runs]
    log_moments: Array = np.sum([run.log_moments for run in made], axis=0)
    is_cheap = np.all([run.is_cheap for run in made], axis=0)
    if not is_cheap.any():
        return None
    order = int(ORDERS[np.argmin(np.where(is_cheap, log_moments + _log_peak(near, ORDERS), np.inf))])
    # A round that is not cut short is described in the words from before groups were counted separately, so that the seed,
    # and with it the ε of older ledgers, stays the same.
    digest = hashlib.sha256(repr((runs, is_removal)).replace(", longer=0.0", "").encode()).digest()
    random, power = np.random.default_rng(int.from_bytes(digest, "little")), order + 1 if is_removal else -order
    samples = [run.sample(count, order, power, random) for run in made]
    log_ratio, log_weight = np.sum(samples, axis=0)
    log_weight -= log_moments[order - 1]
    # These are the logarithms of the two terms of R − e^ε or 1 − e^ε·R, without the factor e^ε, divided by the weight.
    exponents = (log_ratio - log_weight, -log_weight) if is_removal else (-log_weight, log_ratio - log_weight)
    first, second = (np.exp(np.minimum(each, _LARGEST_EXPONENT)) for each in exponents)

    def bound(epsilon: float, failure: float) -> float:
        values, log_failure = np.maximum(first - math.exp(epsilon) * second, 0.0), math.log(2.0 / failure)
        largest = math.exp(min(log_moments[order - 1] + _log_peak(epsilon, order), _LARGEST_EXPONENT))
        spread = math.sqrt(2.0 * float(values @ values) / (count - 1) * log_failure / usual)
        return float(values.sum()) / count + spread + 7.0 * largest * log_failure / (3.0 * (usual - 1))

    return bound


def _steps(rounds: Sequence[Rounds], strategy: Sequence[float]) -> int:
    return sum(round(len(strategy) * (each.turns + each.longer)) * each.number for each in rounds)


def _log_peak(epsilon: float, order: NDArray[np.int64] | int) -> Array:
    """Return ln max_R (R − e^ε)/R^(k+1) = ln max_R (1 − e^ε·R)·R^k, at R = e^(±ε)·((k + 1)/k)^(±1)."""
    more = np.add(order, 1.0)
    return np.asarray(-epsilon * np.asarray(order) + order * np.log(order) - more * np.log(more))
