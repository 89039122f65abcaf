"""Compare the loss that `Trainer` would train with the loss that a private run trains and evaluates.

The rule of `privacy.losses` follows from the model's class and not from its forward. Whatever the forward adds or changes
(class weights, a penalty, labels that are not shifted) would be lost silently. The two losses are compared on a batch of
several examples, because class weights cancel out in the mean of a single example.
"""

import inspect
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.linalg import row_norms
from doppler_hf.preflight.autograd_check.without_randomness import without_dropout
from doppler_hf.privacy import losses as rules
from doppler_hf.privacy.batching.collators import tried
from doppler_hf.privacy.batching.columns import LABELS, is_stored, lengths_of
from doppler_hf.privacy.batching.micro_batches import fetch
from doppler_hf.privacy.batching.probe import SHORT, one_of_each_label
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.privacy.dense_losses import ignored_pixel
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.privacy.randomness import filled_generators
from doppler_hf.privacy.token_losses import IGNORED_LABEL
from doppler_hf.run.own_code import overrides
from doppler_hf.run.precision import rounding_of
from doppler_hf.run.private_run import PrivateRun

# Two gradients count as parallel from this cosine on, and factors count as different from this ratio on.
_ALONG: Final = 0.999
_DIFFERENT: Final = 1.05
# The seconds in which labels are looked for, and in which losses are computed; with several processes the number of rows.
_SECONDS: Final = 0.3
_ROWS_OF_PROCESSES: Final = 64


def refuse_ignored_labels(run: PrivateRun, trainer: Any) -> None:
    """Refuse labels that the rule for the model's class would all ignore."""
    if not trainer.has_own_loss:
        run.probe.refuse_ignored_labels()


def note_other_number_of_classes(run: PrivateRun, trainer: Any) -> None:
    """Note a classifier whose number of outputs is not that of the class names which the data set gives."""
    base, features = without_adapters(trainer.model), getattr(trainer.train_dataset, "features", None) or {}
    if trainer.has_own_loss or not isinstance(base, PreTrainedModel) or rules.task_of(base) is not None:
        return
    named = {name: getattr(features[name], "names", None) for name in LABELS if name in features}
    for column, names in named.items():
        number = getattr(base.config, "num_labels", None)
        if not names or number in (None, len(names)):
            continue
        so, mend = "", f"load it with num_labels={len(names)}"
        if number == 1:
            so = ", so it trains the numbers of the classes as amounts"
            mend += ", unless their order is what it should learn"
        if are_scores(names):  # `class_encode_column` has numbered them by the order of their texts
            of_name = f"lambda row: {{{column!r}: float(names[int(row[{column!r}])])}}"
            mend = (
                f"load it with num_labels={len(names)} if they are classes. If their names are scores, load it with "
                f"num_labels=1, and train on the scores: with names = train_dataset.features[{column!r}].names, take "
                f"train_dataset.cast_column({column!r}, datasets.Value('float32')).map({of_name})"
            )
        run.notes.append(
            f"the column {column!r} has {len(names):,} classes, but the model has num_labels={number:,}{so}: {mend}"
        )


def are_scores(names: Sequence[str]) -> bool:
    """Return whether the names of classes are written numbers, other than those of the classes themselves."""
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return False
    return all(map(math.isfinite, numbers)) and numbers != [*range(len(names))]


def refuse_truth_values(run: PrivateRun, trainer: Any) -> None:
    """Refuse a collator that returns classes as True and False, since torch has no cross-entropy for booleans."""
    labels = run.probe.collated(run.probe.short).get("labels")
    is_of_truth = isinstance(labels, Tensor) and labels.dtype == torch.bool
    if is_of_truth and not trainer.has_own_loss and rules.has_one_label(without_adapters(trainer.model), labels):
        raise Refusal(
            "labels-of-truth-values",
            "data_collator must return class numbers as labels; got torch.bool. Return labels.long(), or override "
            "compute_per_sample_loss.",
        )


def refuse_failing_rows(run: PrivateRun, trainer: Any) -> None:
    """Refuse a training set if the user's loss fails on some of its rows, such as on a label that the model does not have.

    Rows of every label are tried first, and then random ones, for a moment.
    """
    # The values that a model of Transformers takes with its own loss are known, and `values` looks for others.
    if not trainer.has_own_loss or not trainer.args.grad_sample_self_check:
        return
    # Other checks have computed losses without gradients. Processes that share weights must call the model equally often.
    is_alone = trainer.args.world_size == 1
    count, end = 0, time.monotonic() + 2 * _SECONDS
    with without_dropout(trainer.model), run.unwatched(), torch.no_grad(), filled_generators(0):
        # No batch has more tokens than one of the training may have.
        for rows in run.probe.in_batches(min(run.rows_of_longest, SHORT), most_seconds=_SECONDS * is_alone):
            inputs = run.probe.collated(rows)
            try:
                # A GPU reports an error when the host waits for it.
                run.losses_of(inputs).tolist()
            except (Refusal, torch.OutOfMemoryError):
                raise  # it is explained, or is no fault of the rows
            except Exception as error:
                raise rows_without_loss(error, "train_dataset") from error
            count += len(rows)
            if time.monotonic() > end if is_alone else count >= _ROWS_OF_PROCESSES:
                return


def refuse_failing_evaluation(trainer: Any, examples: Any, *, ignore_keys: list[str] | None) -> None:
    """Refuse an evaluation set if the user's loss fails on some of its rows: an evaluation would end a run with ε spent.

    Rows of every label and the longest one are tried first, and then random ones, for a moment.
    """
    # Processes that share weights must call the model equally often, and each loss is tried in the training set, too.
    is_own = overrides(trainer, "compute_per_sample_loss") and not overrides(trainer, "prediction_step")
    if not is_own or trainer.args.world_size > 1 or not has_length(examples) or len(examples) == 0:
        return
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="evaluation")
    places = np.random.default_rng(2).permutation(len(examples))
    first = one_of_each_label(examples, places, most_seconds=_SECONDS)
    lengths = lengths_of(examples) if is_stored(examples) else None
    first = np.concatenate([first, [] if lengths is None else [int(lengths.argmax())]]).astype(int)
    places = np.concatenate([first, places[~np.isin(places, first)]])
    size, end = min(SHORT, trainer.args.per_device_eval_batch_size), time.monotonic() + 2 * _SECONDS
    with modes_kept(trainer.model), filled_generators(0), warnings.catch_warnings(action="ignore"):
        trainer.model.eval()
        for start in range(0, len(places), size):
            inputs = tried(collate, fetch(examples, places[start : start + size].tolist()))
            try:
                loss, _, _ = trainer.prediction_step(trainer.model, inputs, True, ignore_keys)
                if loss is not None:
                    loss.tolist()  # A GPU reports an error when the host waits for it.
            except (Refusal, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise rows_without_loss(error, "eval_dataset") from error
            if time.monotonic() > end:
                return


def rows_without_loss(error: Exception, name: str) -> Refusal:
    """Return the refusal of a data set on some of whose rows the user's loss fails."""
    # The refusal leaves out the error's words, which may hold a label or another part of a row.
    return Refusal(
        "rows-without-loss",
        f"compute_per_sample_loss fails with a {type(error).__name__} on some rows of {name}, so the run would end when it "
        "comes to them. Look for labels that are not below the number of outputs of the model, ids that are not below the "
        "size of an embedding, and inputs of another shape. Change or remove these rows, or make the model larger.",
    )


def refuse_another_loss(run: PrivateRun, trainer: Any) -> None:
    """Refuse a model whose own loss, which `Trainer` would train, is not the mean of the per-sample losses trained here."""
    if trainer.has_own_loss:
        return
    with without_dropout(trainer.model), run.unwatched():
        inputs = trainer._prepare_inputs(run.probe.collated(run.probe.short[:2]))
        with trainer.compute_loss_context_manager():
            base = without_adapters(trainer.model)
            tolerance = rounding_of(trainer.model, trainer.accelerator.mixed_precision) / 10
            compare_losses(trainer.model, inputs, base_model=base, tolerance=tolerance)


def note_factors_without_effect(run: PrivateRun, trainer: Any) -> None:
    """Note a user's loss that is the built-in loss times a factor per example, since automatic clipping cancels factors."""
    model, base = trainer.model, without_adapters(trainer.model)
    args = trainer.args
    if args.clipping != "automatic" or not args.grad_sample_self_check:
        return
    if not overrides(trainer, "compute_per_sample_loss"):
        return
    inputs = run.probe.collated(run.probe.short)
    if not isinstance(inputs.get("labels"), Tensor):
        return
    # The outputs of a module of the user's own are taken for logits of classes if its labels look like classes.
    is_own = not isinstance(base, PreTrainedModel)
    is_class = inputs["labels"].ndim == 1 and not inputs["labels"].is_floating_point()
    has_one_label = is_class if is_own else rules.has_one_label(base, inputs["labels"])
    found: list[Any] = []
    with without_dropout(model), run.unwatched():
        with model.register_forward_hook(lambda _module, _args, outputs: found.append(outputs)):
            losses, _, weights = trainer._losses(dict(inputs))
        logits, is_named = _logits_in(found[0]) if len(found) == 1 else (None, False)
        labels = trainer._prepare_inputs(inputs)["labels"]
        # The one number that a module of the user's own returns for each row may be a loss itself, if it has no name.
        if weights is None and is_named and isinstance(logits, Tensor) and logits.requires_grad and logits[0].numel() == 1:
            _note_one_output(run, losses, logits, labels)
            return
        if weights is not None or not has_one_label:
            return
        if not isinstance(logits, Tensor) or not logits.requires_grad or logits.ndim != 2:
            return
        if len(logits) != len(labels) or int(labels.max()) >= logits.shape[1]:
            return
        (own,) = torch.autograd.grad(losses.sum(), logits, allow_unused=True)
    if own is None:
        return
    own = own.float()
    of_class = logits.detach().float().softmax(dim=1) - nn.functional.one_hot(labels.long().clamp(min=0), logits.shape[1])
    sizes = row_norms(own), row_norms(of_class)
    is_told = (sizes[0] > 0) & (sizes[1] > 0) & (labels >= 0)
    factors = (sizes[0] / sizes[1])[is_told]
    along = ((own * of_class).sum(dim=1) / (sizes[0] * sizes[1]))[is_told]
    if not len(factors) or bool((along < _ALONG).any()) or float(factors.max()) < _DIFFERENT * float(factors.min()):
        return
    run.notes.append(
        "compute_per_sample_loss returns a cross-entropy times a factor per record (class weights, focal loss). "
        "With clipping='automatic' these factors have no effect on how much a record counts, because every gradient is "
        "scaled to the same length. "
        "Return (losses, weights) with weights from 0 to 1, which are applied after clipping"
    )


def _logits_in(outputs: Any) -> tuple[Any, bool]:
    """Return what a model's outputs call logits, the first of several, or the only one, and whether they call it so."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits"), "logits" in outputs
    first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    return getattr(outputs, "logits", first), hasattr(outputs, "logits")


def _note_one_output(run: PrivateRun, losses: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Note a user's loss of a model with one output that has factors, such as class weights or a focal loss."""
    (own,) = torch.autograd.grad(losses.sum(), logits, allow_unused=True)
    if own is None:
        return
    own, values, targets = own.flatten().float(), logits.detach().flatten().float(), labels.flatten().float()
    if len(own) != len(targets):
        return
    for plain in (values.sigmoid() - targets, values - targets, (values - targets).sign()):
        factors = own / plain
        factors = factors[factors.isfinite()]
        if len(factors) and float(factors.abs().max()) < _DIFFERENT * float(factors.abs().min()):
            return
    if _follows_from_error(own, values - targets) and not bool(((targets == 0) | (targets == 1)).all()):
        return
    run.notes.append(
        "the model has one output, so with clipping='automatic' the gradient of each record has the same length, whatever "
        "factors (class weights, focal loss) compute_per_sample_loss contains. Return (losses, weights) with weights from 0 "
        "to 1, which are applied after clipping"
    )


def _follows_from_error(gradients: Tensor, errors: Tensor) -> bool:
    """Return whether gradients point to the targets and grow with the error, as those of Huber's loss; (rows,) each.

    Such a loss has no factors that belong to single records.
    """
    if bool((gradients * errors < 0).any()):
        return False
    sizes = gradients.abs()[errors.abs().argsort()]
    return bool((sizes[1:] * _DIFFERENT >= sizes[:-1]).all())


def compare_losses(model: nn.Module, inputs: dict[str, Any], *, base_model: PreTrainedModel, tolerance: float) -> None:
    """Refuse a model whose own loss on a batch is not the mean of its per-sample losses, up to a relative tolerance."""
    accepted = inspect.signature(base_model.forward).parameters
    name = type(base_model).__name__ + ("" if model is base_model else " with its adapters")
    if {"labels", *rules.ANSWER}.isdisjoint(accepted) and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()
    ):
        return
    if rules.ANSWER[0] in inputs:
        inputs = without_padding(inputs)
    with torch.no_grad(), filled_generators(0):
        losses = rules.per_sample_losses(model, dict(inputs), base_model=base_model)
    try:
        with torch.no_grad(), filled_generators(0), rules.outputs_by_name(base_model):  # the same dropout
            outputs = model(**inputs)
    except (RuntimeError, ValueError, IndexError, TypeError, NameError) as error:
        if "device" in str(error):  # torch's own message names a tensor on another device better
            raise
        raise Refusal(
            "forward-without-labels",
            # The message leaves out the error's words, which may hold the sizes of examples: messages end up in logs.
            f"{name}.forward failed with a {type(error).__name__} when it was called with `labels`, as Transformers calls "
            "it. Override compute_per_sample_loss: call the model without labels there, and compute one loss per record.",
        ) from error
    own = rules.named_outputs(outputs, has_loss=True).get("loss")
    if not isinstance(own, Tensor) or own.ndim > 0 or not own.isfinite():
        return
    task = rules.task_of(base_model)
    # The first token is not a target of a causal model, except after a prompt.
    first = int(task == "causal_lm" and not rules.places_of_prompt(model))
    has_tokens = task is not None and task not in rules.WITHOUT_TOKENS
    labelled = (inputs["labels"] != IGNORED_LABEL)[:, first:].sum(dim=1) if has_tokens else None
    if task == "semantic_segmentation":
        labelled = (inputs["labels"] != ignored_pixel(base_model)).flatten(1).sum(dim=1)
    if task == "masked_image" and rules.MASK in inputs:
        labelled = inputs[rules.MASK].flatten(1).sum(dim=1)
    if task == "ctc" and base_model.config.ctc_loss_reduction == "sum":
        own = own / len(losses)
    labels = inputs.get("labels")
    if labelled is None and isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point():
        labelled = labels != IGNORED_LABEL  # Transformers' mean leaves out rows without a class
    weights = [torch.ones_like(losses), *([] if labelled is None else [labelled.to(losses)])]
    if not any(torch.allclose(own.to(losses), (losses @ weight) / weight.sum(), rtol=tolerance) for weight in weights):
        raise Refusal(
            "another-loss",
            f"{name}.forward computes a different loss than the built-in per-sample loss for this model class, which a "
            "private run would train. Override compute_per_sample_loss to return the forward's loss for each row. If the "
            "forward adds a penalty on the weights, such as L2, remove the penalty and set weight_decay. If an autocast of "
            "your own rounds the forward, remove it and set bf16=True.",
        )


def without_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a micro-batch of question answering whose padding counts as text, with every answer in the text.

    The rule leaves out positions outside of the text, and Transformers counts padding as text, so they agree only here.
    """
    if "attention_mask" not in inputs:
        return inputs
    mask = inputs["attention_mask"]
    positions = {name: inputs[name] % mask.shape[-1] for name in rules.ANSWER if name in inputs}
    # A mask of pairs of numbers is added to scores.
    is_added = mask.ndim > 2 and mask.is_floating_point()
    return inputs | positions | {"attention_mask": torch.zeros_like(mask) if is_added else torch.ones_like(mask)}
