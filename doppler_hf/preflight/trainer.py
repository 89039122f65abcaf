"""Checks of the trainer: its arguments, its overrides, and the checkpoint or weights with which it begins."""

from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import DefaultFlowCallback, EarlyStoppingCallback, Seq2SeqTrainer, Trainer
from transformers.trainer_utils import IntervalStrategy

from doppler_hf.errors import Refusal, TypeRefusal, page
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.privacy.clipping.engine import is_in_a_run
from doppler_hf.privacy.clipping.refused_layers import refuse_compiled
from doppler_hf.run.own_code import LIBRARIES, Definition, definitions, overrides
from doppler_hf.run.weights.trained_openly import was_trained_openly
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import refuse_bases_in_front

# A method of Transformers → why an override of it has no effect, and the fix.
_NOT_CALLED: Final = {
    "_get_train_sampler": (
        " in a private run, because ε holds only for its own random batches",
        "Remove it. For imbalanced classes, return weights of the records from compute_per_sample_loss: "
        f"{page('guides/own-loss', 'imbalanced-classes')}",
    ),
    "get_optimizer_cls_and_kwargs": (
        " in a private run, whose optimizer is a DopplerOptimizer", "Remove it, and set base_optimizer",
    ),
    "create_optimizer_and_scheduler": (
        ", because Transformers calls create_optimizer and create_scheduler",
        "Remove it, set base_optimizer, and override create_scheduler",
    ),
}  # fmt: skip
# In these methods, a trainer of the user's own may generate.
_EVALUATING: Final = ("prediction_step", "evaluation_loop", "evaluate", "predict")
# Methods that `DopplerTrainer` replaces without calling the next class's method in a private run.
_REPLACED: Final = ("training_step", "get_train_dataloader", "get_batch_samples", "create_optimizer")
# The method that Transformers calls to recompute activations, and its name before 5.20; the argument has the same two names.
_CHECKPOINTING: Final = ("activation_checkpointing", "gradient_checkpointing")
# A trainer of TRL → the replacement for it.
_OF_TRL: Final = {
    "SFTTrainer": "Use DopplerSFTTrainer",
    "DPOTrainer": "Use DopplerDPOTrainer",
    "CPOTrainer": "Use DopplerDPOTrainer with loss_type=['cpo', 'sft']",
    "ORPOTrainer": "Use DopplerDPOTrainer with loss_type=['orpo', 'sft']",
    "KTOTrainer": "Its loss compares the records of a batch. Use DopplerDPOTrainer with pairs of answers",
    "RewardTrainer": "Override compute_per_sample_loss of DopplerTrainer, with rows_per_loss = 2 "
    f"({page('guides/own-loss')})",
}


def refuse_other_bases(trainer: type, *, ours: type) -> None:
    """Refuse a class that also derives from a trainer of TRL, or that has another trainer in front of ours.

    A trainer of TRL handles arguments, data and loss in its own way.
    """
    other = next((kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")), None)
    if other is not None and f"Doppler{other}" not in {kind.__name__ for kind in trainer.__mro__}:
        fix = _OF_TRL.get(other, "Use DopplerSFTTrainer or DopplerDPOTrainer")
        raise TypeRefusal(
            "trainer-of-trl",
            f"{trainer.__name__} derives from DopplerTrainer and from {other} of TRL, which do not fit together. {fix}.",
        )
    why = "the training step, batches and optimizer of {other} would be used before those that keep the run private"
    refuse_bases_in_front(trainer, ours=ours, stock=Trainer, why=why)


def refuse_changed_arguments(args: DopplerTrainingArguments) -> None:
    """Refuse arguments that were changed, after they were made, to values that they would refuse."""
    args.check()


def refuse_wrapped_model(model: Any) -> None:
    """Refuse a model inside one of torch's wrappers, before Transformers reads the columns that its forward takes."""
    if isinstance(model, nn.Module):
        refuse_compiled(model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Refusal(
            "wrapped-model",
            f"The model is wrapped in {type(model).__name__}, which splits batches. Pass model.module instead. To use "
            "several GPUs, start the script with `accelerate launch`.",
        )


def refuse_own_loss_of_batches(trainer: Any) -> None:
    """Refuse a loss of whole batches, whether it was passed to the trainer or set later."""
    if trainer.compute_loss_func is not None:
        raise Refusal(
            "loss-of-the-batch",
            "A compute_loss_func sees the whole batch, so the gradient of one record could depend on the others. Override "
            "compute_per_sample_loss instead, which returns one loss per record.",
        )


def refuse_own_optimizer(trainer: Any) -> None:
    """Refuse an optimizer or a scheduler that was passed to the trainer."""
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise Refusal(
            "another-optimizer",
            "Your own optimizer would bypass low_pass_filter and base_optimizer. Leave `optimizers` out, and set "
            f"base_optimizer. For learning rates by layer, override create_optimizer ({page('guides/own-loss')}).",
        )
    if trainer.lr_scheduler is not None:
        raise Refusal(
            "another-scheduler",
            f"The {type(trainer.lr_scheduler).__name__} in `optimizers` would have no effect, because it controls the "
            "optimizer that it was made for. Leave `optimizers` out, and override create_scheduler.",
        )


def refuse_model_in_parts(trainer: Any) -> None:
    """Refuse a model whose layers are split over processes."""
    if (processes := getattr(trainer.model, "tp_size", None) or 1) > 1:
        # Sensitivity: the norm of a process's part of a gradient is less than that of the whole.
        raise Refusal(
            "model-in-parts",
            f"The layers of the model are split over {processes} processes (tensor parallelism), so no process can compute "
            "the gradient norm of a record. Load the model without tp_plan. If it is too large for one process, set fsdp.",
        )


def refuse_methods_without_effect(trainer: Any) -> None:
    """Refuse overrides of methods that a private run does not call, in a class or set on the trainer."""
    for name, (reason, fix) in _NOT_CALLED.items():
        own = _own_definition(trainer, name)
        if own and not own.is_installed:
            raise Refusal("method-without-effect", f"{own.place} has no effect{reason}. {fix}.")
    own = _own_definition(trainer, "compute_loss")
    if own and not overrides(trainer, "compute_per_sample_loss"):
        raise Refusal(
            "method-without-effect",
            f"{own.place} has no effect in a private run, which needs one loss per record. Override "
            "compute_per_sample_loss, or if it adds a penalty on the weights, such as L2, set weight_decay. Keep "
            "compute_loss only if evaluations need it.",
        )
    for name in _REPLACED:
        own = _own_definition(trainer, name, behind_ours=True)
        if own and not own.is_installed:
            raise Refusal(
                "method-without-effect",
                f"{own.place} has no effect in a private run, because DopplerTrainer.{name} is called in its place. Remove "
                f"your method, or move it to a subclass of DopplerTrainer, where it calls super().{name}.",
            )


def refuse_checkpointing_without_method(trainer: Any) -> None:
    """Refuse gradient checkpointing of a module of the user's own that has no method to switch it on."""
    asked = [name for name in _CHECKPOINTING if getattr(trainer.args, name, None)]
    if not asked or _switch_of_checkpointing(trainer.model) is not None:
        return
    inside = [(name, _switch_of_checkpointing(each)) for name, each in trainer.model.named_modules() if name]
    inside = [(name, method) for name, method in inside if method is not None]
    mend = f" and call model.{inside[0][0]}.{inside[0][1]}() before you make the trainer" if inside else ""
    raise Refusal(
        "checkpointing-without-method",
        f"{asked[-1]}=True needs a method {asked[-1]}_enable of the model; {type(trainer.model).__name__} has none. Leave "
        f"the argument out{mend}.",
    )


def _switch_of_checkpointing(module: nn.Module) -> str | None:
    return next((f"{name}_enable" for name in _CHECKPOINTING if hasattr(module, f"{name}_enable")), None)


def refuse_generation_without_effect(trainer: Any) -> None:
    """Refuse arguments of evaluations that generate, if the trainer is none that does."""
    if isinstance(trainer, Seq2SeqTrainer) or any(overrides(trainer, name) for name in _EVALUATING):
        return
    for name in ("predict_with_generate", "generation_config"):
        if value := getattr(trainer.args, name, None):
            raise Refusal(
                "no-effect",
                f"{name}={value if value is True else '…'} has no effect, because {type(trainer).__name__} does not derive "
                "from Seq2SeqTrainer. Combine the trainers, too: "
                "class PrivateSeq2SeqTrainer(DopplerTrainer, Seq2SeqTrainer), as in "
                f"{page('guides/your-trainer', 'seq2seqtrainer')}. Or leave {name} out.",
            )


def note_methods_of_another_library(run: Any, trainer: Any) -> None:
    """Note the methods of another library's trainer in whose place a private training has its own.

    The user cannot leave them out. What they do beyond Transformers, such as a sampler that balances batches, is missing.
    """
    hidden = [_own_definition(trainer, name) for name in _NOT_CALLED]
    hidden += [_own_definition(trainer, name, behind_ours=True) for name in _REPLACED]
    if places := [each.place for each in hidden if each is not None and each.is_installed]:
        run.notes.append(
            f"these methods are not called, because DopplerTrainer makes the batches and the optimizer: {', '.join(places)}"
        )


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
                "private run trains the model alone. Make the layer a part of the model (such as model.scale); after the "
                "model was called, the loss may call it.",
            )


def _own_definition(trainer: Any, name: str, *, behind_ours: bool = False) -> Definition | None:
    """Return the user's first definition of a method, or the first one that a class of ours hides."""
    is_behind = not behind_ours
    for each in definitions(trainer, name):
        if is_behind and each.is_user_code:
            return each
        is_behind |= isinstance(each.owner, type) and each.owner.__module__.startswith(f"{LIBRARIES[0]}.")
    return None


def refuse_attributes_without_effect(trainer: Any) -> None:
    """Refuse attributes, set on the trainer after it was made, that have no effect or that would couple records."""
    if trainer.optimizer_cls_and_kwargs is not None:
        raise Refusal(
            "attribute-without-effect",
            "trainer.optimizer_cls_and_kwargs has no effect in a private run, whose optimizer is a DopplerOptimizer. "
            "Set it to None, and set base_optimizer.",
        )
    if trainer.label_smoother is not None:
        raise Refusal(
            "attribute-without-effect",
            "trainer.label_smoother has no effect in a private run: it takes a mean over the tokens of the whole batch. Set "
            "it to None, or override compute_per_sample_loss.",
        )
    if getattr(trainer, "neftune_noise_alpha", None) is not None:
        raise Refusal(
            "attribute-without-effect",
            "trainer.neftune_noise_alpha cannot be used with differential privacy: it adds a hook on the embeddings of the "
            "whole batch. Set it to None.",
        )


def refuse_missing_callbacks(trainer: Any) -> None:
    """Refuse a list of callbacks without the one that logs, evaluates, saves and stops as the arguments say."""
    if not any(isinstance(each, DefaultFlowCallback) for each in trainer.callback_handler.callbacks):
        raise Refusal(
            "callbacks-removed",
            "The trainer has no DefaultFlowCallback, so it would not log, evaluate, save or stop when the arguments say so. "
            "Some code has removed it or replaced trainer.callback_handler.callbacks. Put it back with "
            "trainer.add_callback(transformers.trainer_callback.DefaultFlowCallback), and use trainer.remove_callback to "
            "remove single callbacks.",
        )


def refuse_early_stopping_without_evaluations(trainer: Any) -> None:
    """Refuse Transformers' early stopping where nothing is evaluated or compared, which it would assert later."""
    args = trainer.args
    is_used = any(isinstance(each, EarlyStoppingCallback) for each in trainer.callback_handler.callbacks)
    if is_used and (args.eval_strategy == IntervalStrategy.NO or args.metric_for_best_model is None):
        raise Refusal(
            "early-stopping-alone",
            "EarlyStoppingCallback compares evaluations by a metric; got "
            f"eval_strategy={str(IntervalStrategy(args.eval_strategy).value)!r} and "
            f"metric_for_best_model={args.metric_for_best_model!r}. Set eval_strategy='steps' and "
            "metric_for_best_model='loss', or leave the callback out.",
        )


def refuse_a_model_in_a_run(trainer: Any) -> None:
    """Refuse a model that a private run is training at this moment, as in a callback of that run."""
    # Privacy: the ledger of that run would count its own steps alone.
    if is_in_a_run(trainer.model):
        raise Refusal(
            "model-in-a-run",
            "The model is being trained by a private run, whose ε would not cover another training of it. Train a copy: "
            "copy.deepcopy(model).",
        )


def refuse_weights_trained_openly(trainer: Any) -> None:
    """Refuse to begin a private run with weights that were trained without privacy on its data."""
    if not trainer.args.disable_dp and was_trained_openly(trainer.model, trainer._datasets_of_records):
        raise Refusal(
            "trained-without-privacy",
            "The weights of the model were trained without privacy (disable_dp=True) on rows of the same train_dataset, so "
            "the ε of a private run that begins with them would be untrue. Load or create a fresh model before the private "
            "run. If train_dataset holds no private data, save this model, and train what from_pretrained loads.",
        )


def refuse_another_privacy(trainer: Any, *, checkpoint: str | None) -> None:
    """Refuse to train with privacy if the trainer or checkpoint was made without it, and the other way round."""
    args, was_disabled = trainer.args, trainer._was_disabled
    if args.disable_dp != was_disabled:
        raise Refusal(
            "disable-dp-changed",
            f"disable_dp was changed from {was_disabled} to {args.disable_dp} after the trainer was made. Make a new "
            "trainer.",
        )
    if checkpoint is not None and args.disable_dp == (Path(checkpoint) / LEDGER_NAME).exists():
        if args.disable_dp:
            raise Refusal(
                "private-checkpoint",
                f"The checkpoint {checkpoint} is from a private run (it has a privacy ledger), so it cannot be resumed with "
                "disable_dp=True. Leave disable_dp out, or load the weights with from_pretrained.",
            )
        raise Refusal(
            "checkpoint-without-ledger",
            f"There is no {LEDGER_NAME} in {checkpoint}, so the ε that it has spent is unknown: the checkpoint is not from "
            "a private run, or has lost the file. Put the ledger back, train from the start, or set disable_dp=True.",
        )
