"""Find rows whose labels or inputs are NaN, or that have no tokens, and for which a loss of the user's own has no value.

Such a row would contribute nothing, since a gradient that is not finite counts as zero; or the run would end when it comes
to the row. But a loss may use NaN for a label that is not known, and take a row without tokens. So each such row is tried by
itself, and a row with NaN again with zeros in their place.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.preflight.autograd_check.without_randomness import without_dropout
from doppler_hf.privacy.batching.columns import LABELS, first_empty, is_stored, is_table, rows_not_finite
from doppler_hf.privacy.batching.micro_batches import fetch_one
from doppler_hf.privacy.batching.probe import Inputs
from doppler_hf.privacy.randomness import filled_generators
from doppler_hf.run.private_run import PrivateRun

# No entry; or some, or all, of the numbers are not finite.
_Kind = Literal["empty", "some", "all"]
_KEPT: Final[dict[_Kind, str]] = {
    "empty": "len(row[{!r}]) > 0",
    "some": "numpy.isfinite(row[{!r}]).all()",
    "all": "numpy.isfinite(row[{!r}]).any()",
}
# The seconds in which rows are looked at that are not stored in a table; with several processes the number of rows.
_SECONDS: Final = 0.3
_ROWS_OF_PROCESSES: Final = 64


def refuse_rows_without_numbers(run: PrivateRun, trainer: Any) -> None:
    """Refuse a training set if the user's loss has no finite value for rows without numbers, which the message names."""
    # The values that a model of Transformers takes with its own loss are known, and `values` looks for others.
    if not trainer.has_own_loss or not trainer.args.grad_sample_self_check:
        return
    labels = {*LABELS, *(trainer.label_names or ())}
    found = dict[tuple[Any, _Kind], Any]()
    examples = run.probe.examples
    with filled_generators(0):
        for row in _looked_at(examples, is_alone=trainer.args.world_size == 1):
            for odd in _odd_columns(row):
                found.setdefault(odd, row)
    # If a loss takes rows of which some numbers are missing, only those without any are left to be refused.
    order = sorted(found, key=lambda odd: (odd[1] == "all", odd[0] not in labels))
    with without_dropout(trainer.model), run.unwatched(), torch.no_grad(), filled_generators(0):
        for column, kind in order:
            if _has_no_loss_for_it(run, found[column, kind], kind):
                raise _refusal(examples, column, kind, is_label=column in labels)


def _looked_at(examples: Any, *, is_alone: bool) -> Iterator[Any]:
    """Yield rows of each kind, if they are in a table, and otherwise random rows for a moment."""
    if is_stored(examples):
        for column in examples.column_names:
            empty = first_empty(examples, column=column)
            for place in [*([] if empty is None else [empty]), *rows_not_finite(examples, column=column)]:
                yield fetch_one(examples, place)
        return
    if not has_length(examples):
        return
    end = time.monotonic() + _SECONDS
    for count, place in enumerate(np.random.default_rng(3).permutation(len(examples)).tolist()):
        # Processes that share weights must call the model equally often, and so look at the same rows.
        if time.monotonic() > end if is_alone else count >= _ROWS_OF_PROCESSES:
            return
        yield fetch_one(examples, place)


def _odd_columns(row: Any) -> Iterator[tuple[Any, _Kind]]:
    entries = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, tuple | list) else ()
    for column, value in entries:
        if (kind := oddity_of(value)) is not None:
            yield column, kind


def oddity_of(value: Any) -> _Kind | None:
    """Return in which way an entry of a row is without numbers, or None if it is not."""
    with contextlib.suppress(Exception):  # a list of lists of other lengths, for example, is no array
        numbers = np.asarray(value)
        if numbers.ndim and not len(numbers):
            return "empty"
        if numbers.dtype.kind == "f" and not (is_finite := np.isfinite(numbers)).all():
            return "some" if is_finite.any() or not numbers.ndim else "all"
    return None


def _has_no_loss_for_it(run: PrivateRun, row: Any, kind: _Kind) -> bool:
    """Return whether a row has no finite loss because of what it is, and not because the loss has none for any row."""
    inputs = _collated(run, row)
    if inputs is not None and _is_finite(run, inputs):
        return False
    if kind == "empty":
        others = [each for each in (run.probe.longest, *run.probe.short) if not [*_odd_columns(each)]]
        inputs = _collated(run, others[0]) if others else None
        return inputs is not None and _is_finite(run, inputs)
    if inputs is None:
        return False
    filled = {
        name: value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    return _is_finite(run, filled)


def _collated(run: PrivateRun, row: Any) -> Inputs | None:
    with contextlib.suppress(Exception):
        return run.probe.collated([row])
    return None


def _is_finite(run: PrivateRun, inputs: Inputs) -> bool:
    try:
        return bool(run.losses_of(dict(inputs)).isfinite().all())
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False


def _refusal(examples: Any, column: Any, kind: _Kind, *, is_label: bool) -> Refusal:
    kept = _KEPT[kind].format(column)
    mend = kept_rows(examples, kept, name="train_dataset")
    if kind == "empty":
        return Refusal(
            "values-out-of-range",
            f"Column {column!r} of train_dataset: expected at least one token per row; got none in some rows, for which "
            f"compute_per_sample_loss fails or is NaN. Leave them out: {mend}.",
        )
    if is_label:
        return missing_labels(examples, "train_dataset", column, kept, "", but=" that is a finite number")
    return Refusal(
        "numbers-not-finite",
        f"Some rows of train_dataset have a number in the column {column!r} that is not finite (NaN or infinite), and their "
        f"loss is not finite either, so they would train nothing. Remove them, or fill in a value: {mend}.",
    )


def missing_labels(examples: Any, name: str, column: Any, is_there: str, hint: str, *, but: str = "") -> Refusal:
    """Return the refusal of rows without a label, of which `is_there` is the condition that the others fulfil."""
    # The message says neither which rows nor how many, since messages end up in logs.
    mend = (
        f"{name}.filter(lambda row: {is_there})" if hint and is_table(examples) else kept_rows(examples, is_there, name=name)
    )
    return Refusal(
        "missing-labels", f"Some rows of {name} have no label{but} in the column {column!r}. Remove them: {mend}." + hint
    )


def kept_rows(examples: Any, condition: str, *, name: str) -> str:
    """Return the line that keeps the rows of a data set for which a condition holds."""
    if is_stored(examples):
        return f"{name}.filter(lambda row: {condition})"
    return f"torch.utils.data.Subset({name}, [i for i, row in enumerate({name}) if {condition}])"
