"""Checks of the trainer: what it is made of, its own overrides, and the checkpoint that it resumes."""

from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import DefaultFlowCallback

from doppler_hf.errors import Refusal, TypeRefusal, page
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.run.own_code import LIBRARIES, Definition, definitions, overrides
from doppler_hf.training_args import DopplerTrainingArguments

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
# Methods that `DopplerTrainer` replaces: a private training calls no other one behind it.
_REPLACED: Final = ("training_step", "get_train_dataloader", "get_batch_samples", "create_optimizer")
# TRL's trainer → what to take in its place.
_OF_TRL: Final = {
    "SFTTrainer": "Use DopplerSFTTrainer",
    "DPOTrainer": "Use DopplerDPOTrainer",
    "CPOTrainer": "Use DopplerDPOTrainer with loss_type=['cpo', 'sft']",
    "ORPOTrainer": "Use DopplerDPOTrainer with loss_type=['orpo', 'sft']",
    "KTOTrainer": "Its loss compares the examples of a batch. Use DopplerDPOTrainer, with pairs of answers",
    "RewardTrainer": "Override compute_per_sample_loss of DopplerTrainer, with rows_per_loss = 2 "
    f"({page('guides/own-loss')})",
}


def refuse_other_bases(trainer: type) -> None:
    """Refuse a class that is one of TRL's trainers too, which make their own of the arguments, the data and the loss."""
    other = next((kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")), None)
    if other is not None and f"Doppler{other}" not in {kind.__name__ for kind in trainer.__mro__}:
        fix = _OF_TRL.get(other, "Use DopplerSFTTrainer or DopplerDPOTrainer")
        raise TypeRefusal("trainer-of-trl", f"{trainer.__name__} must not derive from TRL's {other} too, got both. {fix}.")


def refuse_changed_arguments(args: DopplerTrainingArguments) -> None:
    """Refuse arguments that have changed since they were made, to what they refuse then."""
    args.check()


def refuse_wrapped_model(model: Any) -> None:
    """Refuse a model in a wrapper of torch's."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Refusal(
            "wrapped-model",
            f"model must have no wrapper, got {type(model).__name__}, which splits batches. Pass model.module. For several "
            "GPUs start the script with `accelerate launch`.",
        )


def refuse_own_loss_of_batches(trainer: Any) -> None:
    """Refuse a loss of batches, which the trainer was given or got later."""
    if trainer.compute_loss_func is not None:
        raise Refusal(
            "loss-of-the-batch",
            "A compute_loss_func sees the whole batch, so an example's gradient could depend on the others. Override "
            "compute_per_sample_loss, which returns one loss per example.",
        )


def refuse_own_optimizer(trainer: Any) -> None:
    """Refuse an optimizer or a scheduler that the trainer was given."""
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise Refusal(
            "another-optimizer",
            "An optimizer of your own would bypass low_pass_filter and base_optimizer. Leave `optimizers` out, and set "
            f"base_optimizer. For learning rates by layer override create_optimizer ({page('guides/own-loss')}).",
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
    """Refuse methods that a private training does not call, of a class or set later."""
    for name, (reason, fix) in _NOT_CALLED.items():
        own = _own_definition(trainer, name)
        if own and not own.is_installed:
            raise Refusal("method-without-effect", f"{own.place} has no effect{reason}. {fix}.")
    own = _own_definition(trainer, "compute_loss")
    if own and not overrides(trainer, "compute_per_sample_loss"):
        raise Refusal(
            "method-without-effect",
            f"{own.place} has no effect on a private training, which needs one loss per example. Override "
            "compute_per_sample_loss. Keep compute_loss only for evaluations.",
        )
    for name in _REPLACED:
        own = _own_definition(trainer, name, behind_ours=True)
        if own and not own.is_installed:
            raise Refusal(
                "method-without-effect",
                f"{own.place} has no effect on a private training: DopplerTrainer has a {name} of its own, which comes "
                "first. Leave it out, or override it in a subclass of DopplerTrainer that calls "
                f"super().{name}.",
            )


def note_methods_of_another_library(run: Any, trainer: Any) -> None:
    """Note the methods of another library's trainer in whose place a private training has its own.

    The user cannot leave them out. What they do beyond Transformers, such as a sampler that balances batches, is missing.
    """
    hidden = [_own_definition(trainer, name) for name in _NOT_CALLED]
    hidden += [_own_definition(trainer, name, behind_ours=True) for name in _REPLACED]
    if places := [each.place for each in hidden if each is not None and each.is_installed]:
        run.notes.append(f"not used, since DopplerTrainer draws the batches and makes the optimizer: {', '.join(places)}")


def refuse_weights_of_a_loss(trainer: Any) -> None:
    """Refuse a loss with trained weights of its own, which another library's trainer would train beside the model."""
    given = getattr(trainer, "loss", None)
    losses = [*given.values()] if isinstance(given, dict) else [given]
    of_model = {*map(id, trainer.model.parameters())}
    for loss in losses:
        if not isinstance(loss, nn.Module):
            continue
        outside = [name for name, each in loss.named_parameters() if each.requires_grad and id(each) not in of_model]
        if outside:
            raise Refusal(
                "weights-of-the-loss",
                f"trainer.loss ({type(loss).__name__}) has weights that are not in the model: {', '.join(outside[:3])}. A "
                "private training trains the model alone. Put the layer into the model, and call it in its forward.",
            )


def _own_definition(trainer: Any, name: str, *, behind_ours: bool = False) -> Definition | None:
    """Return the first definition of the user's, or the first one that a class of ours hides."""
    is_behind = not behind_ours
    for each in definitions(trainer, name):
        if is_behind and each.is_own:
            return each
        is_behind |= isinstance(each.owner, type) and each.owner.__module__.startswith(f"{LIBRARIES[0]}.")
    return None


def refuse_attributes_without_effect(trainer: Any) -> None:
    """Refuse what was set on the trainer after it was made, and would change nothing or change all examples together."""
    if trainer.optimizer_cls_and_kwargs is not None:
        raise Refusal(
            "attribute-without-effect",
            "trainer.optimizer_cls_and_kwargs has no effect on a private training, whose optimizer is a DopplerOptimizer. "
            "Set it to None, and set base_optimizer.",
        )
    if trainer.label_smoother is not None:
        raise Refusal(
            "attribute-without-effect",
            "trainer.label_smoother has no effect on a private training, and its mean is over the batch's tokens. Leave it "
            "out, or override compute_per_sample_loss.",
        )
    if getattr(trainer, "neftune_noise_alpha", None) is not None:
        raise Refusal(
            "attribute-without-effect",
            "trainer.neftune_noise_alpha cannot be used with differential privacy: it hooks the embeddings of the whole "
            "batch. Set it to None.",
        )


def refuse_missing_callbacks(trainer: Any) -> None:
    """Refuse a list of callbacks without the one that logs, evaluates, saves and stops as the arguments say."""
    if not any(isinstance(each, DefaultFlowCallback) for each in trainer.callback_handler.callbacks):
        raise Refusal(
            "callbacks-removed",
            "The trainer has no DefaultFlowCallback, which logs, evaluates, saves and stops when the arguments say so. "
            "Something has removed it or replaced trainer.callback_handler.callbacks. Put it back with "
            "trainer.add_callback(transformers.trainer_callback.DefaultFlowCallback), and take out single callbacks with "
            "trainer.remove_callback.",
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
