"""Errors in the user's code that follow from a private run's inputs, with the reason and the fix."""

import contextlib
import itertools
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from transformers import TrainingArguments

from doppler_hf.errors import Refusal

_OUR_CALLS: Final = ("doppler_hf.", "torch.")

# Columns that Transformers' default collator calls `labels`.
_RENAMED: Final = ("label", "label_ids")


@contextlib.contextmanager
def told_of_removed_columns(args: TrainingArguments, dataset: Any) -> Iterator[None]:
    """Say what to set if a loss, a transform or a collator asks for a column that Transformers removed or renamed."""
    try:
        yield
    except KeyError as error:
        name = error.args[0] if error.args else None
        columns = getattr(dataset, "column_names", None)
        if columns is None:
            columns = dataset[0] if isinstance(dataset[0], Mapping) else ()
        if name in _RENAMED and name in columns:
            raise Refusal(
                "labels-renamed",
                f"A loss must take inputs['labels'], got a KeyError for {name!r}: Transformers' default collator renames "
                "it. Or give a data_collator of your own.",
            ) from error
        if name == "labels" and columns and not {*columns} & {name, *_RENAMED}:
            raise Refusal(
                "no-labels-column",
                f"train_dataset must have a column 'labels' or 'label', or one that label_names names, got "
                f"{', '.join(map(str, columns))}. Rename the column of the labels.",
            ) from error
        if not args.remove_unused_columns or name not in columns:
            raise
        raise Refusal(
            "label-not-named",
            f"label_names must have {name!r} if it is a label, got {args.label_names}: Transformers removes columns that "
            f"the forward does not name. Set label_names=[{name!r}], or remove_unused_columns=False for inputs, and for "
            "what a transform reads.",
        ) from error


@contextlib.contextmanager
def told_of_gradients_in_a_loss() -> Iterator[None]:
    """Say that a loss cannot contain gradients, if it fails because torch cannot take or differentiate them here."""
    try:
        yield
    except RuntimeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_taken = any(
            inner.f_code is torch.autograd.grad.__code__ and not outer.f_globals.get("__name__", "").startswith(_OUR_CALLS)
            for outer, inner in itertools.pairwise(frames)
        )
        if not is_taken and "@once_differentiable" not in str(error):
            raise
        raise Refusal(
            "gradient-in-the-loss",
            "The loss contains a gradient that torch.autograd.grad takes, such as a penalty with create_graph=True. "
            "Per-sample gradients come from one backward pass, which cannot be differentiated again. Leave the penalty out "
            "of compute_per_sample_loss.",
        ) from error
