"""What a unit costs when its group is secret too: bounds on ε by simulation, which fail with a stated probability.

With R_g the likelihood ratio of group g, a product over its rounds, the ratio is their mean R over b groups. Removal costs
δ = E(R − e^ε)₊ and addition δ = E(1 − e^ε·R)₊ without the unit (docs/method/accounting.md). Samples come from the density
R_g^p / E R_g^p of a random group, with p = k + 1 for removal and −k for addition:

    δ = E w,   w = (R − e^ε)₊ / Π_runs mean_g(R_g^p / E R_g^p)   ≤   Π_runs E R_g^p · max_R (R − e^ε)₊ / R^p,

where the second step is Jensen's inequality; addition is alike. E R_g^p is known. With the range of w known, the empirical
Bernstein bound (Maurer and Pontil 2009, https://arxiv.org/abs/0907.3740, Theorem 4) turns samples into an upper bound on δ,
which fails with a probability that is added to δ. Mean, second moment and range of w fall with ε. So a wrong ε needs the
bound to fail at the true one: one event, whatever ε is tried.

The seed is a hash of what is asked, so that everybody who repeats the computation has the same ε, and a search for σ has
as many chances to fail as values that it tries.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from doppler_hf.privacy.accounting.composition import Rounds
from doppler_hf.privacy.accounting.tilted_rounds import ORDERS, Addition, Removal

Array = NDArray[np.floating]

FAILURE: Final = 5e-4  # the probability that a bound fails, as a share of δ. A calibration looks at up to some twenty
_FAILURES: Final = 0.01  # what is left for them of δ
_NUMBERS: Final = 5_000_000  # normal random numbers of one bound
_MOST_SAMPLES: Final = 50_000
_LEAST_SAMPLES: Final = 800  # of which 6,250 steps are left; fewer show nothing at such a probability
_ROUGHER: Final = 10
_LEAST_NOISE: Final = 0.2  # σ below which next to nothing is hidden
_AT_ONCE: Final = 1 << 16  # numbers in memory together
_SPACING: Final = 5e-5  # of ε
_LARGEST_EXPONENT: Final = 700.0


class Run:
    """The rounds of one run, whose units keep their groups.

    Args:
        rounds: The rounds, of one σ and rate.
        strategy: c of the noise, shape (b,). Negative numbers count as positive ones, which raises δ.
        tilt: For removal or for addition.
    """

    def __init__(self, rounds: Sequence[Rounds], strategy: Sequence[float], tilt: type[Removal] | type[Addition]) -> None:
        self.groups, self._c = len(strategy), np.abs(strategy) / math.hypot(*strategy)
        self._rounds = [tilt(each) for each in rounds]
        self.steps = self.groups * sum(each.turns * each.number for each in rounds)
        # ln E R_g^p, by k
        self.log_moments: Array = np.sum([each.of.number * each.log_moments for each in self._rounds], axis=0)
        self.is_cheap: NDArray[np.bool_] = np.all([each.is_cheap for each in self._rounds], axis=0)

    def sample(self, count: int, order: int, power: int, random: np.random.Generator) -> tuple[Array, Array]:
        """Return ln R, and ln of the mean of R_g^p, of so many samples."""
        group = random.integers(self.groups, size=count)
        along = [each.sample(count * each.of.number, order, random).reshape(count, -1) for each in self._rounds]
        own, found = np.concatenate(along, axis=1), np.empty((2, count))
        rows = max(1, _AT_ONCE // self.steps)
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            logs = self._log_ratios(own[part], group[part], random)
            found[0, part] = logsumexp(logs, axis=1) - math.log(self.groups)
            found[1, part] = logsumexp(power * logs, axis=1) - math.log(self.groups)
        return found[0], found[1]

    def _log_ratios(self, own: Array, group: NDArray[np.int64], random: np.random.Generator) -> Array:
        """Return ln R_g, shape (samples, b), given x at the turns of one group, shape (samples, turns)."""
        noise = random.standard_normal((len(own), self.steps + len(self._c) - 1))
        x = self._along_columns(noise)
        # The columns of one group's turns meet in no row: noise along each of them is replaced by itself.
        change = np.zeros_like(x).reshape(len(own), -1, self.groups)
        samples = np.arange(len(own))
        change[samples, :, group] = own - x.reshape(change.shape)[samples, :, group]
        for lag, c in enumerate(self._c):
            noise[:, lag : lag + self.steps] += c * change.reshape(x.shape)
        x = self._along_columns(noise)
        shift = 1.0 / self._rounds[0].of.noise_multiplier
        ratios = np.exp(shift * x - shift**2 / 2)
        logs, first = np.zeros((len(own), self.groups)), 0
        for turns, number, rate in ((each.of.turns, each.of.number, each.of.rate) for each in self._rounds):
            last = first + number * turns * self.groups
            sums = ratios[:, first:last].reshape(len(own), number, turns, self.groups).sum(axis=2)
            logs += np.log(max(1.0 - turns * rate, 0.0) + rate * sums).sum(axis=1)
            first = last
        return logs

    def _along_columns(self, noise: Array) -> Array:
        """Return ⟨C_t, z⟩ by step, shape (samples, steps)."""
        return np.asarray(sum(c * noise[:, lag : lag + self.steps] for lag, c in enumerate(self._c)))


def epsilon_of_runs(
    runs: Sequence[tuple[Sequence[Rounds], Sequence[float]]],
    *,
    is_removal: bool,
    delta: float,
    known: float,
    is_rough: bool = False,
) -> float:
    """Return a bound on ε of removal or of addition.

    Args:
        runs: Rounds and strategy of all runs on the same data.
        is_removal: Whether a unit is removed, or added.
        delta: δ, of which a hundredth is for bounds to fail.
        known: A bound on ε, at most which is returned.
        is_rough: Whether to estimate the bound from fewer samples.
    """
    usual = min(_MOST_SAMPLES, _NUMBERS // sum(len(c) * each.turns * each.number for rounds, c in runs for each in rounds))
    if (
        known > _LARGEST_EXPONENT
        or usual < _LEAST_SAMPLES
        or any(each.noise_multiplier < _LEAST_NOISE for rounds, _ in runs for each in rounds)
    ):
        return known
    count = usual // _ROUGHER if is_rough else usual
    made = [Run(rounds, strategy, Removal if is_removal else Addition) for rounds, strategy in runs]
    log_moments: Array = np.sum([run.log_moments for run in made], axis=0)
    is_cheap = np.all([run.is_cheap for run in made], axis=0)
    if not is_cheap.any():
        return known
    order = int(ORDERS[np.argmin(np.where(is_cheap, log_moments + _log_peak(known, ORDERS), np.inf))])
    random, power = _generator(runs, is_removal=is_removal), order + 1 if is_removal else -order
    samples = [run.sample(count, order, power, random) for run in made]
    log_ratio, log_weight = np.sum(samples, axis=0)
    log_weight -= log_moments[order - 1]
    log_failure = math.log(2.0 / (FAILURE * delta))
    # R − e^ε or 1 − e^ε·R, over the weight.
    exponents = (log_ratio - log_weight, -log_weight) if is_removal else (-log_weight, log_ratio - log_weight)
    first, second = (np.exp(np.minimum(each, _LARGEST_EXPONENT)) for each in exponents)

    def bound(epsilon: float) -> float:
        values = np.maximum(first - math.exp(epsilon) * second, 0.0)
        largest = math.exp(min(log_moments[order - 1] + _log_peak(epsilon, order), _LARGEST_EXPONENT))
        spread = math.sqrt(2.0 * float(values @ values) / (count - 1) * log_failure / usual)
        return float(values.sum()) / count + spread + 7.0 * largest * log_failure / (3.0 * (usual - 1))

    low, high = 0.0, known
    while high - low > _SPACING * high:
        middle = (low + high) / 2
        low, high = (low, middle) if bound(middle) <= (1.0 - _FAILURES) * delta else (middle, high)
    return high


def _generator(runs: Sequence[tuple[Sequence[Rounds], Sequence[float]]], *, is_removal: bool) -> np.random.Generator:
    digest = hashlib.sha256(repr((runs, is_removal)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def _log_peak(epsilon: float, order: NDArray[np.int64] | int) -> Array:
    """Return ln max_R (R − e^ε)/R^(k+1) = ln max_R (1 − e^ε·R)·R^k, at R = e^(±ε)·((k + 1)/k)^(±1)."""
    more = np.add(order, 1.0)
    return np.asarray(-epsilon * np.asarray(order) + order * np.log(order) - more * np.log(more))
