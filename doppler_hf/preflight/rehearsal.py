"""A rehearsal before anything is spent: an evaluation of a few rows, and a checkpoint without weights.

Transformers evaluates and saves for the first time after an epoch. A failure there ends the training with ε spent.
"""

import contextlib
import copy
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset
from transformers import PreTrainedModel, Trainer
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.preflight.values import refuse_out_of_range
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes import on_process_0

# Rows of each evaluation set; more if `compute_metrics` cannot do with two.
_ROWS, _ROWS_AGAIN = 2, 64


def rehearse(_run: PrivateRun, trainer: Any) -> None:
    """Do once, small, what the training will do after its first steps, and leave the trainer as it was."""
    args, metrics, ignore_keys = trainer.args, {}, trainer._ignore_keys
    # A loader of the user's own is left out: nobody knows how long an evaluation with it takes.
    evaluates = args.eval_strategy != "no"
    # Who gives metrics calls `evaluate()` after the training, if not in it.
    will_evaluate = evaluates or (trainer.compute_metrics is not None and trainer.eval_dataset is not None)
    if will_evaluate and type(trainer).get_eval_dataloader is Trainer.get_eval_dataloader:
        given, has_own_loss = trainer.eval_dataset, trainer.has_own_loss
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="evaluation")
        for each in given.values() if isinstance(given, dict) else [given]:
            refuse_out_of_range(trainer.model, each, collate=collate, has_own_loss=has_own_loss, name="eval_dataset")
        found = _metrics_of_few_rows(trainer, ignore_keys)
        metrics = found if evaluates else {}
        if evaluates and (name := args.metric_for_best_model) is not None:
            _refuse_without_best(metrics, name)
    on_process_0(lambda: _save_small(trainer, metrics))


def _refuse_without_best(metrics: dict[str, Any], name: str) -> None:
    key = f"eval_{name.removeprefix('eval_')}"
    best = metrics.get(key)
    if key in metrics and not isinstance(best, int | float | np.number):
        raise Refusal(
            "metric-not-a-number",
            f"metric_for_best_model={name!r} must be a number, got {type(best).__name__} on the first rows. Let "
            "compute_metrics return one for it, or set another metric.",
        )
    if best is None:
        known = [each for each in metrics if each.startswith("eval_") and not each.endswith(("_runtime", "_second"))]
        which = f"of {', '.join(known)}" if known else "which return nothing on the first rows"
        default = " (what load_best_model_at_end takes if it is left out)" if name == "loss" else ""
        mend = "Set one of them." if known else "Give eval_dataset labels, or compute_metrics."
        raise Refusal(
            "no-such-metric",
            f"metric_for_best_model must be one that evaluations return, {which}, got {name!r}{default}. {mend}",
        )
    if isinstance(best, float) and math.isnan(best):
        warnings.warn(f"metric_for_best_model={name!r} is NaN on the first rows, and NaN is never the best.", stacklevel=3)


def _metrics_of_few_rows(trainer: Any, ignore_keys: list[str] | None) -> dict[str, Any]:
    """Return the metrics of a few rows of each evaluation set, by the call that Transformers makes during a training."""
    has_metrics = trainer.compute_metrics is not None
    with _told_as_refusal(
        f"an evaluation with compute_metrics, on up to {_ROWS_AGAIN} rows," if has_metrics else "an evaluation"
    ):
        try:
            return _evaluated(trainer, _ROWS, ignore_keys)
        except Exception:
            if not has_metrics:
                raise
            return _evaluated(trainer, _ROWS_AGAIN, ignore_keys)  # a score of two may be undefined


@contextlib.contextmanager
def _told_as_refusal(what: str) -> Iterator[None]:
    """Turn an error of the block into one that says where it came from, and that no ε is spent."""
    try:
        yield
    except Exception as error:
        said = str(error).rstrip(".")
        raise Refusal(
            "rehearsal-failed",
            f"The rehearsal of {what} failed with {type(error).__name__}: {said}. No ε is spent. Fix it, or set "
            "rehearse=False to skip the rehearsal.",
        ) from error


def _evaluated(trainer: Any, count: int, ignore_keys: list[str] | None) -> dict[str, Any]:
    """Evaluate some rows by a copy of the trainer, without callbacks, trackers, workers and warnings; leave no trace."""
    quiet = copy.copy(trainer)
    quiet.eval_dataset = few_rows(trainer.eval_dataset, count)
    quiet.state, quiet.control = copy.deepcopy((trainer.state, trainer.control))
    quiet.callback_handler, quiet.args = copy.copy(trainer.callback_handler), copy.copy(trainer.args)
    quiet.callback_handler.callbacks = []
    vars(quiet.args).update(dataloader_num_workers=0, dataloader_prefetch_factor=None)
    vars(quiet.args).update(dataloader_persistent_workers=False, dataloader_multiprocessing_context=None)
    with modes_kept(trainer.model), warnings.catch_warnings(action="ignore"):
        return dict(quiet.evaluate(ignore_keys=ignore_keys))


def few_rows(dataset: Any, count: int) -> Any:
    """Return some rows of a data set, or of each, from its first to its last: of sorted labels there are two then."""
    if isinstance(dataset, dict):
        return {name: few_rows(each, count) for name, each in dataset.items()}
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        return dataset.take(count) if hasattr(dataset, "take") else [*islice(dataset, count)]
    looked = min(len(dataset), count)
    rows = [(len(dataset) - 1) * i // max(1, looked - 1) for i in range(looked)]
    return dataset.select(rows) if hasattr(dataset, "select") else Subset(dataset, rows)


def _save_small(trainer: Any, metrics: dict[str, Any]) -> None:
    """Save a model without weights, or a checkpoint, into a temporary folder in the output folder."""
    args, model = trainer.args, trainer.model
    saves = args.save_strategy != "no"  # during the training; a model is saved after most
    is_pretrained = isinstance(model, PreTrainedModel)
    if is_pretrained and model._hf_peft_config_loaded and args.load_best_model_at_end:
        raise Refusal(
            "adapters-not-loadable",
            "load_best_model_at_end must be False with adapters of model.add_adapter, which Transformers cannot load "
            "again, got True. Leave it out, or attach the adapter with peft.get_peft_model(model, config).",
        )
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if saves and (free := shutil.disk_usage(args.output_dir).free) < size:
        raise Refusal(
            "disk-full",
            f"{args.output_dir} must have {size} bytes free for a checkpoint, got {free}. Set another output_dir.",
        )
    if saves:
        with _told_as_refusal("a checkpoint with what compute_metrics returns"):
            json.dumps(metrics, sort_keys=True)  # as in the state of the training
    what = "a checkpoint" if saves else "save_model()"
    with _told_as_refusal(what), tempfile.TemporaryDirectory(dir=args.output_dir, prefix="rehearsal-") as folder:
        if is_pretrained:
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
            remove_tied_weights_from_state_dict(model.state_dict(), model)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        torch.save(args, f"{folder}/training_args.bin")
