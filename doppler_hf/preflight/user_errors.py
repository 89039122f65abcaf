"""Explain errors in the user's code that a private run's inputs cause, with the reason and the fix."""

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from doppler_hf.errors import Refusal
from doppler_hf.training_args import DopplerTrainingArguments

_OUR_CALLS: Final = "doppler_hf."
_GRADIENTS: Final = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)

# Transformers' default collator renames these columns to `labels`.
RENAMED: Final = ("label", "label_ids")


@contextlib.contextmanager
def explain_removed_columns(args: DopplerTrainingArguments, dataset: Any) -> Iterator[None]:
    """Explain which argument to set if a loss, a transform or a collator needs a column that Transformers removed."""
    try:
        yield
    except KeyError as error:
        name = error.args[0] if error.args else None
        if name is not None and name == args.privacy_unit_column:
            raise Refusal(
                "unit-column-is-removed",
                f"Your code asked for the column {name!r}, but privacy_unit_column names it, so that it is removed before "
                "rows are read: no model takes it. Leave it out of transform, collator and loss.",
            ) from error
        columns = getattr(dataset, "column_names", None)
        if columns is None:
            columns = dataset[0] if isinstance(dataset[0], Mapping) else ()
        if name in RENAMED and name in columns:
            raise Refusal(
                "labels-renamed",
                f"The loss asked for {name!r}, but Transformers' default collator renames that column to 'labels'. Use "
                "inputs['labels'] in the loss, or pass your own data_collator.",
            ) from error
        if name == "labels" and columns and not {*columns} & {name, *RENAMED}:
            raise Refusal(
                "no-labels-column",
                f"Expected a column 'labels' or 'label' in train_dataset; got the columns {', '.join(map(str, columns))}. "
                "Rename the column that has the labels, or name it in label_names.",
            ) from error
        if not args.remove_unused_columns or name not in columns:
            raise
        raise Refusal(
            "label-not-named",
            f"Your code asked for the column {name!r}, but Transformers removes columns that the model's forward does not "
            f"take. If it is a label, set label_names=[{name!r}]. If it is an input, or a transform reads it, set "
            "remove_unused_columns=False.",
        ) from error


@contextlib.contextmanager
def explain_gradients_in_a_loss() -> Iterator[None]:
    """Explain that a loss cannot contain gradients if it fails because torch cannot compute or differentiate them here."""
    try:
        yield
    except RuntimeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # The user's loss calls torch.autograd.grad itself, and torch.autograd.backward by way of Tensor.backward.
        outside = [frame for frame in frames if not frame.f_globals.get("__name__", "").startswith("torch.")]
        is_taken = any(frame.f_code in _GRADIENTS for frame in frames) and not outside[-1].f_globals.get(
            "__name__", ""
        ).startswith(_OUR_CALLS)
        if not is_taken and "@once_differentiable" not in str(error):
            raise
        raise Refusal(
            "gradient-in-the-loss",
            "The loss or a callback takes a gradient (torch.autograd.grad or backward()), for example for a penalty with "
            "create_graph=True. Per-sample gradients come from a single backward pass of the run itself, which cannot be "
            "differentiated again. Leave gradients out of compute_per_sample_loss. A callback may take them of a copy: "
            "copy.deepcopy(model).",
        ) from error
