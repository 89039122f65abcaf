"""What of a batch has a row for each example.

Another size may equal the number of examples by chance: where that matters, batches of several numbers are looked at.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def has_rows(value: Any, number: int | None) -> bool:
    """Return whether a value is a tensor of that many rows."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == number


def some_rows(inputs: Mapping[str, Any], rows: slice | list[int], *, number: int) -> dict[str, Any]:
    """Return a batch of some rows of a batch of that many examples; what has no rows is the same."""
    return {name: value[rows] if has_rows(value, number) else value for name, value in inputs.items()}
