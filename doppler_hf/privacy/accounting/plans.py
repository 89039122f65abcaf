"""The ε of trainings whose terms may be chosen after results: that of what was planned, which holds wherever a run ends.

A plan is fixed before its first result: σ, q, the noise's shape, and a number of steps, or a target that ends it at a number
of steps. Who stops it when results please publishes a part of what was planned, and a part costs no more than the whole. The
ε of the steps that were made would be less, but it holds only if their number was fixed beforehand.

A plan whose terms are chosen after results of another one is not composed with it by their privacy losses, since that
theorem asks for fixed terms. What holds is basic composition, with an equal share of δ for each: the later plan costs at
most its ε however it was chosen, and ε of all add up (Dwork and Roth 2014, Theorem B.1; Rogers et al. 2016,
https://arxiv.org/abs/1605.08294, for parameters that are chosen on the way).
"""

from collections.abc import Sequence
from typing import NamedTuple

from doppler_hf.privacy.accounting.accounting import Releases, get_total_epsilon

Plan = Sequence[Releases]  # by rounds


class Spent(NamedTuple):
    """What trainings have spent on some weights."""

    epsilon: float
    delta: float


def get_epsilon_of_plans(plans: Sequence[Plan], *, delta: float) -> float:
    """Return ε at δ of plans, each of whose terms may have been chosen after results of those before it."""
    return sum(get_total_epsilon(plan, delta=delta / len(plans)) for plan in plans)


class Account(NamedTuple):
    """All plans of a training, with the last one to its end, and up to the steps that were counted."""

    planned: Sequence[Plan]
    counted: Sequence[Plan]
    target: float | None  # within which the guard ends the last one

    def epsilon(self, *, delta: float) -> float:
        """Return the ε that holds, whatever ends the last plan."""
        planned = get_epsilon_of_plans(self.planned, delta=delta)
        if self.target is None or planned <= self.target:
            return planned
        # Privacy: how many steps the guard allows follows from public numbers, and they cost at most the target.
        return max(self.target, get_epsilon_of_plans(self.counted, delta=delta))
