"""Checks of the loop: its optimizer and its learning rate."""

from typing import Any, Final

from doppler_hf.errors import Refusal, page
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.run.learning_rate import FAR, is_any_rate_allowed, told_of_another_rate
from doppler_hf.run.optimizer import first_learning_rate
from doppler_hf.run.private_run import PrivateRun

# So many steps of a schedule are looked at, spread over the run.
_LOOKED_AT: Final = 1000


def refuse_another_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that the user's `create_optimizer` made instead of the arguments' one."""
    if not isinstance(optimizer, DopplerOptimizer):
        raise Refusal(
            "another-optimizer",
            f"create_optimizer must make a DopplerOptimizer in a private run, got {type(optimizer).__name__}. Change the "
            f"groups of super().create_optimizer() ({page('guides/own-loss')}).",
        )


def refuse_other_parameters(_run: PrivateRun, trainer: Any) -> None:
    """Refuse an optimizer with more or fewer parameters than are trained."""
    optimizer, model = trainer.optimizer.optimizer, trainer.model
    of_optimizer = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not of_optimizer <= {*model.parameters()}:  # those before FSDP has cut them, or of a loss
        raise Refusal(
            "foreign-parameters",
            "The optimizer must have only the model's parameters, got others. Make learned weights of a loss a layer of the "
            "model. With FSDP leave create_optimizer() to train(), or make a new trainer.",
        )
    named = model.named_parameters()
    missing = [name for name, parameter in named if parameter.requires_grad and parameter not in of_optimizer]
    if missing:
        raise Refusal(
            "forgotten-parameters",
            f"The optimizer must have each parameter that is trained, got one without {missing[0]!r} and {len(missing) - 1} "
            "others. Freeze what is not to be trained (requires_grad_(False)), and leave create_optimizer() to train().",
        )


def refuse_another_rate(run: PrivateRun, trainer: Any) -> None:
    """Refuse a learning rate very far from that of the rule, and note one that is far."""
    # A checkpoint's rate is its own.
    if first_learning_rate(trainer.optimizer.optimizer) == trainer.args.learning_rate:
        note = told_of_another_rate(trainer.args, run.statement, model=trainer.model)
        run.notes += [note] if note else []


def refuse_a_rate_that_never_arrives(run: PrivateRun, trainer: Any) -> None:
    """Refuse a warmup that is longer than the run, and a schedule that never reaches a tenth of the learning rate."""
    shares = getattr(trainer.lr_scheduler, "lr_lambdas", None)
    if not shares or is_any_rate_allowed(trainer.args):  # a schedule of another kind is not known beforehand
        return
    steps = run.statement.steps_planned
    looked_at = {*range(0, steps, max(1, steps // _LOOKED_AT)), max(0, steps - 1)}
    largest = max(share(step) for share in shares for step in looked_at)
    warmup = trainer.args.get_warmup_steps(steps)
    if largest < 1.0 / FAR or (warmup > steps and largest < 1.0):
        raise Refusal(
            "rate-never-arrives",
            f"The learning rate would never be more than {largest:.2g} of the one that is set, in a run of {steps:,} steps"
            + (f" with a warmup of {warmup:,}" if warmup > steps else "")
            + ", and ε would be spent for little. Shorten the warmup, such as to warmup_steps=0.1 (a tenth of the run), or "
            "set allow_any_learning_rate=True to try it.",
        )


def refuse_another_schedule(trainer: Any) -> None:
    """Refuse a scheduler that was set on the trainer and moves the rate of another optimizer."""
    of = getattr(trainer.lr_scheduler, "optimizer", None)
    if of is not None and of.param_groups is not trainer.optimizer.param_groups:
        raise Refusal(
            "another-schedule",
            f"trainer.lr_scheduler, a {type(trainer.lr_scheduler).__name__}, sets the learning rate of another optimizer, "
            "so that it would have no effect. Override create_scheduler.",
        )
