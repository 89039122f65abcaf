"""The ε of a run: Gaussian mechanisms over batches of random allocation, add/remove neighbours.

A unit belongs to one of b groups, which take turns at the steps. In a round of n turns of its group it takes part at most
once, in a turn that is chosen uniformly and in secret (`batching.sampling`). Poisson sampling is n = b = 1. Filter, Adam and
projection are post-processing and cost nothing. Where groups are known ε is exact (`composition`). That they are secret
counts by simulation (`secret_groups`).

A plan is fixed before its first result: σ, q, the noise's shape, and a number of steps, or a target that ends it at a number
of steps. Who stops it when results please publishes a part of what was planned, and a part costs no more than the whole. So
the ε of the plan holds wherever a run ends. The ε of the steps that were made would be less, but it holds only if their
number was fixed beforehand.

A plan whose terms are chosen after results of another one is not composed with it by their privacy losses, since that
theorem asks for fixed terms. What holds is basic composition, with an equal share of δ for each: the later plan costs at
most its ε however it was chosen, and ε of all add up (Dwork and Roth 2014, Theorem B.1; Rogers et al. 2016,
https://arxiv.org/abs/1605.08294, for parameters that are chosen on the way).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from doppler_hf.errors import Refusal
from doppler_hf.privacy.accounting.composition import SMALLEST_DELTA, Rounds, epsilons_of
from doppler_hf.privacy.accounting.secret_groups import epsilon_of_runs

LARGEST_NOISE_MULTIPLIER: Final = 1e6  # the largest that tells
Sampling = Literal["allocation", "poisson"]
Accountant = Literal["pld"]  # the name in a ledger: privacy loss distributions


class Releases(NamedTuple):
    """A number of steps run under the same mechanism, from the first turn of a round on, with secret groups of their own."""

    noise_multiplier: float  # σ, in units of the clip norm
    sample_rate: float  # q, the probability with which a unit takes part in a step
    steps: int  # T
    strategy: tuple[float, ...] = (1.0,)  # c of the noise, whose length is the number b of groups
    sampling: Sampling = "allocation"

    @property
    def turns(self) -> int:
        """The number n of a group's turns in a round."""
        return 1 if self.sampling == "poisson" else turns_of_round(self.sample_rate, len(self.strategy))

    def rounds(self) -> Iterator[Rounds]:
        """Yield the whole rounds, and the last one if it is cut short, in which the first groups may have a turn more.

        A unit takes part in each of a round's turns with probability b·q.
        """
        groups = len(self.strategy)
        # More noise costs no more, as what is added is post-processing, and far smaller losses would be lost in rounding.
        sigma = min(self.noise_multiplier, LARGEST_NOISE_MULTIPLIER)
        rate = min(groups * self.sample_rate, 1.0)
        whole, rest = divmod(self.steps, self.turns * groups)
        if whole:
            yield Rounds(sigma, rate, self.turns, whole)
        if rest:
            yield Rounds(sigma, rate, rest // groups, 1, rest % groups / groups)


Plan = Sequence[Releases]  # by rounds


def turns_of_round(sample_rate: float, groups: int = 1) -> int:
    """Return n, as many turns as a unit has on average before it takes part, rounded down: about an epoch."""
    # As a float q may be a little more than B/N, and a round would have a turn less than the sampler's, of whole numbers.
    return max(1, math.floor((1.0 + 2.0**-50) / (groups * sample_rate)))


def steps_of_whole_turns(steps: int, *, sample_rate: float, groups: int) -> int:
    """Return the steps without the last ones, if these are a new round's and too few for a turn of each group.

    Some groups alone would then pay for them: with fewer steps σ falls by more than the average's noise rises.
    """
    rest = steps % (groups * turns_of_round(sample_rate, groups))
    return steps - rest if rest < min(groups, steps) else steps


def default_delta(num_examples: int) -> float:
    """Return δ = N^−1.1, the paper's choice."""
    return float(num_examples**-1.1)


def joint_noise_multiplier(*noise_multipliers: float) -> float:
    """Return (Σ σᵢ⁻²)^(−1/2): the noise multiplier of several Gaussian releases of one batch, taken together.

    Release i adds noise of standard deviation σᵢ·Cᵢ to a sum of sensitivity Cᵢ over the same batch. In units of its own
    noise each output shifts by a vector of norm at most 1/σᵢ when an example joins, so all together by at most √Σ σᵢ⁻².
    That is one Gaussian mechanism, over the same batch.
    """
    smallest = min(noise_multipliers)
    if smallest == 0.0 or smallest == math.inf:
        return smallest
    return smallest / math.hypot(*(smallest / noise_multiplier for noise_multiplier in noise_multipliers))


def get_epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, sampling: Sampling = "allocation"
) -> float:
    """Return an upper bound on ε after `steps` steps: infinity without noise, and 0 for no steps.

    Args:
        noise_multiplier: σ, the noise's standard deviation in units of the clip norm.
        sample_rate: q, the probability with which an example is in the batch of a step, in (0, 1].
        steps: T.
        delta: δ, from 1e-10 to below 1.
        sampling: Random allocation, as of `AllocationSampler`, or Poisson sampling, as of other libraries, which costs more.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(get_epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 1)
        1.8
    """
    return get_total_epsilon([Releases(noise_multiplier, sample_rate, steps, sampling=sampling)], delta=delta)


def get_total_epsilon(history: Iterable[Releases], *, delta: float) -> float:
    """Return `get_epsilon` of several runs on the same data.

    With groups the bound fails with a probability of at most δ/100, which δ contains.
    """
    history = tuple(releases for releases in history if releases.steps)
    rounds = merged_rounds(history)
    if not rounds:
        return 0.0
    if any(each.noise_multiplier == 0.0 for each in rounds):
        return math.inf
    return bound(history, delta=delta)


def merged_rounds(history: Iterable[Releases]) -> tuple[Rounds, ...]:
    """Return every kind of round once, with their number; refuse numbers out of range."""
    counts: Counter[Rounds] = Counter()
    for releases in history:
        noise_multiplier, sample_rate, steps, strategy, sampling = releases
        if not 0.0 <= noise_multiplier < math.inf:
            raise Refusal("out-of-range", f"noise_multiplier must be a finite number ≥ 0, got {noise_multiplier}.")
        if not 0.0 < sample_rate <= 1.0:
            raise Refusal("out-of-range", f"sample_rate must lie in (0, 1], got {sample_rate}.")
        if steps < 0:
            raise Refusal("out-of-range", f"steps must be at least 0, got {steps}.")
        if sampling == "poisson" and len(strategy) > 1:
            raise Refusal(
                "groups-with-poisson",
                f"Poisson sampling has no groups, got a strategy of {len(strategy)} coefficients. Leave it out.",
            )
        for each in releases.rounds():
            counts[each._replace(number=0)] += each.number
    return tuple(kind._replace(number=number) for kind, number in sorted(counts.items()))


@functools.lru_cache(maxsize=256)  # the log, the ledger and the guard ask for the same ε
def bound(history: tuple[Releases, ...], *, delta: float, is_rough: bool = False) -> float:
    """Return ε of at least one step, all with noise. A rough one takes a third of the time or less, and is no bound."""
    if not SMALLEST_DELTA <= delta < 1.0:
        raise Refusal("out-of-range", f"delta must lie in [{SMALLEST_DELTA:g}, 1), got {delta}. Set a little less than 1/N.")
    known = epsilons_of(merged_rounds(history), delta=delta, coarsening=4 if is_rough else 1)
    if all(len(releases.strategy) == 1 for releases in history):
        return max(known)
    runs = [([*releases.rounds()], releases.strategy) for releases in history]
    # The larger one first: it may stay the larger one.
    (larger, is_removal), (smaller, _) = sorted(zip(known, (True, False), strict=True), reverse=True)
    simulated = functools.partial(epsilon_of_runs, runs, delta=delta, is_rough=is_rough)
    larger = simulated(is_removal=is_removal, known=larger)
    return larger if smaller <= larger else max(larger, simulated(is_removal=not is_removal, known=smaller))


class Spent(NamedTuple):
    """What trainings have spent on some weights."""

    epsilon: float
    delta: float


# What trainings have spent, by the names of their plans: see `name_of_plan`.
Trainings = Mapping[str, Spent]


def name_of_plan(ledger: str, runs: Sequence[str]) -> str:
    """Return the name of a plan: of its ledger, and of its runs unless that is the one by which the ledger is named.

    One ledger may be continued in two folders. What both have in common counts once, and what each has added counts too.
    """
    return ledger if [*runs] == [ledger] else f"{ledger}/{'.'.join(runs)}"


def ledger_and_runs(plan: str) -> tuple[str, list[str]]:
    """Return the ledger and the runs of a plan, by its name."""
    ledger, _, runs = plan.partition("/")
    return ledger, runs.split(".") if runs else [ledger]


def is_continued_by(plan: str, other: str) -> bool:
    """Return whether one plan is another, or the beginning of it."""
    (ledger, runs), (of_other, further) = ledger_and_runs(plan), ledger_and_runs(other)
    return ledger == of_other and runs == further[: len(runs)]


def all_trainings(found: Iterable[Trainings]) -> dict[str, Spent]:
    """Return each plan once, with the most that is known of it: what a plan has spent only grows."""
    known: dict[str, Spent] = {}
    for trainings in found:
        for name, spent in trainings.items():
            known[name] = _larger(spent, known.get(name, spent))
    # The longest first: what a plan had spent at its beginning is a part of that.
    kept: dict[str, Spent] = {}
    for name in sorted(known, key=lambda name: -len(ledger_and_runs(name)[1])):
        longer = [other for other in kept if is_continued_by(name, other)]
        for other in longer:
            kept[other] = _larger(kept[other], known[name])
        if not longer:
            kept[name] = known[name]
    return {name: kept[name] for name in known if name in kept}


def _larger(first: Spent, second: Spent) -> Spent:
    # Privacy: the plan satisfies one of two guarantees, and so the weaker one that both imply.
    return Spent(max(first.epsilon, second.epsilon), max(first.delta, second.delta))


def by_ledger(trainings: Trainings) -> dict[str, Spent]:
    """Return what the plans of each ledger have spent together."""
    ledgers: dict[str, dict[str, Spent]] = {}
    for name, spent in trainings.items():
        ledgers.setdefault(ledger_and_runs(name)[0], {})[name] = spent
    return {ledger: sum_of_trainings(plans) for ledger, plans in ledgers.items()}


def sum_of_trainings(trainings: Trainings) -> Spent:
    """Return what trainings have spent together, if all used the same data: ε and δ add up."""
    return Spent(sum(each.epsilon for each in trainings.values()), sum(each.delta for each in trainings.values()))


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
