"""The optimizer of a private run: the host's weight-decay groups, the filter, the base optimizer, and GaLore.

The filter is one of the grammar, one adapted to the gradients, or one computed from the run's plan. Choosing it costs no
privacy, since it depends on arguments and public numbers only.
"""

from collections.abc import Collection

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from doppler_hf.filters import LowPassFilter, auto_filter, noise_gain, parse_name
from doppler_hf.optim import DopplerOptimizer, OptimalFIR
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.galore import GaloreArguments, target_parameters


def optimizer_in_words(args: DopplerTrainingArguments) -> str:
    """Return the optimizer of the filtered gradient, and GaLore if it is on, in one line."""
    targets = args.optim_target_modules
    if targets is None:
        return args.base_optimizer
    named = targets if isinstance(targets, str) else ", ".join(targets)
    return f"{args.base_optimizer}, GaLore of rank {GaloreArguments.parse(args.optim_args).rank} on {named}"


def optimizer_of(
    args: DopplerTrainingArguments, model: nn.Module, *, run: PrivateRun, decayed: Collection[str]
) -> DopplerOptimizer:
    """Return the `DopplerOptimizer` of the arguments, with weight decay for the parameters named `decayed`.

    Raises:
        ValueError: If `optim_target_modules` matches nothing.
    """
    galore = GaloreArguments.parse(args.optim_args)
    targets = args.optim_target_modules
    projected = {} if targets is None else target_parameters(model, targets)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    noise_std = run.settled_noise_std
    dimension = sum(p.numel() for _, p in named)
    groups = (
        {
            "params": [p for name, p in named if (name in decayed, name in projected) == (decays, is_projected)],
            "weight_decay": args.weight_decay if decays else 0.0,
            **({"rank": galore.rank} if is_projected else {}),
        }
        for is_projected in (True, False)
        for decays in (True, False)
    )
    return DopplerOptimizer(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        low_pass_filter=chosen_filter(args, steps=run.statement.steps_planned, noise_std=noise_std, dimension=dimension),
        base=args.base_optimizer,
        beta2=args.adam_beta2,
        eps=args.adam_epsilon,
        floor=args.adam_bc_floor,
        noise_std=noise_std,
        **{name: value for name, value in vars(galore).items() if name != "rank"},  # which some groups have
    )


def chosen_filter(
    args: DopplerTrainingArguments, *, steps: int, noise_std: float, dimension: int
) -> LowPassFilter | OptimalFIR:
    """Return the filter of a run.

    Args:
        args: The arguments.
        steps: T, the number of steps of the run.
        noise_std: Standard deviation of the noise per coordinate of the mean gradient.
        dimension: Number of trained parameters d.
    """
    word, _ = parse_name(args.low_pass_filter)
    if word == "optimal-fir":
        return OptimalFIR.parse(args.low_pass_filter)
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
