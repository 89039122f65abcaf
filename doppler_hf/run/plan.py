"""The numbers of a private run, computed once, before its first step: noise, the statement of the ledger, mechanisms.

With a private training loss each step releases two sums over the same draw, of clipped gradients with noise σC and of
clipped losses with noise σ_L·L. Together they are one Gaussian mechanism with 1/σ₀² = 1/σ² + 1/σ_L², and the accountant gets
σ₀. A share s of the budget for the loss means 1/σ_L² = s/σ₀².
"""

import math
from collections.abc import Sequence
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
from doppler_hf.privacy.accounting.accounting import get_epsilon_of_plans, steps_of_whole_turns
from doppler_hf.privacy.loss_bounds import GUESS
from doppler_hf.privacy.noise import PrivateLoss, noise_source
from doppler_hf.run.trained_model import TrainedModel
from doppler_hf.training_args import DopplerTrainingArguments

# What a calibrated σ follows from, in the words of the statement.
_CALIBRATED_FOR: Final = (
    "unit_of_privacy", "num_units", "expected_batch_size",  # first, since others follow from them
    "target_epsilon", "target_delta", "accountant", "sample_rate", "steps_planned", "loss_noise_multiplier",
    "noise_shape", "sampling",
)  # fmt: skip


class Previous(NamedTuple):
    """What a run goes on from."""

    checkpoint: str | None = None  # a folder
    step: int = 0  # at which it was written
    ledger: PrivacyLedger | None = None  # which the run continues
    model: TrainedModel | None = None  # of the run before, of the same trainer


NOTHING: Final = Previous()


def planned_steps(args: DopplerTrainingArguments, sampler: AllocationSampler, *, groups: int = 1) -> int:
    """Return T, with one group by Transformers' own formula (`Trainer.set_initial_training_values`).

    With more a length in epochs leaves out the last few steps, if only some groups would have a turn in them.
    """
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps_per_epoch)
    if steps < 1:
        raise Refusal(
            "out-of-range", f"num_train_epochs must be positive, got {args.num_train_epochs}. Set it or max_steps."
        )
    if args.max_steps > 0:
        return steps
    return steps_of_whole_turns(steps, sample_rate=sampler.sample_rate, groups=groups)


def planned_delta(args: DopplerTrainingArguments, sampler: AllocationSampler) -> float:
    """Return δ, given or the default."""
    units = sampler.num_units
    if units < 2:
        raise Refusal(
            "too-few-records",
            f"train_dataset must have at least 2 records (or users), got {units}: noise hides one among others. Give a "
            "thousand or more to learn anything.",
        )
    delta = default_delta(units) if args.target_delta is None else args.target_delta
    # A mechanism that publishes one of the N units at random satisfies DP with a larger δ.
    if delta * units >= 1.0 and not args.allow_large_delta:
        raise Refusal(
            "delta-too-large",
            f"target_delta must be less than 1/N to protect each of {units:,} units, got {delta:g}, which would allow "
            "publishing one of them. Leave it out for N^-1.1. To study such a run, which is not private, set "
            "allow_large_delta=True.",
        )
    return delta


def averaged_noise(noise_multiplier: float, shape: NoiseShape, *, batch_size: int, steps: int) -> float:
    """Return the noise of the average of all mean gradients of a run, per coordinate and in units of the clip norm.

    The average itself is at most one such unit long, and that only if all clipped gradients agree. How much is learnt of
    some data follows it over numbers of examples, epochs and ε: recipes/results/few-examples.md.
    """
    return noise_multiplier * shape.std_of_sum([1.0] * steps) / (batch_size * steps)


def planned_statement(
    args: DopplerTrainingArguments,
    *,
    sampler: AllocationSampler,
    noise_shape: NoiseShape,
    previous: Previous = NOTHING,
    default_max_loss: float = GUESS,
) -> PrivacyStatement:
    """Return the statement of a run of `args`, with the numbers of the sampling from the sampler itself.

    The private training loss is clipped to `default_max_loss`, unless `args` have a bound.

    A run that continues a ledger keeps its mechanism. With another target or length it is another plan, with what
    the plans so far leave of the target.
    """
    steps, delta = planned_steps(args, sampler, groups=noise_shape.bands), planned_delta(args, sampler)
    continued = previous.ledger
    if continued is not None and continued.statement.steps_planned == (theirs := planned_steps(args, sampler)):
        steps = theirs  # as before 0.3
    of_loss = args.train_loss_budget if args.report_train_loss == "private" else 0.0
    of_gradient = 1.0 - of_loss
    max_loss = default_max_loss if args.per_sample_max_loss is None else args.per_sample_max_loss
    column = args.privacy_unit_column
    source = noise_source(args.device, floating_point_safe=args.floating_point_safe, seed=args.noise_seed)

    def under(noise_multiplier: float) -> PrivacyStatement:
        return PrivacyStatement(
            num_units=sampler.num_units,
            unit_of_privacy="one example" if column is None else f"all examples with the same {column!r}",
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
        )

    if args.noise_multiplier is not None:
        return under(args.noise_multiplier)
    assert args.target_epsilon is not None
    target, ahead, share_of_delta = args.target_epsilon, steps, delta
    if continued is not None:
        again = under(continued.statement.noise_multiplier)
        before, now = vars(continued.statement), vars(again)
        terms = [term for term in _CALIBRATED_FOR if now[term] != before[term]]
        changed = [f"{term} is {now[term]}, and was {before[term]}" for term in terms]
        if "loss_noise_multiplier" in terms and now["train_loss"] != before["train_loss"]:  # in the words of the arguments
            words = f"report_train_loss is {now['train_loss']!r}, and was {before['train_loss']!r}"
            changed[terms.index("loss_noise_multiplier")] = words
        # Also after a crash that cost steps: the guard then stops the run earlier, rather than at another noise.
        if not changed:
            return again
        if steps > previous.step and continued.plans:
            # Results may have led to the new terms, so that plans add up: each has its own part of ε and δ.
            ahead, share_of_delta = steps - previous.step, delta / (1 + len(continued.plans))
            target -= get_epsilon_of_plans(continued.plans, delta=delta - share_of_delta)
            # With the last hundredth of a budget, nothing could be learned: the noise would be too large.
            if target < 0.01 * args.target_epsilon:
                raise budget_spent(continued.epsilon(), args, changed=changed)
    joint = get_noise_multiplier(
        target_epsilon=target,
        target_delta=share_of_delta,
        sample_rate=sampler.sample_rate,
        steps=ahead,
        strategy=noise_shape.c,
        sampling=args.sampling,
    )
    # 1/σ² is divided between gradient and loss, so that each has more noise than both together.
    return under(joint / math.sqrt(of_gradient))


def mechanisms_of(
    args: DopplerTrainingArguments,
    statement: PrivacyStatement,
    *,
    shape: NoiseShape,
    first_step: int,
) -> tuple[GaussianMechanism, PrivateLoss | None]:
    """Return what turns clipped sums into private gradients, and the private training loss if there is one."""

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


def budget_spent(epsilon: float, args: DopplerTrainingArguments, *, changed: Sequence[str] = ()) -> Refusal:
    """Return the error of a run for which too little of its budget is left, with what makes its plan another one."""
    return Refusal(
        "budget-spent",
        f"The privacy budget is spent: ε = {epsilon:.4g} of target_epsilon = {args.target_epsilon}. What was planned "
        f"counts, wherever a run has ended{''.join(f'; {term}' for term in changed)}. "
        + ("Resume with the arguments of the earlier run" if changed else "With the same arguments that run is over")
        + ", raise target_epsilon to continue, or add another ε: an untrained model and a new trainer.",
    )
