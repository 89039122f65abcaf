"""The choice of a run's filter: one of the grammar, one adapted to the gradients, or one computed from the run's plan."""

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from doppler_hf.filters import LowPassFilter, auto_filter, noise_gain, parse_name
from doppler_hf.optim import OptimalFIR
from doppler_hf.training_args import DopplerTrainingArguments


def chosen_filter(
    args: DopplerTrainingArguments, *, steps: int, noise_std: float, dimension: int
) -> LowPassFilter | OptimalFIR:
    """Return the filter of a run. It costs no privacy, since it depends on arguments and public numbers only.

    Args:
        args: The arguments.
        steps: T, the number of steps of the run.
        noise_std: Standard deviation of the noise per coordinate of the mean gradient.
        dimension: Number of trained parameters d.
    """
    word, values = parse_name(args.low_pass_filter)
    if word == "optimal-fir":
        return OptimalFIR(**{name: int(value) for name, value in values.items()})
    if word != "auto":
        return LowPassFilter.parse(args.low_pass_filter)
    return auto_filter(
        steps=steps,
        noise_std=noise_std,
        max_grad_norm=args.per_sample_max_grad_norm,
        dimension=dimension,
        learning_rates=learning_rates_of(args, steps=steps),
    )


def learning_rates_of(args: DopplerTrainingArguments, *, steps: int) -> list[float] | None:
    """Return the learning rate of each step by the arguments' schedule, shape (steps,), in units of `learning_rate`.

    None for a schedule that depends on the evaluation, which is unknown before the run.
    """
    if args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU:
        return None
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


def filter_in_words(args: DopplerTrainingArguments, low_pass_filter: LowPassFilter | OptimalFIR) -> str:
    """Return one line for the start-up summary: the filter, whether it was chosen, and its noise gain."""
    if isinstance(low_pass_filter, OptimalFIR):
        return f"{low_pass_filter}, taps from the private gradients every {low_pass_filter.update_gap} steps"
    chosen = "auto: " if args.low_pass_filter == "auto" else ""
    return f"{chosen}{low_pass_filter}, noise power × {noise_gain(low_pass_filter):.3g}"
