"""Checks of the loop: its optimizer and its learning rate."""

import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

from doppler_hf.errors import Refusal, page
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.run.optimizer import first_learning_rate
from doppler_hf.run.planning.learning_rate import FAR, check_given_learning_rate, is_any_rate_allowed
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.training_args import DopplerTrainingArguments

# The number of steps, spread over the run, at which a schedule is evaluated.
_LOOKED_AT: Final = 1000
# The most steps for which a schedule is tried that cannot be evaluated at any step: they take half a second.
_MOST_TRIED: Final = 20_000


def refuse_another_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that the user's `create_optimizer` made in place of the arguments' `DopplerOptimizer`."""
    if not isinstance(optimizer, DopplerOptimizer):
        raise Refusal(
            "another-optimizer",
            f"Expected a DopplerOptimizer from create_optimizer in a private run; got {type(optimizer).__name__}. Call "
            f"super().create_optimizer() and change the parameter groups of its result ({page('guides/own-loss')}).",
        )


def refuse_optimizer_of_other_parameters(trainer: Any) -> None:
    """Refuse an optimizer whose parameters are not exactly the trained ones."""
    optimizer, model = trainer.optimizer.optimizer, trainer.model
    of_optimizer = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    # Such parameters may be those from before FSDP cut the model, or those of a loss.
    if not of_optimizer <= {*model.parameters()}:
        raise Refusal(
            "foreign-parameters",
            "The optimizer has parameters that are not in the model, so they would get no private gradient. If a loss has "
            "learned weights, make them a layer of the model. With FSDP, do not call create_optimizer() before train(), or "
            "make a new trainer.",
        )
    named = model.named_parameters()
    missing = [name for name, parameter in named if parameter.requires_grad and parameter not in of_optimizer]
    if missing:
        raise Refusal(
            "forgotten-parameters",
            f"The optimizer lacks {missing[0]!r} and {len(missing) - 1} other trainable parameters, so they would not be "
            "trained. Freeze parameters that should not be trained (requires_grad_(False)), and do not call "
            "create_optimizer() before train().",
        )


def refuse_another_rate(run: PrivateRun, trainer: Any) -> None:
    """Refuse a learning rate of 0 or very far from the automatic one, and note a rate that is far from it."""
    # A resumed optimizer has the learning rate of its checkpoint, which is not checked again.
    if first_learning_rate(trainer.optimizer.optimizer) == trainer.args.learning_rate:
        note = check_given_learning_rate(trainer.args, run.statement, model=trainer.model)
        run.notes += [note] if note else []


def refuse_vanishing_learning_rate(run: PrivateRun, trainer: Any) -> None:
    """Refuse a warmup that is longer than the run, and a schedule that never reaches a tenth of the learning rate."""
    steps = run.statement.steps_planned
    refuse_vanishing_rates(_rate_factors(trainer, steps, first=run.previous.step), trainer.args, steps=steps)


def refuse_vanishing_rates(shares: Sequence[float], args: DopplerTrainingArguments, *, steps: int) -> None:
    """Refuse such a schedule, given as shares of the set rate, or none if they are not known beforehand."""
    if not shares or is_any_rate_allowed(args):
        return
    largest, warmup = max(shares), args.get_warmup_steps(steps)
    if largest < 1.0 / FAR or (warmup > steps and largest < 1.0):
        raise Refusal(
            "rate-never-arrives",
            f"In this run of {steps:,} steps"
            + (f" with {warmup:,} warmup steps" if warmup > steps else "")
            + f", the schedule never raises the learning rate above {largest:.2g} times its set value, so the run would "
            "spend its ε and learn little. Shorten the warmup, for example warmup_steps=0.1 (a tenth of the run), or set "
            "allow_any_learning_rate=True to try it anyway.",
        )


def _rate_factors(trainer: Any, steps: int, *, first: int) -> list[float]:
    """Return learning rates of the run as multiples of the set rate, or an empty list if they are not known beforehand."""
    scheduler = trainer.lr_scheduler
    if (lambdas := getattr(scheduler, "lr_lambdas", None)) is not None:
        looked_at = {*range(0, steps, max(1, steps // _LOOKED_AT)), max(0, steps - 1)}
        return [share(step) for share in lambdas for step in looked_at]
    if not isinstance(scheduler, LRScheduler) or not _is_simple(scheduler) or not first < steps <= first + _MOST_TRIED:
        return []
    # Schedules of other kinds compute each rate from the one before, so a copy is moved on step by step.
    tried, groups = _detached_schedule(scheduler)
    shares = []
    with warnings.catch_warnings(action="ignore"):  # torch misses the optimizer's steps
        for step in range(first, steps):
            shares += [float(group["lr"]) / max(_set_rate(group), 1e-300) for group in groups]
            try:
                tried.step()
            except Exception as error:
                raise Refusal(
                    "schedule-fails",
                    f"trainer.lr_scheduler (a {type(scheduler).__name__}) fails with a {type(error).__name__} in step "
                    f"{step + 1} of {steps:,}: {str(error).rstrip('.')}. It was tried before the first step, so no ε is "
                    "spent. Override create_scheduler, whose num_training_steps is the number of steps.",
                ) from error
    return shares


def _set_rate(group: dict[str, Any]) -> float:
    """Return the rate of a group of parameters at which a schedule aims: OneCycleLR begins far below it."""
    return max(float(group.get(name, 0.0)) for name in ("initial_lr", "max_lr"))


def _is_simple(value: Any) -> bool:
    """Return whether a schedule can be copied: it refers to an optimizer, other schedules and plain values alone."""
    if isinstance(value, LRScheduler):
        # ReduceLROnPlateau needs a metric, which is not known yet.
        takes_nothing = all(each.default is not each.empty for each in inspect.signature(value.step).parameters.values())
        return takes_nothing and all(_is_simple(each) for name, each in vars(value).items() if name != "optimizer")
    if isinstance(value, dict | list | tuple):
        return all(map(_is_simple, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, int | float | str) or (callable(value) and not hasattr(value, "__self__"))


class _Groups:
    """A stand-in for an optimizer that has only the numbers of its groups of parameters."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {name: each for name, each in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self.defaults = dict(optimizer.defaults)

    def step(self) -> None:
        """Do nothing."""


def _detached_schedule(scheduler: LRScheduler) -> tuple[LRScheduler, list[dict[str, Any]]]:
    """Return a copy of a schedule that moves nothing of the run, and the groups of parameters whose rates it sets."""
    optimizer = scheduler.optimizer
    groups = _Groups(optimizer)
    copied = copy.deepcopy(scheduler, {id(optimizer): groups, id(getattr(optimizer, "optimizer", None)): groups})
    return copied, groups.param_groups


def refuse_another_schedule(trainer: Any) -> None:
    """Refuse a scheduler that was set on the trainer and controls a different optimizer."""
    of = getattr(trainer.lr_scheduler, "optimizer", None)
    if of is not None and of.param_groups is not trainer.optimizer.param_groups:
        raise Refusal(
            "another-schedule",
            f"trainer.lr_scheduler (a {type(trainer.lr_scheduler).__name__}) controls a different optimizer than this "
            "run's, so it would have no effect. Override create_scheduler instead.",
        )
