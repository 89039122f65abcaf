"""A rehearsal before any ε is spent: an evaluation of a few rows, metrics on all labels, and a checkpoint without weights.

Transformers evaluates and saves for the first time after an epoch. A failure then would end the run after ε was spent.
"""

import contextlib
import copy
import functools
import json
import math
import multiprocessing
import pickle
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import numpy as np
import torch
from accelerate.data_loader import DataLoaderStateMixin
from torch.utils.data import IterableDataset, Subset
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, ExportableState, TrainerState
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.preflight.loss import refuse_failing_evaluation
from doppler_hf.preflight.metrics import Watched, metrics_on_all_labels
from doppler_hf.preflight.values import MOST_SECONDS_OF_COLLATING, refuse_out_of_range, refuse_uncollated
from doppler_hf.privacy.batching.collators import tried
from doppler_hf.privacy.batching.columns import LABELS
from doppler_hf.privacy.batching.micro_batches import fetch_one
from doppler_hf.privacy.batching.shared_rows import evaluation_sets
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.privacy.randomness import filled_generators
from doppler_hf.run.own_code import definitions, overrides
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes.processes import on_process_0

# The number of rows of each evaluation set, and the number for a second try if `compute_metrics` fails on two rows.
_ROWS, _ROWS_AGAIN = 2, 64
_EVALUATING: Final = ("prediction_step", "evaluation_loop", "evaluate")
_MOST_BYTES: Final = 1 << 24  # enough to reach an object that cannot be sent


def rehearse(run: PrivateRun, trainer: Any) -> None:
    """Evaluate and save once on a small scale, as the run will after its first steps, and restore the trainer."""
    args, metrics, ignore_keys = trainer.args, {}, trainer._ignore_keys
    evaluates = args.eval_strategy != "no"
    # A user who gives an evaluation set calls `evaluate()` after the run, if the run itself does not evaluate.
    if evaluates or trainer.eval_dataset is not None:
        if overrides(trainer, "get_eval_dataloader"):
            found, is_metric_called = _metrics_of_first_batch(run, trainer, ignore_keys)
        else:
            _check_evaluated_rows(trainer, ignore_keys)
            found, is_metric_called = _metrics_of_few_rows(trainer, ignore_keys)
        metrics = (found or {}) if evaluates else {}
        if found is not None:
            run.notes += _missing_results(trainer, found, is_metric_called=is_metric_called)
        if evaluates and found is not None and (name := args.metric_for_best_model) is not None:
            _refuse_without_best(metrics, name)
    _try_events(trainer)
    on_process_0(lambda: _save_small(trainer, metrics))


def _check_evaluated_rows(trainer: Any, ignore_keys: list[str] | None) -> None:
    """Refuse evaluation sets with values or rows that an evaluation cannot take, and those that no worker can get."""
    args, given = trainer.args, trainer.eval_dataset
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="evaluation")
    for each in given.values() if isinstance(given, dict) else [given]:
        refuse_out_of_range(
            trainer.model,
            each,
            collate=collate,
            has_own_loss=trainer.has_own_loss,
            name="eval_dataset",
            label_names=trainer.label_names or (),
        )
        most = args.per_device_eval_batch_size
        odd = refuse_uncollated(each, collate=collate, most_rows=most, name="eval_dataset")
        refuse_failing_evaluation(trainer, each, ignore_keys=ignore_keys)
        # Several processes, which look for rows for a moment, may find different ones, and an evaluation needs all of them.
        _refuse_unevaluated(trainer, each, odd if args.world_size == 1 else [], ignore_keys)
        if args.world_size > 1 and trainer.accelerator.dispatch_batches:
            refuse_undispatched(each, collate=collate, batch_size=most, processes=args.world_size)
    if given is None:
        raise Refusal(
            "nothing-to-evaluate",
            "The run will evaluate, but eval_dataset is None. Pass an eval_dataset, or set eval_strategy='no'.",
        )
    _try_workers(trainer, given, collate)


def refuse_undispatched(examples: Any, *, collate: Any, batch_size: int, processes: int) -> None:
    """Refuse an evaluation set whose batches accelerate cannot join in one process for the others; look for a moment.

    With dispatch_batches=True it joins as many batches as there are processes, which must be of one shape.
    """
    if not has_length(examples):
        return
    end = time.monotonic() + MOST_SECONDS_OF_COLLATING
    for start in range(0, len(examples), batch_size * processes):
        found = []
        for first in range(start, min(len(examples), start + batch_size * processes), batch_size):
            rows = [fetch_one(examples, row) for row in range(first, min(len(examples), first + batch_size))]
            batch = tried(collate, rows)
            found.append({name: each.shape[1:] for name, each in batch.items() if isinstance(each, torch.Tensor)})
        if any(shapes != found[0] for shapes in found):
            raise Refusal(
                "batches-not-dispatched",
                f"With dispatch_batches=True, accelerate joins the evaluation batches of all {processes} processes, which "
                "fails here, because data_collator makes batches of different lengths. Leave dispatch_batches out of "
                "accelerator_config, or pad all rows to one length.",
            )
        if time.monotonic() > end:
            return


def _refuse_unevaluated(trainer: Any, dataset: Any, rows: list[int], ignore_keys: list[str] | None) -> None:
    """Refuse an evaluation set if the model fails on some of the rows, each alone, and takes others of them."""
    errors = []
    for row in rows:
        few = dataset.select([row]) if hasattr(dataset, "select") else Subset(dataset, [row])
        try:
            _evaluated(trainer, few, ignore_keys, compute_metrics=Watched(lambda _: {}))
        except Exception as error:
            errors.append(error)
    if errors and len(errors) < len(rows):
        # The refusal leaves out the error's words, which may hold a part of a row.
        raise Refusal(
            "rows-not-evaluated",
            f"The model fails with a {type(errors[0]).__name__} on some rows of eval_dataset, so an evaluation would end "
            "the run after ε was spent. Look for rows whose values have another shape than those of others, such as images "
            "with another size or number of channels, and change or remove them.",
        ) from errors[0]


def _missing_results(trainer: Any, found: dict[str, Any], *, is_metric_called: bool) -> list[str]:
    """Return notes on a loss that evaluations will not report, and on metrics that they will not compute."""
    sets = evaluation_sets(trainer.eval_dataset)
    without_loss = [each for name in sets if (each := f"eval_{name}_loss" if name else "eval_loss") not in found]
    where = (
        f"it looks for the columns {', '.join(trainer.label_names) or 'labels'}. Set label_names to the names that the "
        "labels have in your batches, or leave it out if they are called 'labels'"
    )
    own = next((name for name in _EVALUATING if overrides(trainer, name)), None)
    if without_loss and own is not None:
        notes = [f"evaluations report no {without_loss[0]}, because {next(definitions(trainer, own)).place} returns none"]
    elif without_loss and not is_metric_called:
        notes = [
            "evaluations have no loss and maybe no metrics, because Transformers found no labels in eval_dataset: " + where
        ]
    elif without_loss:
        notes = [f"evaluations report no {without_loss[0]}, because Transformers found no labels in eval_dataset: {where}"]
    else:
        notes = []
    first = next(iter(few_rows(next(iter(sets.values())), 1)), None)
    has_labels = isinstance(first, Mapping) and any(name in first for name in LABELS)
    if is_metric_called and trainer.compute_metrics is not None and _has_no_names_of_labels(trainer) and has_labels:
        notes.append(
            f"compute_metrics gets no labels, because the forward of {type(trainer.model).__name__} does not name them. Set "
            "label_names=['labels'] to pass them"
        )
    if not is_metric_called and own is None and trainer.args.prediction_loss_only:
        return [*notes, "compute_metrics is not called, because prediction_loss_only=True. Leave that argument out"]
    if not is_metric_called and own is None and not without_loss:
        notes.append(
            f"compute_metrics is not called, because Transformers found no labels in eval_dataset: {where}. If the loss "
            "needs no labels, set label_names=[]; compute_metrics is then called without labels"
        )
    return notes


def _try_events(trainer: Any) -> None:
    """Ask Transformers when it would log, evaluate and save, since the arguments may have changed after they were made."""
    args = trainer.args
    if args.eval_delay is None:
        raise Refusal(
            "no-eval-delay",
            "args.eval_delay is None, probably because of args.set_evaluate, which removes its value. The first "
            "evaluation would fail. Set args.eval_delay = 0 before train().",
        )
    state, control = copy.deepcopy((trainer.state, trainer.control))
    with _errors_as_refusals("when to log, evaluate and save"):
        state.compute_steps(args, trainer.privacy.statement.steps_planned)
        state.global_step, state.epoch = 1, state.epoch or 0.0
        for event in (DefaultFlowCallback.on_step_end, DefaultFlowCallback.on_epoch_end):
            event(DefaultFlowCallback(), args, state, control)


class _Enough(Exception):
    """Raised when enough of an object was pickled to conclude that it can be sent to a process."""


class _Written:
    """A file that keeps nothing, and stops after a number of bytes."""

    def __init__(self) -> None:
        self.left = _MOST_BYTES

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        self.left -= size
        if self.left < 0:
            raise _Enough
        return size


def _try_workers(trainer: Any, given: Any, collate: Any) -> None:
    """Try to pickle each evaluation set and the collator, if worker processes will load evaluations and need copies."""
    args = trainer.args
    context = args.dataloader_multiprocessing_context
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    method = context if isinstance(context, str) else method if context is None else context.get_start_method()
    if args.dataloader_num_workers == 0 or method == "fork":
        return
    for name, each in (given if isinstance(given, dict) else {"": given}).items():
        for what, sent in ((f"eval_dataset[{name!r}]" if name else "eval_dataset", each), ("data_collator", collate)):
            try:
                with contextlib.suppress(_Enough):
                    ForkingPickler(_Written(), pickle.HIGHEST_PROTOCOL).dump(sent)
            except Exception as error:
                if "through inheritance" in str(error):  # locks can be pickled only while a process starts
                    continue
                raise Refusal(
                    "not-for-workers",
                    f"{what} cannot be pickled ({type(error).__name__}), but worker processes with start method {method!r} "
                    "need a copy of it, so evaluations would fail. Define functions such as transforms at the top level of "
                    "a module, not as lambdas or inside other functions, or set dataloader_num_workers=0.",
                ) from error


def _refuse_without_best(metrics: dict[str, Any], name: str) -> None:
    key = f"eval_{name.removeprefix('eval_')}"
    best = metrics.get(key)
    if key in metrics and not isinstance(best, int | float | np.number):
        raise Refusal(
            "metric-not-a-number",
            f"metric_for_best_model={name!r} must be a number; got {type(best).__name__} on the first rows. Return a number "
            "for it from compute_metrics, or set another metric.",
        )
    if best is None:
        known = [each for each in metrics if each.startswith("eval_") and not each.endswith(("_runtime", "_second"))]
        which = f"It returns {', '.join(known)}" if known else "It returns no metric for the first rows"
        default = " (the default of load_best_model_at_end)" if name == "loss" else ""
        mend = "Set one of these." if known else "Add labels to eval_dataset, or pass compute_metrics."
        raise Refusal(
            "no-such-metric",
            f"metric_for_best_model={name!r}{default} is not a metric that evaluation returns. {which}. {mend}",
        )
    if isinstance(best, float) and math.isnan(best):
        warnings.warn(
            f"metric_for_best_model={name!r} is NaN on the first rows. A checkpoint whose metric is NaN is never chosen as "
            "the best, so check compute_metrics.",
            stacklevel=3,
        )


def _metrics_of_few_rows(trainer: Any, ignore_keys: list[str] | None) -> tuple[dict[str, Any], bool]:
    """Return the metrics of each evaluation set for predictions of a few rows, on all labels if these are known.

    The second value says whether `compute_metrics` was called. It is also true if there is none, or if it gets batches.
    """
    own = trainer.compute_metrics
    if own is None or trainer.args.batch_eval_metrics:
        with _errors_as_refusals("an evaluation"):
            try:
                return _evaluated(trainer, few_rows(trainer.eval_dataset, _ROWS), ignore_keys), True
            except Exception:
                if own is None:
                    raise
                more = few_rows(trainer.eval_dataset, _ROWS_AGAIN)  # a metric of two rows may be undefined
                return _evaluated(trainer, more, ignore_keys), True
    first: Exception | None = None
    for count in (_ROWS, _ROWS_AGAIN):
        watched = Watched(own)
        with _errors_as_refusals("an evaluation"):
            few = few_rows(trainer.eval_dataset, count)
            metrics = _evaluated(trainer, few, ignore_keys, compute_metrics=watched)
        # A metric may be undefined on a few rows but not on all, or the other way round. The whole set decides.
        found, error = _metrics_of_whole_sets(trainer, watched, count)
        if error is None and (found is not None or not watched.errors):
            return metrics | (found or {}), bool(watched.seen)
        _refuse_without_labels(trainer, watched)
        first = first or error
    if first is not None and not watched.errors:
        said = str(first).rstrip(".")
        raise Refusal(
            "metric-fails",
            f"compute_metrics failed with {type(first).__name__} on the labels of the whole evaluation set: {said}. It was "
            "called with these labels, and with the predictions for a few rows repeated for all rows. No ε is spent. Fix "
            "it, or set rehearse=False to skip this check.",
        ) from first
    with _errors_as_refusals(f"an evaluation with compute_metrics, on up to {_ROWS_AGAIN} rows,"):
        raise watched.errors[0]


def _refuse_without_labels(trainer: Any, watched: Watched) -> None:
    """Explain a `compute_metrics` that fails because Transformers found no names of labels in the model's forward."""
    if watched.errors and watched.seen and _has_no_names_of_labels(trainer) and not watched.seen[0].label_ids:
        raise Refusal(
            "no-names-of-labels",
            f"compute_metrics failed with a {type(watched.errors[0]).__name__}. It got no labels, because the forward of "
            f"{type(trainer.model).__name__} does not name them, so Transformers does not collect them. Set "
            "label_names=['labels'] in the arguments, or the names that labels have in your batches.",
        ) from watched.errors[0]


def _has_no_names_of_labels(trainer: Any) -> bool:
    return trainer.args.label_names is None and not trainer.label_names


# Errors of a metric that have another reason than that it is undefined on a few rows.
_MISTAKES: Final = (TypeError, AttributeError, KeyError, IndexError, NameError, ImportError)


def _metrics_of_first_batch(
    run: PrivateRun, trainer: Any, ignore_keys: list[str] | None
) -> tuple[dict[str, Any] | None, bool]:
    """Return the metrics of the first batch of the user's own evaluation loader, or None if they are undefined there.

    Only one batch is evaluated, because nobody knows how long an evaluation with such a loader takes.
    """
    own = trainer.compute_metrics
    is_added_up = own is not None and trainer.args.batch_eval_metrics
    watched = None if own is None or is_added_up else Watched(own)
    compute = functools.partial(_as_of_the_last_batch, own) if is_added_up else watched
    with _errors_as_refusals("an evaluation of the first batch of your get_eval_dataloader"):
        metrics = _evaluated(trainer, trainer.eval_dataset, ignore_keys, compute_metrics=compute, most_batches=1)
        if watched is not None:
            _refuse_without_labels(trainer, watched)
        if watched is not None and watched.errors and isinstance(watched.errors[0], _MISTAKES):
            raise watched.errors[0]
    if watched is not None and watched.errors:
        run.notes.append(
            f"compute_metrics failed with a {type(watched.errors[0]).__name__} on the first batch of your "
            "get_eval_dataloader. Make sure that it works for all rows together, because a failure later would end the run "
            "after ε is spent"
        )
        return None, True
    # Metrics that are added up over batches are returned with the last batch.
    return (None if trainer.args.batch_eval_metrics else metrics), watched is None or bool(watched.seen)


def _as_of_the_last_batch(compute_metrics: Any, predictions: Any, compute_result: bool = True) -> Any:
    """Return metrics that are added up over batches, of one batch: otherwise it would count in the next evaluation."""
    return compute_metrics(predictions, compute_result=True)


class _FirstBatches:
    """The first batches of a loader, with all else that the loader has."""

    def __init__(self, loader: Any, count: int) -> None:
        self._loader, self._count = loader, count

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        try:
            yield from islice(batches, self._count)
        finally:
            if hasattr(batches, "close"):
                batches.close()
            if isinstance(self._loader, DataLoaderStateMixin):  # accelerate takes a loader for active until its end
                self._loader.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _metrics_of_whole_sets(trainer: Any, watched: Watched, count: int) -> tuple[dict[str, Any] | None, Exception | None]:
    """Return the metrics of whole evaluation sets, or None if some labels are unknown, and the error if one fails."""
    given, found = trainer.eval_dataset, dict[str, Any]()
    sets = given if isinstance(given, dict) else {"": given}
    names = list(trainer.label_names)
    if len(watched.seen) != len(sets):  # the user's own evaluation calls `compute_metrics` differently
        return None, None
    for (name, dataset), few in zip(sets.items(), watched.seen, strict=True):
        rows = spread_row_numbers(len(dataset), count) if has_length(dataset) else []
        try:
            with warnings.catch_warnings(action="ignore"):
                metrics = metrics_on_all_labels(watched.function, few, dataset, rows=rows, names=names)
        except Exception as error:
            return None, error
        if metrics is None:
            return None, None
        prefix = f"eval_{name}_" if name else "eval_"
        found |= {key if key.startswith(prefix) else prefix + key: value for key, value in metrics.items()}
    return found, None


@contextlib.contextmanager
def _errors_as_refusals(what: str) -> Iterator[None]:
    """Turn an error of the block into a refusal that names the rehearsed part and says that no ε is spent."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        said = str(error).rstrip(".")
        raise Refusal(
            "rehearsal-failed",
            f"The rehearsal of {what} failed with {type(error).__name__}: {said}. No ε is spent. Fix it. With "
            "rehearse=False the same error may end the run after ε is spent.",
        ) from error


def _evaluated(
    trainer: Any,
    dataset: Any,
    ignore_keys: list[str] | None,
    *,
    compute_metrics: Callable[..., Any] | None = None,
    most_batches: int | None = None,
) -> dict[str, Any]:
    """Evaluate a data set with a copy of the trainer, without callbacks, trackers, workers and warnings.

    With `most_batches`, only so many batches of the loader are evaluated.
    """
    quiet = copy.copy(trainer)
    quiet.compute_metrics = compute_metrics or trainer.compute_metrics
    quiet.metrics_of_rows = trainer.compute_metrics
    quiet.eval_dataset = dataset
    quiet.state, quiet.control = copy.deepcopy((trainer.state, trainer.control))
    quiet.callback_handler, quiet.args = copy.copy(trainer.callback_handler), copy.copy(trainer.args)
    quiet.callback_handler.callbacks = []
    vars(quiet.args).update(dataloader_num_workers=0, dataloader_prefetch_factor=None)
    vars(quiet.args).update(dataloader_persistent_workers=False, dataloader_multiprocessing_context=None)
    if most_batches is not None:
        loader_of = quiet.get_eval_dataloader
        quiet.get_eval_dataloader = lambda *given, **named: _FirstBatches(loader_of(*given, **named), most_batches)
    with modes_kept(trainer.model), filled_generators(0), warnings.catch_warnings(action="ignore"):
        return dict(quiet.evaluate(ignore_keys=ignore_keys))


def few_rows(dataset: Any, count: int) -> Any:
    """Return some rows of each data set, spread from first to last, so that sorted labels give at least two classes."""
    if isinstance(dataset, dict):
        return {name: few_rows(each, count) for name, each in dataset.items()}
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        return dataset.take(count) if hasattr(dataset, "take") else [*islice(dataset, count)]
    rows = spread_row_numbers(len(dataset), count)
    return dataset.select(rows) if hasattr(dataset, "select") else Subset(dataset, rows)


def spread_row_numbers(size: int, count: int) -> list[int]:
    """Return `count` row numbers, spread from the first to the last of `size` rows."""
    looked = min(size, count)
    return [(size - 1) * i // max(1, looked - 1) for i in range(looked)]


def _state_as_saved(trainer: Any) -> TrainerState:
    """Return the trainer's state as a checkpoint would hold it, with the states of callbacks."""
    state = copy.deepcopy(trainer.state)
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            state.stateful_callbacks[type(callback).__name__] = callback.state()
    return state


def _save_small(trainer: Any, metrics: dict[str, Any]) -> None:
    """Save a model without weights, or a checkpoint, into a temporary folder in the output folder."""
    args, model = trainer.args, trainer.model
    saves = args.save_strategy != "no"  # without checkpoints in the run, users mostly save the model afterwards
    is_pretrained = isinstance(model, PreTrainedModel)
    if is_pretrained and model._hf_peft_config_loaded and args.load_best_model_at_end:
        raise Refusal(
            "adapters-not-loadable",
            "load_best_model_at_end=True does not work with adapters of model.add_adapter, because Transformers cannot load "
            "them again. Leave load_best_model_at_end out, or attach the adapter with peft.get_peft_model(model, config).",
        )
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if saves and (free := shutil.disk_usage(args.output_dir).free) < size:
        raise Refusal(
            "disk-full",
            f"A checkpoint needs at least {size:,} bytes, but the disk of {args.output_dir} has only {free:,} bytes free. "
            "Free some space, or set another output_dir.",
        )
    if saves:
        with _errors_as_refusals("a checkpoint with what compute_metrics returns"):
            json.dumps(metrics, sort_keys=True)  # the trainer's state is saved in this way
    what = "a checkpoint" if saves else "save_model()"
    with _errors_as_refusals(what), tempfile.TemporaryDirectory(dir=args.output_dir, prefix="rehearsal-") as folder:
        if is_pretrained:
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
            remove_tied_weights_from_state_dict(model.state_dict(), model)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        torch.save(args, f"{folder}/training_args.bin")
        if saves:
            torch.save(trainer.lr_scheduler.state_dict(), f"{folder}/{SCHEDULER_NAME}")
            _state_as_saved(trainer).save_to_json(f"{folder}/{TRAINER_STATE_NAME}")
