"""The meaning of ε for an attacker: how often any membership attack can be right.

A membership attack decides, from everything that was released, whether one record was trained on. The attacker may know the
code and every other record. The pairs (ε, δ(ε)) for all ε bound the true-positive rate by the false-positive rate α (Dong et
al. 2022, https://arxiv.org/abs/1905.02383, section 2):

    TPR(α) ≤ min over ε of min(e^ε·α + δ(ε), 1 − e^(−ε)·(1 − α − δ(ε)))

δ(ε) comes from the privacy loss distribution; it is the larger value of adding and removing a record. If the group of a unit
is secret, the attacker does not know it either, and the distributions P and Q of the attack are those of the theorem: means
over groups. So the bound by simulation holds here as it does for the ε of the run. It must hold at all ε at once, so its
probability of failure is shared among them, and is included in each δ(ε).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from doppler_hf.privacy.accounting.accounting import Plan, Releases, merged_rounds
from doppler_hf.privacy.accounting.composition import delta_curve
from doppler_hf.privacy.accounting.secret_groups import deltas_of_runs

_EVERY: Final = 5  # If groups are secret, every fifth pair of ε and δ is also bounded by simulation.


class TradeOff(NamedTuple):
    """The success of the best possible attack, from pairs of ε and δ that all hold; both have shape (pairs,)."""

    epsilons: np.ndarray
    deltas: np.ndarray

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return an upper bound on the true-positive rate of an attack with this false-positive rate, both in [0, 1]."""
        odds = np.exp(np.minimum(self.epsilons, 700.0))  # For a larger ε both bounds are 1.
        above = np.minimum(odds * false_positive_rate + self.deltas, 1.0 - (1.0 - false_positive_rate - self.deltas) / odds)
        return min(float(above.min()), 1.0)

    @property
    def advantage(self) -> float:
        """An upper bound on TPR − FPR, the total variation distance, which is reached where TPR = 1 − FPR."""
        return float((1.0 - 2.0 * (1.0 - self.deltas) / (1.0 + np.exp(np.minimum(self.epsilons, 700.0)))).min())

    def beside(self, epsilon: float, *, delta: float) -> "TradeOff":
        """Return the success of the best attack if something else was released too, of which only ε and δ are known.

        By basic composition (Dwork and Roth 2014, Theorem B.1), both add up in each pair.
        """
        return TradeOff(self.epsilons + epsilon, np.minimum(self.deltas + delta, 1.0))


def trade_off(history: Iterable[Releases]) -> TradeOff:
    """Return the success of the best attack on everything in `history`.

    With an empty history an attack can only guess; without noise it is always right.

    Example:
        >>> round(trade_off([Releases(1.0, 0.01, 1000)]).true_positive_rate(0.01), 3)
        0.029
    """
    history = tuple(releases for releases in history if releases.steps)
    if any(each.noise_multiplier == 0.0 for each in merged_rounds(history)):
        return TradeOff(np.zeros(1), np.ones(1))
    return _noisy_trade_off(history) if history else TradeOff(np.zeros(1), np.zeros(1))


def trade_off_of_plans(plans: Sequence[Plan], *, epsilon: float, delta: float) -> TradeOff:
    """Return the success of the best attack on plans that cost ε at δ; for several plans, only this pair is known."""
    return trade_off(plans[0]) if len(plans) == 1 else trade_off_at(epsilon, delta=delta)


def trade_off_at(epsilon: float, *, delta: float) -> TradeOff:
    """Return the success of the best attack if nothing but ε at δ is known of what was released."""
    return TradeOff(np.array([epsilon]), np.array([delta]))


@functools.lru_cache(maxsize=8)
def _noisy_trade_off(history: tuple[Releases, ...]) -> TradeOff:
    epsilons, deltas = delta_curve(merged_rounds(history))
    if any(len(releases.strategy) > 1 for releases in history):
        runs = [([*releases.rounds()], releases.strategy) for releases in history]
        some = epsilons[::_EVERY]
        secret = np.max([deltas_of_runs(runs, some, is_removal=is_removal) for is_removal in (True, False)], axis=0)
        epsilons, deltas = np.append(epsilons, some), np.append(deltas, np.minimum(secret, 1.0))
    return TradeOff(epsilons, deltas)


def attack_in_words(best: TradeOff, *, epsilon: float, record: str = "training record", runs: str = "In this run") -> str:
    """Return the meaning of ε in one sentence."""
    found = percent(best.true_positive_rate(0.01))
    return (
        f"{runs} (ε = {epsilon:.3g}), an attack on the model with 1 % false positives recognises a {record} with a "
        f"probability of at most {found}; guessing recognises it with a probability of 1 %."
    )


def percent(share: float) -> str:
    """Return a bound in percent, rounded up to a tenth."""
    return f"{math.ceil(1000.0 * share - 1e-9) / 10.0:g} %"
