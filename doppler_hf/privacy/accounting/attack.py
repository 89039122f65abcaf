"""What ε means to an attacker: how often any membership attack can be right.

A membership attack decides from all that was released whether one record was trained on. Whoever runs it may know the code
and every other record. (ε, δ(ε)) for every ε bounds its true positives by its false positives α (Dong et al. 2022,
https://arxiv.org/abs/1905.02383, section 2):

    TPR(α) ≤ min over ε of min(e^ε·α + δ(ε), 1 − e^(−ε)·(1 − α − δ(ε)))

δ(ε) is that of the privacy loss distribution, the larger one of adding and removing a record. Where a unit's group is
secret, an attacker does not know it either: P and Q of the attack are those of the theorem, means over groups. The bound
by simulation therefore holds here as it does for the ε of the run. It must hold at all ε at once, so its probability to fail
is shared among them, and is part of each δ(ε).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from doppler_hf.privacy.accounting.accounting import Plan, Releases, merged_rounds
from doppler_hf.privacy.accounting.composition import delta_curve
from doppler_hf.privacy.accounting.secret_groups import deltas_of_runs

_EVERY: Final = 5  # of the pairs of ε and δ is also bounded by simulation, where groups are secret


class TradeOff(NamedTuple):
    """The best that any attack can do, from pairs of ε and δ that all hold; both of shape (pairs,)."""

    epsilons: np.ndarray
    deltas: np.ndarray

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return an upper bound on the true positives of an attack with these false positives, as shares of 1."""
        odds = np.exp(np.minimum(self.epsilons, 700.0))  # beyond it both bounds are 1
        above = np.minimum(odds * false_positive_rate + self.deltas, 1.0 - (1.0 - false_positive_rate - self.deltas) / odds)
        return min(float(above.min()), 1.0)

    @property
    def advantage(self) -> float:
        """An upper bound on TPR − FPR, the total variation distance; reached where the curve meets TPR = 1 − FPR."""
        return float((1.0 - 2.0 * (1.0 - self.deltas) / (1.0 + np.exp(np.minimum(self.epsilons, 700.0)))).min())


def trade_off(history: Iterable[Releases]) -> TradeOff:
    """Return the best that an attack can do against everything in `history`: guess if it is empty, all without noise.

    Example:
        >>> round(trade_off([Releases(1.0, 0.01, 1000)]).true_positive_rate(0.01), 3)
        0.029
    """
    history = tuple(releases for releases in history if releases.steps)
    if any(each.noise_multiplier == 0.0 for each in merged_rounds(history)):
        return TradeOff(np.zeros(1), np.ones(1))
    return _of_noisy(history) if history else TradeOff(np.zeros(1), np.zeros(1))


def trade_off_of_plans(plans: Sequence[Plan], *, epsilon: float, delta: float) -> TradeOff:
    """Return the best that an attack can do against plans that cost ε at δ: of several only this pair is known."""
    return trade_off(plans[0]) if len(plans) == 1 else TradeOff(np.array([epsilon]), np.array([delta]))


@functools.lru_cache(maxsize=8)
def _of_noisy(history: tuple[Releases, ...]) -> TradeOff:
    epsilons, deltas = delta_curve(merged_rounds(history))
    if any(len(releases.strategy) > 1 for releases in history):
        runs = [([*releases.rounds()], releases.strategy) for releases in history]
        some = epsilons[::_EVERY]
        secret = np.max([deltas_of_runs(runs, some, is_removal=is_removal) for is_removal in (True, False)], axis=0)
        epsilons, deltas = np.append(epsilons, some), np.append(deltas, np.minimum(secret, 1.0))
    return TradeOff(epsilons, deltas)


def attack_in_words(best: TradeOff, *, epsilon: float, record: str = "training record") -> str:
    """Return what ε means in one sentence."""
    found = percent(best.true_positive_rate(0.01))
    return (
        f"In this run (ε = {epsilon:.3g}), an attack on the model with 1 % false positives recognises a {record} with a "
        f"probability of at most {found}; guessing does with 1 %."
    )


def percent(share: float) -> str:
    """Return a bound in percent, rounded up to a tenth."""
    return f"{math.ceil(1000.0 * share - 1e-9) / 10.0:g} %"
