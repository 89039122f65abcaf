"""Labels that are texts: what is wrong with them, and how numbers are made of them."""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from doppler_hf.errors import Refusal
from doppler_hf.preflight.limits import Limit
from doppler_hf.privacy.batching.collators import tried
from doppler_hf.privacy.batching.columns import LABELS, is_stored, is_table
from doppler_hf.privacy.losses import WITHOUT_TOKENS, task_of, without_adapters

_MANY: Final = 100_000  # so many rows are read to see if texts are written numbers
_GAPS: Final = ("", "nan")  # what is written for a missing number
_PLAIN: Final = {"int": r"-?\d+", "float": r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"}


def refuse_text_as_label(
    model: nn.Module,
    examples: Any,
    example: Any,
    *,
    limit: Limit,
    collate: Callable[[list[Any]], Any],
    has_own_loss: bool,
    name: str,
) -> None:
    """Refuse a label that is a text, unless the collator makes a number of it.

    A loss of the user's own, and a model that is not Transformers', may leave labels out. For these it is refused only if
    the collator fails because of the text.

    Args:
        model: The model.
        examples: The data set.
        example: A row in which the label is a text.
        limit: The limit that the label exceeds.
        collate: The collator, of a list of rows.
        has_own_loss: Whether code of the user's own computes the loss.
        name: The name of the data set's argument.
    """
    base = without_adapters(model)
    is_known = isinstance(base, PreTrainedModel) and not has_own_loss and task_of(base) not in WITHOUT_TOKENS
    value = example.get(limit.column) if isinstance(example, Mapping) else None
    try:
        collated = tried(collate, [example])
    except Exception as error:
        if is_known or _takes_numbers(example, limit.column, collate):
            raise _refusal(base, examples, value, column=limit.column, name=name) from error
        raise
    # Transformers' default collator leaves out columns of text.
    is_left_out = isinstance(collated, Mapping) and {*LABELS}.isdisjoint(collated)
    if is_known and limit.column in LABELS and (is_left_out or limit.is_exceeded_in(collated)):
        raise _refusal(base, examples, value, column=limit.column, name=name)


def _takes_numbers(example: Any, column: str, collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether a row can be collated with numbers in place of its text."""
    with contextlib.suppress(Exception):
        value = example[column]
        tried(collate, [{**example, column: [0] * len(value) if isinstance(value, list | tuple) else 0}])
        return True
    return False


def _refusal(base: Any, examples: Any, value: Any, *, column: str, name: str) -> Refusal:
    # The message shows no label, since messages end up in logs.
    return Refusal(
        "values-out-of-range",
        f"Column {column!r} of {name}: expected numbers; got text in some rows. Convert the texts to numbers: "
        f"{_mend(base, examples, value, column=column, name=name)}.",
    )


class _Numbers(NamedTuple):
    """Texts that are written numbers.

    Attributes:
        kind: "int" or "float".
        are_plain: Whether `datasets` can cast them to this kind, which takes neither "3.0" for an int nor " 3".
        have_gaps: Whether some rows have an empty text or "nan" in place of a number.
    """

    kind: str
    are_plain: bool
    have_gaps: bool


def _numbers(base: Any, examples: Any, value: Any, *, column: str) -> _Numbers | None:
    """Return how numbers are written in a column of texts; None if the texts are none, and need numbers of their own."""
    texts = [value]
    if is_stored(examples):
        texts = examples[:_MANY][column]
    elif isinstance(examples, list):
        texts = [row.get(column) for row in examples[:_MANY] if isinstance(row, Mapping)]
    if not all(text is None or isinstance(text, str) for text in texts):
        return None
    known = [text for text in texts if str(text or "").strip().lower() not in _GAPS]
    try:
        numbers = [float(text) for text in known]
    except ValueError:
        return None
    is_regression = getattr(getattr(base, "config", None), "num_labels", None) == 1
    if not all(map(math.isfinite, numbers)) or not (numbers or is_regression):
        return None
    kind = "float" if is_regression or not all(number.is_integer() for number in numbers) else "int"
    are_plain = all(re.fullmatch(_PLAIN[kind], text) for text in known)
    return _Numbers(kind, are_plain, have_gaps=len(known) < len(texts))


def _mend(base: Any, examples: Any, value: Any, *, column: str, name: str) -> str:
    """Return the line that makes numbers of labels."""
    known = getattr(getattr(base, "config", None), "label2id", None) or {}
    has_names = any(label != f"LABEL_{number}" for label, number in known.items())
    number = "model.config.label2id[{}]" if has_names else "names.index({})"
    where = "" if has_names else ", where names is the list of your classes"
    numbers = _numbers(base, examples, value, column=column)
    has_gaps = numbers is not None and numbers.have_gaps
    if numbers is not None:
        number = "{}({{}})" if numbers.are_plain else "{}(float({{}}))"
        number, where = "float({})" if numbers.kind == "float" else number.format("int"), ""
    is_list, is_of_tokens = (
        isinstance(value, list | tuple),
        task_of(base) is not None if isinstance(base, nn.Module) else False,
    )
    if is_list and not is_of_tokens:
        classes = "model.config.label2id" if has_names else "names"
        of_row = f"[float(each in row[{column!r}]) for each in {classes}]"
        where += ", and set problem_type='multi_label_classification' when you load the model"
    elif is_list:
        of_row = f"[{number.format('each')} for each in row[{column!r}]]"
    else:
        of_row = number.format(f"row[{column!r}]")
    has_number = f"str(row[{column!r}] or '').strip().lower() not in {_GAPS}"
    if is_stored(examples) and numbers is not None:
        filled = f"{name}.filter(lambda row: {has_number})" if has_gaps else name
        if not numbers.are_plain:
            return f"{filled}.map(lambda row: {{{column!r}: {of_row}}})"
        of_column = "int64" if numbers.kind == "int" else "float32"
        return f"{filled}.cast_column({column!r}, Value({of_column!r})), with Value from datasets"
    if is_stored(examples) and not is_list and not has_names:
        return (
            f"{name}.class_encode_column({column!r}). Do that before the data are split, because each split is numbered by "
            "itself"
        )
    if is_stored(examples):
        return f"{name}.map(lambda row: {{{column!r}: {of_row}}}){where}"
    left_out = ". Leave out the rows without a number" if has_gaps else ""
    if is_table(examples):
        return f"return {of_row} from its transform{where}, or change the column before with_transform{left_out}"
    if isinstance(examples, list):
        chosen = f" if {has_number}" if has_gaps else ""
        return f"{name} = [row | {{{column!r}: {of_row}}} for row in {name}{chosen}]{where}"
    return f"return row | {{{column!r}: {of_row}}} from its __getitem__{where}{left_out}"
