"""Checks of the trainer: what it is made of, its own overrides, and the checkpoint that it resumes."""

from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import Trainer

from doppler_hf.errors import Refusal, TypeRefusal
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.run.own_code import overrides
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import refuse_privacy_without_dp, refuse_what_breaks_privacy

# A method of Transformers → when an override of it has no effect, and the fix.
_NOT_CALLED: Final = {
    "_get_train_sampler": (" on a private training, whose ε needs its own random batches", "Leave it out"),
    "get_optimizer_cls_and_kwargs": (
        " on a private training, whose optimizer is a DopplerOptimizer", "Leave it out, and set base_optimizer",
    ),
    "create_optimizer_and_scheduler": (
        ": Transformers calls create_optimizer and create_scheduler",
        "Leave it out, set base_optimizer, and override create_scheduler",
    ),
}  # fmt: skip
# TRL's trainer → what to take in its place.
_OF_TRL: Final = {
    "SFTTrainer": "Use DopplerSFTTrainer",
    "DPOTrainer": "Use DopplerDPOTrainer",
    "CPOTrainer": "Use DopplerDPOTrainer with loss_type=['cpo', 'sft']",
    "ORPOTrainer": "Use DopplerDPOTrainer with loss_type=['orpo', 'sft']",
    "KTOTrainer": "Its loss compares the examples of a batch. Use DopplerDPOTrainer, with pairs of answers",
    "RewardTrainer": "Override compute_per_sample_loss of DopplerTrainer, with rows_per_loss = 2 (docs/guides/own-loss.md)",
}


def refuse_other_bases(trainer: type) -> None:
    """Refuse a class that is one of TRL's trainers too, which make their own of the arguments, the data and the loss."""
    other = next((kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")), None)
    if other is not None and f"Doppler{other}" not in {kind.__name__ for kind in trainer.__mro__}:
        fix = _OF_TRL.get(other, "Use DopplerSFTTrainer or DopplerDPOTrainer")
        raise TypeRefusal("trainer-of-trl", f"{trainer.__name__} must not derive from TRL's {other} too, got both. {fix}.")


def refuse_changed_arguments(args: DopplerTrainingArguments) -> None:
    """Refuse arguments that have changed since they were made, to what they refuse then."""
    if args.disable_dp:  # maybe since they were made, with other defaults
        refuse_privacy_without_dp(args, base=DopplerTrainingArguments)
    else:
        refuse_what_breaks_privacy(args)


def refuse_wrapped_model(model: Any) -> None:
    """Refuse a model in a wrapper of torch's."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Refusal(
            "wrapped-model",
            f"model must have no wrapper, got {type(model).__name__}, which splits batches. Pass model.module. For several "
            "GPUs start the script with `accelerate launch`.",
        )


def refuse_own_optimizer(trainer: Any) -> None:
    """Refuse an optimizer, a scheduler or a loss of batches that the trainer was given."""
    if trainer.compute_loss_func is not None:
        raise Refusal(
            "loss-of-the-batch",
            "A compute_loss_func sees the whole batch, so an example's gradient could depend on the others. Override "
            "compute_per_sample_loss, which returns one loss per example.",
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise Refusal(
            "another-optimizer",
            "An optimizer of your own would bypass low_pass_filter and base_optimizer. Leave `optimizers` out, and set "
            "base_optimizer. For learning rates by layer override create_optimizer (docs/guides/own-loss.md).",
        )
    if trainer.lr_scheduler is not None:
        raise Refusal(
            "another-scheduler",
            f"The scheduler in `optimizers` must be None, got {type(trainer.lr_scheduler).__name__}: it sets the learning "
            "rate of the optimizer that it was made for. Override create_scheduler.",
        )


def refuse_model_in_parts(trainer: Any) -> None:
    """Refuse a model of which each process has a part of each layer."""
    if (processes := getattr(trainer.model, "tp_size", None) or 1) > 1:
        # Sensitivity: the norm of a process's part of a gradient is less than that of the whole.
        raise Refusal(
            "model-in-parts",
            f"The model must be whole on each process, got one in parts on {processes} (tensor parallelism). Load it "
            "without tp_plan, and set fsdp if it is too large for one process.",
        )


def refuse_methods_without_effect(trainer: Any) -> None:
    """Refuse overrides of methods that a private training does not call."""
    own = type(trainer)
    for name, (reason, fix) in _NOT_CALLED.items():
        if getattr(own, name) is not getattr(Trainer, name):
            raise Refusal("method-without-effect", f"{own.__name__}.{name} has no effect{reason}. {fix}.")
    if overrides(own, "compute_loss") and not overrides(own, "compute_per_sample_loss"):
        raise Refusal(
            "method-without-effect",
            f"{own.__name__}.compute_loss has no effect on a private training, which needs one loss per example. "
            "Override compute_per_sample_loss. Keep compute_loss only for evaluations.",
        )


def refuse_another_privacy(trainer: Any, *, checkpoint: str | None) -> None:
    """Refuse to train with privacy if the trainer or checkpoint was made without it, or the other way round."""
    args, was_disabled = trainer.args, trainer._was_disabled
    if args.disable_dp != was_disabled:
        raise Refusal(
            "disable-dp-changed",
            f"disable_dp must stay {was_disabled} in the life of a trainer, got {args.disable_dp}. Make a new trainer.",
        )
    if checkpoint is not None and args.disable_dp == (Path(checkpoint) / LEDGER_NAME).exists():
        if args.disable_dp:
            raise Refusal(
                "private-checkpoint",
                f"disable_dp must be False to resume from {checkpoint}, which holds a privacy ledger, got True. Leave it "
                "out, or load the weights with from_pretrained.",
            )
        raise Refusal(
            "checkpoint-without-ledger",
            f"There is no {LEDGER_NAME} in {checkpoint}, which was saved without privacy or has lost it. Train from the "
            "start, put the ledger back, or set disable_dp=True.",
        )
