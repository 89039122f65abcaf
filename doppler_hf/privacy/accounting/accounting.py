"""The ε of a run: Gaussian mechanisms over batches of random allocation, add/remove neighbours.

A unit (a record, or a user) belongs to one of b groups, which take turns at the steps. A round has n turns of each group,
and a unit takes part in it at most once, in a turn that is chosen uniformly and in secret (`batching.sampling`). Poisson
sampling is the case n = b = 1. Filter, Adam and projection are post-processing and cost nothing. If the groups were known, ε
would be exact (`composition`). The gain from secret groups is computed by simulation (`secret_groups`).

A plan is fixed before its first result: σ, q, the shape of the noise, and a number of steps, or a target that ends the run
after a number of steps. If somebody stops early because of results, they publish a part of what was planned, and a part
costs no more than the whole. So the ε of the plan holds wherever a run ends. The ε of the steps that were run is smaller,
but holds only if their number was fixed beforehand.

If the terms of a plan are chosen after results of another plan, the two are not composed by their privacy losses, since that
theorem needs fixed terms. Basic composition holds, with an equal share of δ for each plan: the later plan costs at most its
ε however it was chosen, and the ε of all plans add up (Dwork and Roth 2014, Theorem B.1; Rogers et al. 2016,
https://arxiv.org/abs/1605.08294, for parameters that are chosen during the composition).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from doppler_hf.errors import Refusal
from doppler_hf.privacy.accounting.composition import SMALLEST_DELTA, Rounds, epsilons_of
from doppler_hf.privacy.accounting.secret_groups import epsilon_of_runs

LARGEST_NOISE_MULTIPLIER: Final = 1e6  # Larger values make no difference.
SMALLEST_NOISE_MULTIPLIER: Final = 1e-50  # The ε of smaller values, above 1e100, cannot be computed with floats.
Sampling = Literal["allocation", "poisson"]
Accountant = Literal["pld"]  # the name in a ledger: privacy loss distributions


class Releases(NamedTuple):
    """A number of steps under the same mechanism, which begin with a new round and new secret groups."""

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
        """Yield the complete rounds, and then the last round if it is incomplete; its first groups may have one more turn.

        A unit takes part in each turn of its group with probability b·q.
        """
        groups = len(self.strategy)
        # The noise is capped for the computation. Additional noise is post-processing, so the cap gives an upper bound, and
        # far smaller losses would be lost in rounding.
        sigma = min(self.noise_multiplier, LARGEST_NOISE_MULTIPLIER)
        rate = min(groups * self.sample_rate, 1.0)
        whole, rest = divmod(self.steps, self.turns * groups)
        if whole:
            yield Rounds(sigma, rate, self.turns, whole)
        if rest:
            yield Rounds(sigma, rate, rest // groups, 1, rest % groups / groups)


Plan = Sequence[Releases]


def turns_of_round(sample_rate: float, groups: int = 1) -> int:
    """Return n, the number of turns of a group in a round: ⌊1/(b·q)⌋, so that a round lasts about an epoch."""
    # As a float, q may be slightly larger than B/N. Without the tolerance, a round could have one turn less than the
    # sampler's, which computes with whole numbers.
    return max(1, math.floor((1.0 + 2.0**-50) / (groups * sample_rate)))


def without_partial_round(steps: int, *, sample_rate: float, groups: int) -> int:
    """Return the number of steps without the last ones, if these are too few for one turn of each group in a new round.

    Only some groups would take part in these last steps. Without them, σ falls by more than the noise of the average rises.
    """
    rest = steps % (groups * turns_of_round(sample_rate, groups))
    return steps - rest if rest < min(groups, steps) else steps


def default_delta(num_examples: int) -> float:
    """Return δ = N^−1.1, the paper's choice."""
    return float(num_examples**-1.1)


def joint_noise_multiplier(*noise_multipliers: float) -> float:
    """Return (Σ σᵢ⁻²)^(−1/2): the noise multiplier of several Gaussian releases of one batch, taken together.

    Release i adds noise of standard deviation σᵢ·Cᵢ to a sum of sensitivity Cᵢ over the same batch. When an example joins,
    each output shifts by a vector of norm at most 1/σᵢ in units of its own noise, so all outputs together shift by at most
    √Σ σᵢ⁻². This is one Gaussian mechanism over the same batch.
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
        noise_multiplier: σ, the standard deviation of the noise in units of the clip norm.
        sample_rate: q, the probability with which a record is in the batch of a step, in (0, 1].
        steps: T.
        delta: δ, from 1e-10 to below 1.
        sampling: "allocation" (random allocation, as in `AllocationSampler`), or "poisson" (Poisson sampling, as in other
            libraries), which costs more.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(get_epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 1)
        1.8
    """
    return get_total_epsilon([Releases(noise_multiplier, sample_rate, steps, sampling=sampling)], delta=delta)


def get_total_epsilon(history: Iterable[Releases], *, delta: float) -> float:
    """Return an upper bound on ε of several runs on the same data; see `get_epsilon`.

    With groups, the bound fails with a probability of at most δ/100, which is included in δ.

    Raises:
        ValueError: If a number in `history`, or δ, is out of range.
    """
    history = tuple(releases for releases in history if releases.steps)
    rounds = merged_rounds(history)
    if not rounds:
        return 0.0
    if any(each.noise_multiplier == 0.0 for each in rounds):
        return math.inf
    return bound(history, delta=delta)


def merged_rounds(history: Iterable[Releases]) -> tuple[Rounds, ...]:
    """Return each kind of round once, with the number of such rounds; refuse numbers out of range."""
    counts: Counter[Rounds] = Counter()
    for releases in history:
        noise_multiplier, sample_rate, steps, strategy, sampling = releases
        if noise_multiplier != 0.0 and not SMALLEST_NOISE_MULTIPLIER <= noise_multiplier < math.inf:
            raise Refusal(
                "out-of-range",
                f"noise_multiplier must be finite, and 0 or at least {SMALLEST_NOISE_MULTIPLIER:g}; got {noise_multiplier}.",
            )
        if not 0.0 < sample_rate <= 1.0:
            raise Refusal(
                "out-of-range",
                "The sample_rate (expected batch size divided by the number of records) must be above 0 and at most 1; "
                f"got {sample_rate}.",
            )
        if steps < 0:
            raise Refusal("out-of-range", f"steps must be at least 0; got {steps}.")
        if sampling == "poisson" and len(strategy) > 1:
            raise Refusal(
                "groups-with-poisson",
                "Poisson sampling needs noise that is independent between steps, because a record may be in the batch of "
                f"every step; got noise that is shaped over {len(strategy)} steps. Leave the argument strategy out, or set "
                "sampling='allocation'.",
            )
        for each in releases.rounds():
            counts[each._replace(number=0)] += each.number
    return tuple(kind._replace(number=number) for kind, number in sorted(counts.items()))


@functools.lru_cache(maxsize=256)  # The log, the ledger and the budget check ask for the same ε.
def bound(history: tuple[Releases, ...], *, delta: float, is_rough: bool = False) -> float:
    """Return ε of at least one step, all with noise; a rough ε takes a third of the time or less, and is not a bound."""
    if not SMALLEST_DELTA <= delta < 1.0:
        raise Refusal(
            "out-of-range",
            f"delta must be at least {SMALLEST_DELTA:g} and below 1; got {delta}. Use a little less than 1/N, with N "
            "records.",
        )
    known = epsilons_of(merged_rounds(history), delta=delta, coarsening=4 if is_rough else 1)
    if all(len(releases.strategy) == 1 for releases in history):
        return max(known)
    runs = [([*releases.rounds()], releases.strategy) for releases in history]
    # The larger bound is simulated first. If it stays the larger one, the other needs no simulation.
    (larger, is_removal), (smaller, _) = sorted(zip(known, (True, False), strict=True), reverse=True)
    simulated = functools.partial(epsilon_of_runs, runs, delta=delta, is_rough=is_rough)
    larger = simulated(is_removal=is_removal, known=larger)
    return larger if smaller <= larger else max(larger, simulated(is_removal=not is_removal, known=smaller))


# The unit of privacy that every larger one contains.
ONE_EXAMPLE: Final = "one example"


class Spent(NamedTuple):
    """The ε and δ that training runs have spent on some weights, and the unit of privacy that they hold for."""

    epsilon: float
    delta: float
    unit: str = ""  # as `PrivacyStatement.unit_of_privacy`; older ledgers do not say it of earlier runs


# Name of a plan (see `name_of_plan`) → what it has spent.
Trainings = Mapping[str, Spent]


def name_of_plan(ledger: str, runs: Sequence[str]) -> str:
    """Return the name of a plan: the name of its ledger, followed by its runs unless the ledger is named after its only run.

    One ledger may be continued in two folders. Their common part counts once, and what each has added counts too.
    """
    return ledger if [*runs] == [ledger] else f"{ledger}/{'.'.join(runs)}"


# The names of searches that were interrupted begin with this. They have published nothing, but what they spent counts.
INTERRUPTED_SEARCH: Final = "search-"


def ledger_and_runs(plan: str) -> tuple[str, list[str]]:
    """Return the ledger and the runs of the plan with this name."""
    ledger, _, runs = plan.partition("/")
    return ledger, runs.split(".") if runs else [ledger]


def is_continued_by(plan: str, other: str) -> bool:
    """Return whether a plan equals another plan, or is the beginning of it."""
    (ledger, runs), (of_other, further) = ledger_and_runs(plan), ledger_and_runs(other)
    return ledger == of_other and runs == further[: len(runs)]


def merged_runs(found: Iterable[Trainings]) -> dict[str, Spent]:
    """Return each plan once, with the largest known spending, since the spending of a plan only grows."""
    known: dict[str, Spent] = {}
    for trainings in found:
        for name, spent in trainings.items():
            known[name] = _larger(spent, known.get(name, spent))
    # The longest plans come first, because the spending of a plan includes that of its beginning.
    kept: dict[str, Spent] = {}
    for name in sorted(known, key=lambda name: -len(ledger_and_runs(name)[1])):
        longer = [other for other in kept if is_continued_by(name, other)]
        for other in longer:
            kept[other] = _larger(kept[other], known[name])
        if not longer:
            kept[name] = known[name]
    return {name: kept[name] for name in known if name in kept}


def _larger(first: Spent, second: Spent) -> Spent:
    # Privacy: the plan satisfies one of two guarantees, and so the weaker guarantee that both imply.
    return Spent(max(first.epsilon, second.epsilon), max(first.delta, second.delta), _common_unit([first, second]))


def _common_unit(spent: Iterable[Spent]) -> str:
    # Privacy: what holds for all examples of a user holds for one of them, but not the other way round. So does what holds
    # for an unknown unit, as every unit consists of examples.
    units = {each.unit for each in spent}
    return units.pop() if len(units) == 1 else ONE_EXAMPLE


def by_ledger(trainings: Trainings) -> dict[str, Spent]:
    """Return ledger → what all its plans have spent together."""
    ledgers: dict[str, dict[str, Spent]] = {}
    for name, spent in trainings.items():
        ledgers.setdefault(ledger_and_runs(name)[0], {})[name] = spent
    return {ledger: total_of_runs(plans) for ledger, plans in ledgers.items()}


def total_of_runs(trainings: Trainings) -> Spent:
    """Return what training runs have spent together if all used the same data: ε and δ add up.

    If the runs differ in the unit of privacy, the sum holds for one example.
    """
    spent = trainings.values()
    return Spent(sum(each.epsilon for each in spent), sum(each.delta for each in spent), _common_unit(spent))


def get_epsilon_of_plans(plans: Sequence[Plan], *, delta: float) -> float:
    """Return ε at δ of several plans, whose terms may have been chosen after results of earlier plans."""
    return sum(get_total_epsilon(plan, delta=delta / len(plans)) for plan in plans)


class Account(NamedTuple):
    """All plans of a training run, in two versions: as planned, and with the last plan up to the counted steps."""

    planned: Sequence[Plan]
    counted: Sequence[Plan]
    target: float | None  # The budget check ends the last plan before ε exceeds this.

    def epsilon(self, *, delta: float) -> float:
        """Return the ε that holds however the last plan ends."""
        planned = get_epsilon_of_plans(self.planned, delta=delta)
        if self.target is None or planned <= self.target:
            return planned
        # Privacy: the number of steps that the budget check allows follows from public numbers, and these steps cost at most
        # the target.
        return max(self.target, get_epsilon_of_plans(self.counted, delta=delta))
