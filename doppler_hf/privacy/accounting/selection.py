"""The ε of a search: several runs with different settings, of which only the best one is published.

A search makes K trials. K is random and secret, and its distribution is public. Each trial is a whole training run: it draws
its settings at random, trains, and gets a score from data of other people. The trial with the best score is published, and
nothing of the others. If every trial satisfies two guarantees, (ε₁, δ₁) and (ε₂, δ₂), in both directions of the neighbouring
relation, then the search satisfies (ε₁ + ln ρ, E K·δ₁), with

    ρ = sup f′(1 − t) / f′(1 − t′)    over    0 ≤ t ≤ t′ ≤ min(1, e^(ε₂)·t + δ₂),    f(s) = E s^K.

The proof is in docs/method/accounting.md. The first guarantee has a small δ and bounds what the published trial says. The
second one has a δ of some hundredths. It bounds how far one record can move the chance that another trial is better.

The theorem needs nothing else of the settings. So they may differ between trials, if the noise of each is such that both
guarantees hold (`calibration.noise_multiplier_of_trial`). How they are divided is decided once, before the first trial.

Distributions are truncated negative binomials (Papernot and Steinke 2022, https://arxiv.org/abs/2110.03620):

    P(K = k) ∝ (1 − γ)^k · Γ(k + η)/k!,   k ≥ 1,        f′(s) ∝ (1 − (1 − γ)·s)^(−η − 1),    η > −1.

η = 0 is the logarithmic distribution, and η = 1 the geometric one. The limit η = ∞ with a fixed mean is a Poisson
distribution without its 0, f′(s) ∝ e^(λs).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import brentq

from doppler_hf.errors import Refusal
from doppler_hf.privacy.accounting.accounting import Releases, bound, get_total_epsilon, merged_rounds
from doppler_hf.privacy.accounting.composition import delta_curve, epsilons_of

MOST_TRIALS: Final = 10_000
_POINTS: Final = 4000  # The number of points of the curve on which the second guarantee is chosen.
_LEAST_TAIL: Final = 1e-12  # Probabilities of larger K are left out once they are this small in comparison.
_CLOSE: Final = 1e-3  # The spacing of ln σ at which the search for a division of ε ends.


class NumberOfTrials(NamedTuple):
    """The distribution of the number K ≥ 1 of trials.

    Example:
        >>> geometric = NumberOfTrials(mean=10, shape=1.0)
        >>> round(geometric.generating(0.5), 6), round(geometric.another_after(7), 6)
        (0.090909, 0.9)
    """

    mean: float  # E K > 1
    shape: float = 0.0  # η > −1; infinity for Poisson

    @property
    def name(self) -> str:
        """The name of the distribution."""
        names = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson without 0"}
        return names.get(self.shape, f"truncated negative binomial with η = {self.shape:g}")

    @property
    def parameter(self) -> float:
        """γ, or λ of the Poisson distribution: the parameter with this mean."""
        return _parameter(self.mean, self.shape)

    def generating(self, s: float) -> float:
        """Return f(s) = E s^K: the probability that no trial has a score among the best 1 − s."""
        eta, parameter = self.shape, self.parameter
        if eta == math.inf:
            return math.expm1(parameter * s) / math.expm1(parameter)
        left = math.log1p(-(1.0 - parameter) * s)
        if eta == 0.0:
            return left / math.log(parameter)
        return math.expm1(-eta * left) / math.expm1(-eta * math.log(parameter))

    def growth(self, epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
        """Return ln ρ for each pair (ε₂, δ₂)."""
        # t′ reaches 1 here. Up to this t the ratio is monotone, and after it the ratio falls.
        kink = (1.0 - np.minimum(deltas, 1.0)) * np.exp(-epsilons)
        if self.shape == math.inf:
            return np.asarray(self.parameter * (1.0 - kink))
        gamma = self.parameter
        at_zero = np.log1p((1.0 - gamma) * np.minimum(deltas, 1.0) / gamma)
        return np.asarray((self.shape + 1.0) * np.maximum(at_zero, -np.log(gamma + (1.0 - gamma) * kink)))

    def another_after(self, made: int) -> float:
        """Return P(K > k | K ≥ k) for k = `made` ≥ 1: the probability of another trial after k trials."""
        eta, parameter = self.shape, self.parameter
        # The terms are P(K = k + i)/P(K = k), i = 0, 1, ….
        term, total, further = 1.0, 0.0, 0
        while term > _LEAST_TAIL * total:
            total, further = total + term, further + 1
            place = made + further
            term *= parameter / place if eta == math.inf else (1.0 - parameter) * (place - 1 + eta) / place
        return 1.0 - 1.0 / total


def refuse_number_of_trials(mean: float) -> None:
    """Refuse an expected number of trials that is out of range."""
    if not 1.0 < mean <= MOST_TRIALS:
        raise Refusal(
            "out-of-range",
            f"A hyperparameter search needs more than 1 and at most {MOST_TRIALS:,} expected trials; got {mean:g}. Give "
            "another number. For a single run, call train(), or leave --trials out of the plan.",
        )


@functools.lru_cache(maxsize=64)
def _parameter(mean: float, shape: float) -> float:
    refuse_number_of_trials(mean)
    if not shape > -1.0:
        raise Refusal(
            "out-of-range",
            f"The shape of a number of trials must be above -1; got {shape:g}. Leave it out for the logarithmic "
            "distribution.",
        )
    if shape == math.inf:
        return float(brentq(lambda rate: -rate / math.expm1(-rate) - mean, 1e-9, 2.0 * mean + 1.0, xtol=1e-13))

    def excess(log_gamma: float) -> float:
        odds = math.expm1(-log_gamma)  # (1 − γ)/γ
        ratio = -log_gamma if shape == 0.0 else -math.expm1(shape * log_gamma) / shape
        return math.log(odds / ratio / mean)

    return math.exp(brentq(excess, -80.0, -1e-9, xtol=1e-13))


class Guarantee(NamedTuple):
    """A pair (ε, δ), which holds for adding and for removing a record."""

    epsilon: float
    delta: float


class Selection(NamedTuple):
    """What every trial of a search must satisfy, and what the search costs then."""

    trials: NumberOfTrials
    first: Guarantee  # (ε₁, δ₁)
    second: Guarantee  # (ε₂, δ₂)

    @property
    def growth(self) -> float:
        """The logarithm of ρ."""
        return float(self.trials.growth(np.array(self.second.epsilon), np.array(self.second.delta)))

    @property
    def epsilon(self) -> float:
        """ε of the search."""
        return self.first.epsilon + self.growth

    @property
    def delta(self) -> float:
        """δ of the search: the first guarantee of a trial gets the part δ/E K of it."""
        return self.trials.mean * self.first.delta


def selection_of(
    trials: NumberOfTrials,
    *,
    delta: float,
    epsilon_at: Callable[[float], float],
    deltas_at: Callable[[np.ndarray], np.ndarray],
) -> Selection:
    """Return the search of least ε at δ, by the privacy profile of its trials.

    Args:
        trials: The distribution of K.
        delta: δ of the search.
        epsilon_at: ε of one trial, for adding and for removing a record, by its δ.
        deltas_at: The same profile the other way round, for an array of values of ε.
    """
    share = delta / trials.mean
    # Beyond ln(1/γ), or where δ₂ is almost 0, ε₂ only grows.
    largest = trials.parameter if trials.shape == math.inf else -math.log(trials.parameter)
    epsilons = np.linspace(0.0, largest, _POINTS)
    deltas = np.clip(deltas_at(epsilons), 0.0, 1.0)
    best = int(np.argmin(trials.growth(epsilons, deltas)))
    second = Guarantee(float(epsilons[best]), float(deltas[best]))
    return Selection(trials, Guarantee(epsilon_at(share), share), second)


def selection_of_releases(releases: Releases, trials: NumberOfTrials, *, delta: float, is_rough: bool = False) -> Selection:
    """Return the search of least ε at δ whose trials all have these releases; a rough one is not a bound.

    The second guarantee is computed as if groups were known, which raises it. It then needs no simulation.
    """
    return selection_of(
        trials,
        delta=delta,
        epsilon_at=lambda share: bound((releases,), delta=share, is_rough=is_rough),
        deltas_at=functools.partial(_deltas, merged_rounds([releases])),
    )


def _deltas(rounds: Sequence[Any], epsilons: np.ndarray) -> np.ndarray:
    return delta_curve(rounds, epsilons)[1]


def divide_budget(trials: NumberOfTrials, *, target_epsilon: float, target_delta: float, single_run: Releases) -> Selection:
    """Return the two guarantees of a search that costs exactly `target_epsilon` at `target_delta`.

    The division suits a trial with the batch size, length and noise shape of `single_run`: the run with the trainer's own
    arguments and the whole ε. Its σ is not used. The division is valid for trials with other settings too, such as fewer
    bands. It is computed on a rough grid, since each trial's noise is calibrated to it afterwards.
    """

    @functools.cache
    def selection_at(log_sigma: float) -> Selection:
        return selection_of_releases(
            single_run._replace(noise_multiplier=math.exp(log_sigma)), trials, delta=target_delta, is_rough=True
        )

    def excess(log_sigma: float) -> float:
        return math.log(max(selection_at(log_sigma).epsilon, 1e-300) / target_epsilon)

    low, high, largest = 0.0, 0.0, math.log(1e6)
    while excess(high) > 0.0:
        if high >= largest:
            raise Refusal(
                "search-out-of-reach",
                f"A hyperparameter search at ε = {target_epsilon:g} and δ = {target_delta:g} with {trials.mean:g} expected "
                "trials would need a noise multiplier above 1e6. Raise target_epsilon or target_delta, or expect fewer "
                "trials.",
            )
        low, high = high, min(high + 0.7, largest)
    while low == high or excess(low) < 0.0:
        low -= 0.7
    found = selection_at(float(brentq(excess, low, high, xtol=_CLOSE)))
    # The two guarantees do not use up δ and ε exactly. The first guarantee gets what is left over, or gives what is lacking.
    return found._replace(first=Guarantee(target_epsilon - found.growth, found.first.delta))


def epsilon_with(selection: Selection, history: Sequence[Releases], *, delta: float) -> float:
    """Return ε at δ of a search, one of whose trials has these releases, and whose other trials satisfy the selection.

    If the releases exceed one of the two guarantees, the search costs what follows from the larger ones.
    """
    # Privacy: trials with other settings may reach the guarantees where this one does not, so the guarantees count.
    second = selection.second._replace(epsilon=max(selection.second.epsilon, second_epsilon(history, selection)))
    own = get_total_epsilon(history, delta=delta / selection.trials.mean)
    found = selection._replace(first=selection.first._replace(epsilon=max(selection.first.epsilon, own)), second=second)
    return found.epsilon


def second_epsilon(releases: Sequence[Releases], selection: Selection) -> float:
    """Return an upper bound on the ε of these releases at δ₂, as if groups were known."""
    rounds = merged_rounds(each for each in releases if each.steps)
    if any(each.noise_multiplier == 0.0 for each in rounds):
        return math.inf
    return max(epsilons_of(rounds, delta=selection.second.delta)) if rounds else 0.0
