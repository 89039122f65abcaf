"""Checks of the loop: its optimizer and its learning rate."""

from typing import Any, Final

from doppler_hf.errors import Refusal, page
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.run.learning_rate import FAR, check_given_learning_rate, is_any_rate_allowed
from doppler_hf.run.optimizer import first_learning_rate
from doppler_hf.run.private_run import PrivateRun

# The number of steps, spread over the run, at which a schedule is evaluated.
_LOOKED_AT: Final = 1000


def refuse_another_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that the user's `create_optimizer` made in place of the arguments' `DopplerOptimizer`."""
    if not isinstance(optimizer, DopplerOptimizer):
        raise Refusal(
            "another-optimizer",
            f"Expected a DopplerOptimizer from create_optimizer in a private run; got {type(optimizer).__name__}. Call "
            f"super().create_optimizer() and change the parameter groups of its result ({page('guides/own-loss')}).",
        )


def refuse_other_parameters(_run: PrivateRun, trainer: Any) -> None:
    """Refuse an optimizer whose parameters are not exactly the trained ones."""
    optimizer, model = trainer.optimizer.optimizer, trainer.model
    of_optimizer = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not of_optimizer <= {*model.parameters()}:  # such as parameters from before FSDP cut them, or of a loss
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
    """Refuse a learning rate that is very far from the automatic one, and note a rate that is far from it."""
    # A resumed optimizer has the learning rate of its checkpoint, which is not checked again.
    if first_learning_rate(trainer.optimizer.optimizer) == trainer.args.learning_rate:
        note = check_given_learning_rate(trainer.args, run.statement, model=trainer.model)
        run.notes += [note] if note else []


def refuse_a_rate_that_never_arrives(run: PrivateRun, trainer: Any) -> None:
    """Refuse a warmup that is longer than the run, and a schedule that never reaches a tenth of the learning rate."""
    shares = getattr(trainer.lr_scheduler, "lr_lambdas", None)
    if not shares or is_any_rate_allowed(trainer.args):  # only lambda schedules can be evaluated beforehand
        return
    steps = run.statement.steps_planned
    looked_at = {*range(0, steps, max(1, steps // _LOOKED_AT)), max(0, steps - 1)}
    largest = max(share(step) for share in shares for step in looked_at)
    warmup = trainer.args.get_warmup_steps(steps)
    if largest < 1.0 / FAR or (warmup > steps and largest < 1.0):
        raise Refusal(
            "rate-never-arrives",
            f"In this run of {steps:,} steps"
            + (f" with {warmup:,} warmup steps" if warmup > steps else "")
            + f", the schedule never raises the learning rate above {largest:.2g} times its set value, so the run would "
            "spend its ε and learn little. Shorten the warmup, for example warmup_steps=0.1 (a tenth of the run), or set "
            "allow_any_learning_rate=True to try it anyway.",
        )


def refuse_another_schedule(trainer: Any) -> None:
    """Refuse a scheduler that was set on the trainer and controls a different optimizer."""
    of = getattr(trainer.lr_scheduler, "optimizer", None)
    if of is not None and of.param_groups is not trainer.optimizer.param_groups:
        raise Refusal(
            "another-schedule",
            f"trainer.lr_scheduler (a {type(trainer.lr_scheduler).__name__}) controls a different optimizer than this "
            "run's, so it would have no effect. Override create_scheduler instead.",
        )
