"""Compute the numbers of a private run once, before its first step: noise, the statement of the ledger, mechanisms.

With a private training loss, each step releases two sums over the same batch: clipped gradients with noise σC, and clipped
losses with noise σ_L·L. Together they are one Gaussian mechanism with 1/σ₀² = 1/σ² + 1/σ_L², and the accountant gets
σ₀. A share s of the budget for the loss means 1/σ_L² = s/σ₀².
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from doppler_hf.errors import Refusal
from doppler_hf.filters import NoiseShape
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy import (
    AllocationSampler,
    GaussianMechanism,
    PrivacyLedger,
    PrivacyStatement,
    default_delta,
    get_noise_multiplier,
)
from doppler_hf.privacy.accounting.accounting import (
    ONE_EXAMPLE,
    Trainings,
    get_epsilon_of_plans,
    get_total_epsilon,
    without_partial_round,
)
from doppler_hf.privacy.accounting.calibration import noise_multiplier_of_trial
from doppler_hf.privacy.accounting.selection import Selection
from doppler_hf.privacy.ledger.record import refuse_other_terms
from doppler_hf.privacy.ledger.statement import SearchTerms
from doppler_hf.privacy.loss_bounds import GUESS
from doppler_hf.privacy.noise import PrivateLoss, noise_source
from doppler_hf.run.resuming.earlier_ledgers import NOTHING, Previous
from doppler_hf.training_args import DopplerTrainingArguments

# The fields of the statement on which a calibrated σ depends.
_CALIBRATED_FOR: Final = (
    "unit_of_privacy", "num_units", "expected_batch_size",  # These come first, since other fields follow from them.
    "target_epsilon", "target_delta", "accountant", "sample_rate", "steps_planned", "loss_noise_multiplier",
    "noise_shape", "sampling",
)  # fmt: skip
# A new plan needs this share of its target, since with less its noise would be too large to learn anything.
SMALLEST_SHARE: Final = 0.01


_LIKE_NOISE: Final = "with which it has about as much noise as the earlier run; a smaller target adds more noise"
# The time of all entries of a trial's ledger: the true times would tell how long its search took.
NO_TIME: Final = "1970-01-01T00:00:00+00:00"


class Trial(NamedTuple):
    """What a run must know as a trial of a search: the guarantees, and what the ledger of the best trial says."""

    selection: Selection
    interrupted: Trainings  # what earlier searches had spent when they were interrupted
    output_dir: Path  # of the search, in which the best trial is saved


def planned_batch_size(args: DopplerTrainingArguments) -> int:
    """Return the expected batch size B, over all micro-batches and processes."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def in_digits(terms: object) -> str:
    """Return terms as text, with numbers to six digits: equal for terms that two processors have computed.

    Example:
        >>> in_digits({"sigma": 1.0000000001, "steps": 1000000})
        "{'sigma': 1, 'steps': 1000000}"
    """
    return re.sub(r"\d+\.\d+(e[-+]?\d+)?", lambda number: f"{float(number[0]):.6g}", str(terms))


def planned_steps(args: DopplerTrainingArguments, sampler: AllocationSampler, *, groups: int = 1) -> int:
    """Return the number of steps T, for one group by Transformers' own formula (`Trainer.set_initial_training_values`).

    With more groups, a length in epochs leaves out the last few steps if only some groups would take part in them.
    """
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps_per_epoch)
    if steps < 1:
        raise Refusal(
            "out-of-range", f"num_train_epochs must be positive; got {args.num_train_epochs}. Increase it, or set max_steps."
        )
    if args.max_steps > 0:
        return steps
    return without_partial_round(steps, sample_rate=sampler.sample_rate, groups=groups)


def planned_delta(args: DopplerTrainingArguments, sampler: AllocationSampler) -> float:
    """Return the given δ, or the default."""
    units = sampler.num_units
    if units < 2:
        raise Refusal(
            "too-few-records",
            f"train_dataset must have at least 2 {sampler.noun}s; got {units}. Privacy means that a {sampler.noun} is "
            f"hidden among others. To learn anything, use a thousand {sampler.noun}s or more.",
        )
    delta = default_delta(units) if args.target_delta is None else args.target_delta
    # With a larger δ, even a mechanism that publishes one of the N units at random satisfies DP.
    if delta * units >= 1.0 and not args.allow_large_delta:
        raise Refusal(
            "delta-too-large",
            f"target_delta must be less than 1/N, with N = {units:,} {sampler.noun}s; got {delta:g}. A δ of 1/N or more "
            f"would allow one {sampler.noun} to be published in full. Leave target_delta out to use N^-1.1. To study such "
            "a run, which is not private, set allow_large_delta=True.",
        )
    return delta


def refuse_hopeless_target(args: DopplerTrainingArguments, sampler: AllocationSampler) -> None:
    """Refuse a target so small that no run can learn; its calibration would take many times as long as that of others."""
    # All N units together may change the distribution of the weights by a factor of about e^(Nε), which is then below e.
    if args.target_epsilon is not None and args.target_epsilon * sampler.num_units < 1.0:
        raise Refusal(
            "epsilon-too-small",
            f"target_epsilon must be at least 1/N, with N = {sampler.num_units:,} {sampler.noun}s; got "
            f"{args.target_epsilon:g}. With a smaller ε, even all {sampler.noun}s together may hardly change the model, so "
            "it cannot learn. Raise target_epsilon; a usual value is 8. For a study of such noise, set noise_multiplier in "
            "its place.",
        )


def planned_statement(
    args: DopplerTrainingArguments,
    *,
    sampler: AllocationSampler,
    noise_shape: NoiseShape,
    previous: Previous = NOTHING,
    default_max_loss: float = GUESS,
    trial: Trial | None = None,
) -> PrivacyStatement:
    """Return the statement of a run of `args`, with the numbers of the sampling from the sampler itself.

    The private training loss is clipped to `default_max_loss`, unless `args` have a bound.

    A run that continues a ledger keeps its mechanism. With a different target or length it is a new plan, and gets the part
    of the target that the earlier plans leave.
    """
    steps, delta = planned_steps(args, sampler, groups=noise_shape.bands), planned_delta(args, sampler)
    continued = previous.ledger
    if continued is not None and continued.statement.steps_planned == (theirs := planned_steps(args, sampler)):
        steps = theirs  # ledgers from before version 0.3 did not leave out steps
    of_loss = args.train_loss_budget if args.report_train_loss == "private" else 0.0
    of_gradient = 1.0 - of_loss
    max_loss = default_max_loss if args.per_sample_max_loss is None else args.per_sample_max_loss
    column = args.privacy_unit_column
    source = noise_source(args.device, floating_point_safe=args.floating_point_safe, seed=args.noise_seed)

    def under(noise_multiplier: float) -> PrivacyStatement:
        return PrivacyStatement(
            num_units=sampler.num_units,
            unit_of_privacy=ONE_EXAMPLE if column is None else f"all examples with the same {column!r}",
            max_examples_per_unit=args.max_examples_per_unit,
            expected_batch_size=sampler.expected_batch_size,
            sample_rate=sampler.sample_rate,
            noise_multiplier=noise_multiplier,
            noise_shape=str(noise_shape),
            per_sample_max_grad_norm=args.per_sample_max_grad_norm,
            clipping=args.clipping,
            clipping_granularity=args.clipping_granularity,
            augmentation_multiplicity=args.augmentation_multiplicity,
            clip_unit_mean=args.clip_unit_mean and column is not None,
            train_loss=args.report_train_loss,
            per_sample_max_loss=max_loss if of_loss else None,
            loss_noise_multiplier=noise_multiplier * math.sqrt(of_gradient / of_loss) if of_loss else None,
            target_delta=delta,
            target_epsilon=args.target_epsilon,
            accountant="pld",
            steps_planned=steps,
            private=noise_multiplier > 0.0 and sampler.is_secret,
            noise_source=source,
            sampling=args.sampling,
            search=None if trial is None else SearchTerms.of(trial.selection),
        )

    if continued is not None:
        again = under(continued.statement.noise_multiplier)
        refuse_other_terms(continued.statement, again)  # no target_epsilon helps against these
    if args.noise_multiplier is not None:
        return under(args.noise_multiplier)
    assert args.target_epsilon is not None
    target, ahead, share_of_delta = args.target_epsilon, steps, delta
    if continued is not None:
        # Keep the noise also after a crash that cost steps: the guard then stops the run earlier.
        if not (changed := _changes_in_words(continued.statement, again)):
            return again
        if steps > previous.step and continued.begun_plans:
            # The new terms may depend on results, so plans add up, and each has its own part of ε and δ.
            ahead, share_of_delta = steps - previous.step, delta / (1 + len(continued.begun_plans))
            target -= epsilon_beside_new_plan(continued)
            if target < SMALLEST_SHARE * args.target_epsilon:
                can_finish = _can_finish(continued, previous.step)
                raise budget_spent(continued, args, now=again, steps=ahead, new_plan=changed, can_finish=can_finish)
    if trial is not None:
        assert math.isclose(trial.selection.delta, delta), "δ of the trials does not add up to that of the search"
        # Privacy: every trial satisfies the two guarantees from which the ε of the search follows, whatever its settings.
        joint = noise_multiplier_of_trial(
            trial.selection, sample_rate=sampler.sample_rate, steps=steps, strategy=noise_shape.c, sampling=args.sampling
        )
        return under(joint / math.sqrt(of_gradient))
    joint = get_noise_multiplier(
        target_epsilon=target,
        target_delta=share_of_delta,
        sample_rate=sampler.sample_rate,
        steps=ahead,
        strategy=noise_shape.c,
        sampling=args.sampling,
    )
    # 1/σ₀² is divided between gradient and loss, so each of them has more noise than the joint mechanism.
    statement = under(joint / math.sqrt(of_gradient))
    # With groups, the last bit of σ₀ may change a simulated ε by some thousandths. The run would end before its plan if it
    # were then above the target.
    while statement.private and get_total_epsilon([statement.releases(ahead)], delta=share_of_delta) > target:
        statement = under(1.001 * statement.noise_multiplier)
    return statement


def _changes_in_words(before: PrivacyStatement, now: PrivacyStatement) -> list[str]:
    """Return which terms of a run have changed on which its noise depends; nothing if it continues its plan."""
    changes = {
        term: f"{term} changed from {getattr(before, term)} to {getattr(now, term)}"
        for term in _CALIBRATED_FOR
        if getattr(now, term) != getattr(before, term)
    }
    if "loss_noise_multiplier" in changes and now.train_loss != before.train_loss:  # Name the argument to the user.
        changes["loss_noise_multiplier"] = f"report_train_loss changed from {before.train_loss!r} to {now.train_loss!r}"
    return [*changes.values()]


def mechanisms_of(
    args: DopplerTrainingArguments,
    statement: PrivacyStatement,
    *,
    shape: NoiseShape,
    first_step: int,
) -> tuple[GaussianMechanism, PrivateLoss | None]:
    """Return the mechanism that turns clipped sums into private gradients, and that of the private loss if there is one."""

    def gaussian(noise_multiplier: float, max_norm: float, *, shape: NoiseShape = WHITE) -> GaussianMechanism:
        return GaussianMechanism(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_norm,
            expected_batch_size=statement.expected_batch_size,
            shape=shape,
            first_step=first_step,
            device=args.device,
            floating_point_safe=args.floating_point_safe,
            seed=args.noise_seed,
        )

    of_gradient = gaussian(statement.noise_multiplier, args.per_sample_max_grad_norm, shape=shape)
    if statement.loss_noise_multiplier is None:
        return of_gradient, None
    assert statement.per_sample_max_loss is not None
    of_loss = gaussian(statement.loss_noise_multiplier, statement.per_sample_max_loss)
    return of_gradient, PrivateLoss(of_loss, device=args.device)


def epsilon_beside_new_plan(ledger: PrivacyLedger) -> float:
    """Return what the plans of a ledger cost once a new plan is added, which leaves each of them a smaller part of δ."""
    delta = ledger.statement.target_delta
    return get_epsilon_of_plans(ledger.begun_plans, delta=delta - delta / (1 + len(ledger.begun_plans)))


def noise_of_average(statement: PrivacyStatement, *, steps: int) -> float:
    """Return the noise of the average gradient of so many steps of a run per coordinate, in units of C."""
    shape = NoiseShape.parse(statement.noise_shape)
    return statement.noise_multiplier * shape.std_of_average(steps) / statement.expected_batch_size


def last_with_steps(ledger: PrivacyLedger) -> PrivacyStatement:
    """Return the statement of the last run that made a step; a run that was stopped before its first trained nothing."""
    return next((run.statement for run in reversed(ledger.runs) if run.steps_made), ledger.statement)


def target_of_equal_noise(ledger: PrivacyLedger, now: PrivacyStatement, *, steps: int) -> float:
    """Return the target, rounded up, at which a new plan has as much noise as the ledger's last run.

    Args:
        ledger: The ledger that the new plan continues.
        now: The terms of the new plan, whose noise multiplier does not matter.
        steps: The steps of the new plan.
    """
    beside, share_of_delta = epsilon_beside_new_plan(ledger), now.target_delta / (1 + len(ledger.begun_plans))
    if math.isinf(beside) or now.noise_multiplier == 0.0:
        return math.inf
    factor = noise_of_average(last_with_steps(ledger), steps=steps) / noise_of_average(now, steps=steps)
    further = now.releases(steps)
    further = further._replace(noise_multiplier=factor * further.noise_multiplier)
    return _rounded_up(max(beside + get_total_epsilon([further], delta=share_of_delta), beside / (1.0 - SMALLEST_SHARE)))


def budget_spent(
    ledger: PrivacyLedger,
    args: DopplerTrainingArguments,
    *,
    now: PrivacyStatement,
    steps: int,
    left_for: str = "",
    new_plan: Sequence[str] = (),
    can_finish: bool = False,
) -> Refusal:
    """Return the refusal of a run for which too little of its budget is left.

    Args:
        ledger: The ledger that the run would continue, as the earlier run left it.
        args: The arguments of the run.
        now: The terms of the run, with any noise multiplier.
        steps: The number of steps that it would make.
        left_for: What the budget does not allow, in words; empty if no step is left, and the target is below what was spent.
        new_plan: What makes the run a new plan, in words; empty if it continues the last plan.
        can_finish: Whether the earlier run could be finished with its own arguments.
    """
    spent, beside = ledger.epsilon(), epsilon_beside_new_plan(ledger)
    needs_plan = bool(new_plan or left_for)
    # The smallest possible target would leave so little for the new plan that its noise would ruin the model.
    wanted = target_of_equal_noise(ledger, now, steps=steps) if needs_plan else _rounded_up(spent)
    share = f"A new plan leaves the earlier steps only a part of δ, at which all that were planned cost ε = {beside:.4g}. "
    return Refusal(
        "budget-spent",
        f"The privacy budget of this run is spent: ε = {beside if new_plan else spent:.4g} of target_epsilon = "
        f"{args.target_epsilon}. "
        + (
            f"This run needs a new plan ({', '.join(new_plan)}). {share}Without it, the earlier run has ε = {spent:.4g}. "
            if new_plan
            else f"Nothing is left for {left_for}. "
            if left_for
            else ""
        )
        + ("To finish the earlier run, resume with its arguments. " if can_finish else "")
        + (
            ""
            if math.isinf(wanted)
            else f"To continue with the new plan, set target_epsilon={wanted:g}, {_LIKE_NOISE}. "
            if new_plan
            else f"To continue, set target_epsilon={wanted:g}, {_LIKE_NOISE}. {share}"
            if left_for
            else f"To resume the finished run, set target_epsilon={wanted:g} or more. "
        )
        + "You can also start over with an untrained model and a new trainer; the ε of both runs then add up.",
    )


def _can_finish(ledger: PrivacyLedger, step: int) -> bool:
    """Return whether a run with the terms of the earlier run could make a step, if it can continue that run's round."""
    theirs = ledger.statement
    left = ledger.steps_allowed_to(theirs, from_step=step, keeps_rounds=True)
    remaining = max(0, theirs.steps_planned - step)
    return ledger.affordable_steps(remaining if left is None else min(remaining, left)) > 0


def _rounded_up(epsilon: float) -> float:
    """Return ε rounded up to three digits.

    Example:
        >>> _rounded_up(10.6213), _rounded_up(0.051)
        (10.7, 0.051)
    """
    if math.isinf(epsilon) or epsilon == 0.0:
        return epsilon
    digits = 2 - math.floor(math.log10(epsilon))
    return round(math.ceil(epsilon * 10.0**digits * (1.0 - 1e-12)) / 10.0**digits, digits)
