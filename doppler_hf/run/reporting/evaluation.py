"""Evaluation with the user's own loss, and with a majority-class (or mean-label) baseline."""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput

from doppler_hf.errors import Refusal
from doppler_hf.privacy.batching.collators import tried
from doppler_hf.privacy.batching.micro_batches import fetch_one
from doppler_hf.privacy.batching.shared_rows import training_rows_in
from doppler_hf.privacy.losses import as_losses, without_adapters
from doppler_hf.privacy.token_losses import IGNORED_LABEL
from doppler_hf.run.own_code import overrides
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes.sharding import ShardedTrainer
from doppler_hf.run.reporting.metrics_per_user import left_out_in_words, mean_per_user, users_of
from doppler_hf.run.reporting.published_results import (
    MAJORITY,
    MEAN_LABEL,
    MOST_FREQUENT_PREDICTED,
    MOST_FREQUENT_RIGHT,
)
from doppler_hf.run.reporting.summary import print_if_not_learnt

# Two losses of the same rows, in evaluation mode, that differ by less are the same.
_SAME: Final = 1e-3


class EvaluatingTrainer(ShardedTrainer):
    """`Trainer` that evaluates with the per-sample losses."""

    # What `DopplerTrainer` has.
    _run: PrivateRun | None
    rows_per_loss: int
    compute_per_sample_loss: Callable[..., Any]
    evaluations_of_training_data: list[dict[str, float]]
    # What the checks before the first step set: the data sets at which `preflight.data` has looked, the names of the
    # evaluation sets for which it (or TRL's trainer, in `trl_checks`) has warned of training rows, and the user's metrics
    # where `preflight.rehearsal` has others called in their place.
    sets_looked_at: tuple[Any, Any] | None = None
    sets_with_training_rows: frozenset[str] = frozenset()
    metrics_of_rows: Callable[[Any], dict[str, Any]] | None = None
    # Transformers' own.
    model_accepts_loss_kwargs: bool
    label_names: list[str]
    can_return_loss: bool
    # Of this class alone.
    _is_division_known = False
    _users: np.ndarray | None = None  # the user of each row that is evaluated, for `metrics_per_user`
    _is_left_out_said = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch as Transformers does, or the mean of your own `compute_per_sample_loss`.

        Evaluations call this method, and with `disable_dp` the training does, too.
        """
        if not overrides(self, "compute_per_sample_loss"):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs and not self.args.prediction_loss_only:
            return mean_and_outputs(self.compute_per_sample_loss, model, inputs)
        losses = as_losses(self.compute_per_sample_loss(model, dict(inputs)))
        # With disable_dp the weights of clipped gradients become weights of the losses.
        weights = losses.weights if model.training else None
        mean = (losses.values if weights is None else losses.values * weights).mean()
        # If a model can count the items of all micro-batches, Transformers treats its loss as a share of their mean.
        is_share = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        mean = mean / self.current_gradient_accumulation_steps if is_share else mean
        return (mean, {}) if return_outputs else mean

    def note_who_divides(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        """Find out, once in a run without privacy, whether the loss is divided by the number of items of the whole batch.

        Transformers takes a model whose forward has `**kwargs` for one that divides its loss by `num_items_in_batch`, and
        then does not divide by the number of micro-batches. Many classes, such as `BertForSequenceClassification`, do not
        divide: their gradient would be as many times too large as a batch has micro-batches. So the loss is computed with
        twice as many items, too, and if it stays the same, Transformers is told that the model takes no such argument.
        """
        is_whole = self.current_gradient_accumulation_steps == 1 and self.args.world_size == 1
        is_settled = self.compute_loss_func is not None or getattr(self, "loss_is_scaled_for_ga", None) is not None
        if self._is_division_known or is_whole or is_settled:
            return
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return
        # TRL's own method keeps figures of each call.
        is_of_trl = any(kind.__module__.startswith("trl.") for kind in type(self).__mro__)
        compute = functools.partial(EvaluatingTrainer.compute_loss, self) if is_of_trl else self.compute_loss
        inputs = self._prepare_inputs(inputs)
        was_training = model.training
        model.eval()  # without dropout two losses of the same rows are equal
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                both = torch.stack(
                    [
                        compute(model, dict(inputs), num_items_in_batch=num_items_in_batch * factor).mean().double()
                        for factor in (1, 2)
                    ]
                )
        finally:
            model.train(was_training)
        # All processes decide alike. A loss of 0 or NaN, where no label counts in a micro-batch, says nothing.
        found = [pair for pair in self.accelerator.gather(both[None]).tolist() if all(map(math.isfinite, pair)) and pair[0]]
        self._is_division_known = bool(found)
        if found and all(math.isclose(once, twice, rel_tol=_SAME) for once, twice in found):
            self.model_accepts_loss_kwargs = False
            if self.is_world_process_zero():
                print(
                    f"Without privacy: Trainer does not divide the loss of {type(without_adapters(model)).__name__} by "
                    f"gradient_accumulation_steps={self.current_gradient_accumulation_steps} (a known error of "
                    "Transformers). DopplerTrainer divides it, so loss and gradient are smaller here than with Trainer."
                )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch as Transformers does, and with a loss of your own also if the batch has no labels.

        Transformers computes no loss for a batch without labels. But if the training batches have none either, your loss
        does without them, as one that compares two answers does.

        The loss of a batch is the mean over its own rows or tokens. Transformers counts those of the batches of all
        processes, and multiplies the loss by the number of processes, also for the many models that do not divide by
        that count: their `eval_loss` would be as many times too large. For models such as GPT-2 it counts the first token
        of each row, which nothing predicts.
        """
        accepts, self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs, False
        try:
            if self._has_loss_without_labels(inputs):
                return self._predict_without_labels(model, inputs, prediction_loss_only, ignore_keys)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self.model_accepts_loss_kwargs = accepts

    def _predict_without_labels(
        self, model: nn.Module, inputs: dict[str, Any], *others: Any
    ) -> tuple[Tensor | None, Any, Any]:
        names, can_return_loss = self.label_names, self.can_return_loss
        # Transformers then computes a loss; TRL's trainers set both in the same way.
        self.label_names, self.can_return_loss = [], True
        try:
            loss, logits, labels = super().prediction_step(model, inputs, *others)
        finally:
            self.label_names, self.can_return_loss = names, can_return_loss
        # Each record has one entry, since Transformers and accelerate count and cut what is predicted by records.
        records = find_batch_size(inputs)
        logits = pytree.tree_map_only(
            Tensor, functools.partial(_by_record, records=records, rows=self.rows_per_loss), logits
        )
        return loss, logits, labels if names == [] else None

    def _has_loss_without_labels(self, inputs: dict[str, Any]) -> bool:
        names = self.label_names
        if not overrides(self, "compute_per_sample_loss") or not isinstance(inputs, Mapping):
            return False
        if not names:
            return not self.can_return_loss
        missing = {name for name in names if inputs.get(name) is None}
        return bool(missing) and not missing.issubset(self._names_in_training_batches)

    @functools.cached_property
    def _names_in_training_batches(self) -> frozenset[str]:
        """Return the names of what the collator makes of a training row; all label names if it cannot be called here."""
        try:
            collate = self._get_collator_with_removed_columns(self.data_collator, description="evaluation")
            row = fetch_one(self.train_dataset, 0)
            if isinstance(row, dict):
                row = {name: value for name, value in row.items() if name != self.args.privacy_unit_column}
            batch = tried(collate, [row])
            return frozenset(name for name, value in batch.items() if value is not None)
        except Exception:
            return frozenset(self.label_names)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate and predict as Transformers does, and add the baselines of the majority class or the mean label."""
        if self._sharding.is_asked_for:  # before the first run the model is whole, and not on the device
            self._prepare_model()
        run = self._run
        # After a run Transformers may convert the model's weights, and the ledger covers them all the same.
        converts = self.args.bf16_full_eval or self.args.fp16_full_eval
        is_covered = converts and run is not None and not run.is_running and run.covers_weights_of(self.model)
        output = super().evaluation_loop(  # Transformers calls it in the same way.
            dataloader,
            description=description,
            prediction_loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        if run is not None and is_covered:
            run.leave(self.model, speaks=True, writes=self.args.process_index == 0)
        if not self.args.disable_dp:
            is_own_loss = overrides(self, "compute_per_sample_loss")
            add_baselines(output, prefix=metric_key_prefix, is_own_loss=is_own_loss, label_names=self.label_names or ())
        users, compute = self._users, self.metrics_of_rows or self.compute_metrics
        if users is not None and compute is not None and output.predictions is not None and output.num_samples == len(users):
            found = mean_per_user(compute, output, users=users, prefix=metric_key_prefix)
            output.metrics.update(found)
            words = left_out_in_words(found, prefix=metric_key_prefix, users=users)
            if words and not self._is_left_out_said and self.is_world_process_zero():
                print(words)
                self._is_left_out_said = True
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Transformers does. After a private run, print once if the model has learnt little."""
        evaluated = args[0] if args else kwargs.get("eval_dataset")
        if self.args.metrics_per_user:
            chosen = self.eval_dataset if evaluated is None else evaluated
            self._note_users(self.eval_dataset[chosen] if isinstance(chosen, str) else chosen)
        logged = len(self.state.log_history)
        metrics = super().evaluate(*args, **kwargs)
        # Of several sets, Transformers calls this method for each. And a `log` of the user's own may keep nothing.
        if evaluated is not None and not isinstance(evaluated, dict) and training_rows_in(self.train_dataset, evaluated):
            # Privacy: what is published leaves these out.
            self.evaluations_of_training_data += self.state.log_history[logged:]
        run = self._run
        has_ended = run is not None and run.ledger is not None and not run.is_running
        if run is not None and has_ended and not run.is_little_said and self.is_world_process_zero():
            run.is_little_said = print_if_not_learnt(metrics)
        return metrics

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as Transformers does; metrics per user are of the users of `test_dataset`."""
        try:
            self._note_users(test_dataset, name="test_dataset")
        except Refusal as error:  # such as users who are unknown; predictions need none
            self._users = None
            if self.is_world_process_zero():
                print(f"The predictions have no metrics per user: {error}")
        return super().predict(test_dataset, *args, **kwargs)

    def _note_users(self, dataset: Any, *, name: str = "eval_dataset") -> None:
        column = self.args.privacy_unit_column if self.args.metrics_per_user else None
        self._users = None if isinstance(dataset, dict) or column is None else users_of(dataset, column=column, name=name)


def _by_record(values: Tensor, *, records: int | None, rows: int) -> Tensor:
    """Return predictions of several rows for each record, shape (records · rows, …), as (records, rows, …)."""
    is_by_row = rows > 1 and records is not None and values.ndim and len(values) == records * rows
    return values.unflatten(0, (records, rows)) if is_by_row else values


def add_baselines(output: EvalLoopOutput, *, prefix: str, is_own_loss: bool, label_names: Sequence[str] = ()) -> None:
    """Add to an evaluation (in place) what one answer for all rows reaches: the most frequent label or labels, or the mean.

    Metrics of several labels a row, and of answers in a text, have many names. There it adds how many rows get the model's
    most frequent answer, and how many have the most frequent right answer. Of several labels, only the one called `labels`
    is looked at.
    """
    labels = output.label_ids
    if isinstance(labels, tuple) and "labels" in label_names and len(labels) == len(label_names):
        labels = labels[label_names.index("labels")]
    if isinstance(labels, tuple) and len(labels) == 2 and all(_is_column(each) for each in labels):
        ends = [each.reshape(-1) for each in labels]
        spans = output.predictions if isinstance(output.predictions, tuple) else ()
        logits = [each for each in spans[:2] if isinstance(each, np.ndarray) and each.ndim == 2]
        if len(logits) == 2 and {*map(len, (*logits, *ends))} == {len(ends[0])}:
            _add_shares(output, np.stack([each.argmax(axis=1) for each in logits], axis=1), np.stack(ends, axis=1), prefix)
        return
    if not isinstance(labels, np.ndarray) or not labels.size:
        return
    if f"{prefix}_accuracy" in output.metrics and labels.dtype.kind in "iu":
        _, counts = np.unique(labels[labels != IGNORED_LABEL], return_counts=True)  # labels may be of tokens, too
        output.metrics[f"{prefix}_{MAJORITY}"] = float(counts.max(initial=0) / max(1, counts.sum()))
    # One-dimensional labels are of a regression; with several classes each label is a row. The variance is the loss of the
    # mean label for squared errors alone: which answer is best for a loss of the user's own, and what it costs, is unknown.
    if labels.dtype.kind == "f" and labels.ndim == 1 and not is_own_loss:
        output.metrics[f"{prefix}_{MEAN_LABEL}"] = float(labels.astype(np.float64).var())
    if labels.dtype.kind == "f" and labels.ndim == 2 and labels.shape[1] > 1 and np.isin(labels, (0.0, 1.0)).all():
        found = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        if isinstance(found, np.ndarray) and found.shape == labels.shape:
            # A probability above one half; preprocess_logits_for_metrics may have made probabilities of the logits.
            are_probabilities = found.size and found.min() >= 0.0 and found.max() <= 1.0
            _add_shares(output, found > (0.5 if are_probabilities else 0.0), labels, prefix)


def _is_column(labels: Any) -> bool:
    return isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.size == len(labels) > 0


def _add_shares(output: EvalLoopOutput, predicted: np.ndarray, right: np.ndarray, prefix: str) -> None:
    """Add the share of rows with the most frequent answer: of the model's answers, and of the right ones.

    An answer is a set of labels, a row of (rows, labels), or the first and the last token of a span, a row of (rows, 2).
    """
    for name, answers in ((MOST_FREQUENT_PREDICTED, predicted), (MOST_FREQUENT_RIGHT, right)):
        _, counts = np.unique(answers, axis=0, return_counts=True)
        output.metrics[f"{prefix}_{name}"] = float(counts.max() / len(answers))


def mean_and_outputs(
    losses_of: Callable[[nn.Module, dict[str, Any]], Float[Tensor, " batch"]], model: nn.Module, inputs: dict[str, Any]
) -> tuple[Float[Tensor, ""], Any]:
    """Return the mean loss of an evaluated batch, and the model's outputs in the form that Transformers expects."""
    found: list[Any] = []
    with model.register_forward_hook(lambda module, args, outputs: found.append(outputs)):
        mean = as_losses(losses_of(model, dict(inputs))).values.mean()
    outputs = found[0] if len(found) == 1 else ()
    if len(found) != 1:
        warnings.warn(
            f"Evaluations have no predictions, because compute_per_sample_loss calls the model {len(found)} times per "
            "batch. Call model(...) once, or override prediction_step to get metrics.",
            stacklevel=2,
        )
    if isinstance(outputs, dict):
        return mean, outputs
    return mean, (mean, *(outputs if isinstance(outputs, tuple) else (outputs,)))
