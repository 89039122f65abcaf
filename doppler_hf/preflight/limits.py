"""The values that a Transformers model accepts in each column of a data set: token ids, types, lengths and labels."""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from doppler_hf.errors import Refusal
from doppler_hf.privacy import losses
from doppler_hf.privacy.batching.columns import LABELS
from doppler_hf.privacy.token_losses import IGNORED_LABEL

# Transformers' models name their table of positions like this. It is in the same module as the table of tokens.
_POSITIONS: Final = ("embed_positions", "position_embedding", "position_embeddings", "positions_embed", "wpe")

_REFUSED_TYPES: Final = {"no booleans": "b", "no whole numbers": "iub"}  # kinds of NumPy's dtypes


class Limit(NamedTuple):
    """The values that a model accepts in a column: numbers, or lengths of rows, from 0 to less than `end`."""

    column: str
    kind: Literal[
        "numbers", "shares", "lengths", "not empty", "no booleans", "no text", "no whole numbers", "boxes", "boxes in order"
    ]
    end: int
    fix: str  # a sentence without its full stop
    is_ignoring: bool = False  # whether -100 is accepted, too
    no_place: int | None = None  # a token that takes no position and does not count for the length

    def is_exceeded(self, found: np.ndarray) -> bool:
        """Return whether one of these numbers, or lengths, is out of range."""
        if self.kind in _REFUSED_TYPES:
            return found.dtype.kind in _REFUSED_TYPES[self.kind]
        if found.dtype.kind not in "iuf":
            return False
        if self.kind == "shares":
            return bool(((found < 0) | (found > 1)).any())
        if self.kind == "not empty":
            return bool((found == 0).any())
        if self.kind == "boxes in order" and found.size % 4 == 0:
            boxes = found.reshape(-1, 4)
            if (boxes[:, :2] > boxes[:, 2:]).any():
                return True
        return bool(((found >= self.end) | ((found < 0) & ~(self.is_ignoring & (found == IGNORED_LABEL)))).any())

    def is_exceeded_in(self, row: Any) -> bool:
        """Return whether a row, or a batch of one row, exceeds the limit; its labels may be called `labels`."""
        names = (self.column, *(("labels",) if self.column in LABELS else ()))
        value = next((row[name] for name in names if isinstance(row, Mapping) and name in row), None)
        if value is None:
            return False
        if self.kind == "no text":
            return _has_text(value)
        if isinstance(value, list) and value and isinstance(value[0], list):  # a row of several choices
            return any(self.is_exceeded_in({self.column: each}) for each in value)
        found = value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
        if self.kind in ("lengths", "not empty"):
            # A text in place of numbers has a length, too; another check names it.
            places = np.ones(found.shape, np.int64) if self.no_place is None else found != self.no_place
            found = places.sum(axis=-1 if found.ndim else None)
        return self.is_exceeded(found)

    def refusal(self, name: str, hint: str) -> Refusal:
        """Return the error for the data set `name`, without any value or row number: messages end up in logs."""
        words, got = {
            "numbers": (f"numbers from 0 to {self.end - 1:,}" + f", or {IGNORED_LABEL}" * self.is_ignoring, "other values"),
            "lengths": (f"at most {self.end - 1:,} tokens per row (the model's positions)", "more"),
            "not empty": ("at least one token per row", "none"),
            "boxes": (f"coordinates from 0 to {self.end - 1:,}", "other values"),
            "boxes in order": (f"boxes (x0, y0, x1, y1) with x0 ≤ x1, y0 ≤ y1, from 0 to {self.end - 1:,}", "other values"),
            "shares": ("numbers from 0.0 to 1.0 for each class", "other values"),
            "no booleans": ("class numbers", "True or False"),
            "no whole numbers": ("0.0 or 1.0 for each class", "whole numbers"),
        }[self.kind]
        fix = self.fix.replace("train_dataset", name)
        return Refusal(
            "values-out-of-range",
            f"Column {self.column!r} of {name}: expected {words}; got {got} in some rows. {fix}." + hint,
        )


def _has_text(value: Any) -> bool:
    """Return whether a value is a text, or a list or an array of texts."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "USO" and any(isinstance(each, str) for each in value.flat)
    return isinstance(value, str) or (isinstance(value, list | tuple) and any(map(_has_text, value)))


def limits_of_text(columns: Collection[str], *, label_names: Collection[str]) -> Iterator[Limit]:
    """Return the limits of the columns of labels to what is no text; see `text_labels`."""
    for column in dict.fromkeys([*LABELS, *label_names]):
        if column in columns:
            yield Limit(column, "no text", 0, "")


def limits_of(model: nn.Module, columns: Sequence[str], *, has_own_loss: bool) -> Iterator[Limit]:
    """Return the limits of a Transformers model for its columns; nothing is known about other models."""
    base = losses.without_adapters(model)
    if not isinstance(base, PreTrainedModel):
        return
    decoder = base.get_decoder() if base.config.is_encoder_decoder else None
    ids = "Call model.resize_token_embeddings(n) for an n above every id, or tokenize with the model's own tokenizer"
    for column, of in (("input_ids", base), ("decoder_input_ids", decoder)):
        with contextlib.suppress(NotImplementedError):  # models with two parts, such as CLIP, raise it
            # Audio models have no table of tokens, and their method returns something else.
            if column in columns and isinstance(of, PreTrainedModel) and (end := _size(of.get_input_embeddings())):
                yield Limit(column, "numbers", end, ids)
                if of is base:  # it accepts an empty text when padded beside other texts, but not alone
                    without = f"train_dataset.filter(lambda row: len(row[{column!r}]) > 0)"
                    yield Limit(column, "not empty", end, f"Leave them out: {without}")
    in_decoder = set() if decoder is None else set(decoder.modules())
    for module in base.modules():
        tables = {name: child for name, child in module.named_children() if isinstance(child, nn.Embedding)}
        if (types := tables.get("token_type_embeddings")) is not None:
            fix = "Leave it out: train_dataset.remove_columns('token_type_ids')"
            yield Limit("token_type_ids", "numbers", types.num_embeddings, fix)
        if (across := tables.get("x_position_embeddings")) is not None and "y_position_embeddings" in tables:
            yield _limit_of_boxes(module, across.num_embeddings)
        is_of_text = any("tok" in name or "word" in name or name == "wte" for name, _ in module.named_children())
        if is_of_text and vars(module).get("position_embedding_type", "absolute") == "absolute":  # ESM may leave it unused
            for positions in (tables[name] for name in _POSITIONS if name in tables):
                # BART's positions begin at an offset. RoBERTa's begin after the row of the padding, which takes no position.
                longest = positions.num_embeddings - vars(positions).get("offset", 0) - losses.places_of_prompt(model)
                longest -= 0 if positions.padding_idx is None else positions.padding_idx + 1
                fix = f"Tokenize with truncation=True and max_length={longest}"
                for column in ("decoder_input_ids", *LABELS) if module in in_decoder else ("input_ids",):
                    yield Limit(column, "lengths", longest + 1, fix, no_place=positions.padding_idx)
    if not has_own_loss:
        yield from _limits_of_labels(base, ids)


def _limit_of_boxes(embeddings: nn.Module, end: int) -> Limit:
    """Return what embeddings of a page's layout take: LayoutLM and its kin look up coordinates, widths and heights."""
    source = ""
    with contextlib.suppress(OSError, TypeError):
        source = inspect.getsource(type(embeddings))
    is_clipped = "h_position_embeddings(torch.clip(" in source or not hasattr(embeddings, "h_position_embeddings")
    put_right = (
        f"train_dataset.map(lambda row: {{'bbox': [[min(max(each, 0), {end - 1}) for each in (min(a, c), min(b, d), "
        "max(a, c), max(b, d))] for a, b, c, d in row['bbox']]})"
    )
    return Limit(
        "bbox", "boxes" if is_clipped else "boxes in order", end, f"Put the corners in order and cut them: {put_right}"
    )


def _limits_of_labels(base: PreTrainedModel, ids: str) -> Iterator[Limit]:
    task, config = losses.task_of(base), base.config
    end, fix = config.num_labels, "Number the classes from 0, and set num_labels to how many they are"
    if task in losses.WITHOUT_TOKENS:
        return
    if task not in (None, "token_classification"):
        end, fix = _size(base.get_output_embeddings()), ids
    elif task is None:
        fix += ", or for scores and other amounts to 1"
        if config.problem_type == "multi_label_classification":
            for column in LABELS:
                cast = f"train_dataset.cast_column({column!r}, datasets.Sequence(datasets.Value('float32')))"
                yield Limit(column, "no whole numbers", end, f"Make floats of them: {cast}")
                unknown = "Fill in what is unknown, or leave it out in a loss of your own: override compute_per_sample_loss"
                yield Limit(column, "shares", end, unknown)
        if end == 1 or config.problem_type not in (None, "single_label_classification"):
            return
    for column in LABELS if end else ():
        without = f". Remove rows without a class: train_dataset.filter(lambda row: row[{column!r}] >= 0)"
        without = without if task is None else f". Use the label {IGNORED_LABEL} for tokens without a class"
        yield Limit(column, "numbers", end, fix + without, is_ignoring=True)
        lists = f"datasets.Sequence(datasets.Value({'float32' if task is None else 'int64'!r}))"
        cast = f"train_dataset.cast_column({column!r}, datasets.Value('int64')), or with {lists} for lists"
        yield Limit(column, "no booleans", end, f"Make numbers of them: {cast}")


def _size(table: Any) -> int:
    """Return the rows of an embedding, or the classes of a head, maybe in an adapter; Idefics has two parts to add up."""
    parts = table.modules() if isinstance(table, nn.Module) else ()  # Perceiver's table is a parameter
    sizes = [vars(part)[name] for part in parts for name in ("num_embeddings", "out_features") if name in vars(part)]
    return (sum if isinstance(table, nn.Embedding | nn.Linear) else max)(sizes or [0])
