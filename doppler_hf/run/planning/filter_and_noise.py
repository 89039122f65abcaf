"""The filter and the shape of the noise of a run, as given in the arguments or chosen by `auto`.

Choosing costs no privacy, since it depends on arguments and public numbers only: ε, δ, q, T and the schedule.
"""

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, NoiseShape, auto_filter
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy import AllocationSampler, PrivacyStatement
from doppler_hf.privacy.accounting.selection import Guarantee
from doppler_hf.run.planning.auto_noise import shape_of_equal_epsilon
from doppler_hf.run.planning.plan import Trial, planned_delta, planned_steps
from doppler_hf.run.resuming.checkpoints import filter_of_checkpoint
from doppler_hf.training_args import DopplerTrainingArguments

# The most bytes for the noise of earlier steps if the shape is chosen and not given.
MOST_MEMORY = 2**31


def chosen_filter(
    args: DopplerTrainingArguments, statement: PrivacyStatement, *, checkpoint: str | None = None
) -> LowPassFilter:
    """Return the filter of a run."""
    if args.low_pass_filter != "auto":
        return LowPassFilter.parse(args.low_pass_filter)
    if (saved := filter_of_checkpoint(checkpoint)) is not None:  # the checkpoint has this filter's states
        return saved
    shape = NoiseShape.parse(statement.noise_shape)
    if shape.is_white and args.base_optimizer != "sgd":
        # With white noise a filter gains nothing (`filters.closed_loop`), except larger learning rates for SGD.
        return PAPER_FILTERS["none"]
    rates = learning_rates_of(args, steps=statement.steps_planned)
    return auto_filter(statement.steps_planned, learning_rates=rates, noise=shape)


def chosen_noise_shape(
    args: DopplerTrainingArguments,
    *,
    sampler: AllocationSampler,
    num_trained: int,
    resumed: PrivacyStatement | None = None,
    trial: Trial | None = None,
) -> NoiseShape:
    """Return the shape of the noise of a run, or of a trial of a search."""
    if args.noise_shape != "auto":
        return NoiseShape.parse(args.noise_shape)
    # Poisson sampling may draw a unit at every step. Without a target there are no shapes of equal ε. GaLore saves memory,
    # but shaped noise keeps bands - 1 whole gradients in memory.
    if args.sampling == "poisson" or args.target_epsilon is None or args.optim_target_modules:
        return WHITE
    # A resumed run keeps its shape, as it keeps its filter, unless larger batches give a unit more than one turn in `bands`
    # steps.
    if resumed is not None and (kept := NoiseShape.parse(resumed.noise_shape)).bands * sampler.sample_rate <= 1.0:
        return kept
    steps = planned_steps(args, sampler)
    return shape_of_equal_epsilon(
        Guarantee(args.target_epsilon, planned_delta(args, sampler)),
        None if trial is None else trial.selection,
        sample_rate=sampler.sample_rate,
        steps=steps,
        learning_rates=learning_rates_of(args, steps=steps),
        low_pass_filter=None if args.low_pass_filter == "auto" else LowPassFilter.parse(args.low_pass_filter),
        most_bands=1 + MOST_MEMORY // (4 * max(1, num_trained)),  # a model without trained weights is refused later
    )


def learning_rates_of(args: DopplerTrainingArguments, *, steps: int) -> list[float] | None:
    """Return the learning rate of each step by the arguments' schedule, shape (steps,), in units of `learning_rate`.

    None for a schedule that follows the evaluations, which are unknown before the run.
    """
    if args.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY):
        return None
    # Transformers' schedules are functions of the step, in objects that need an optimizer. This one has a single zero.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    (share,) = scheduler.lr_lambdas
    return [float(share(step)) for step in range(steps)]
