"""Checks of the loop: its optimizer and its learning rate."""

from typing import Any

from doppler_hf.errors import Refusal
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.run.learning_rate import told_of_another_rate
from doppler_hf.run.optimizer import first_learning_rate
from doppler_hf.run.private_run import PrivateRun


def refuse_another_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that the user's `create_optimizer` made instead of the arguments' one."""
    if not isinstance(optimizer, DopplerOptimizer):
        raise Refusal(
            "another-optimizer",
            f"create_optimizer must make a DopplerOptimizer in a private run, got {type(optimizer).__name__}. Change the "
            "groups of super().create_optimizer() (docs/guides/own-loss.md).",
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
