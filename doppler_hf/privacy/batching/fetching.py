"""Examples and batches as a loader makes them, each from generators that were filled for it alone."""

from collections.abc import Callable, Sequence
from typing import Any, final

Collator = Callable[[Sequence[Any]], dict[str, Any]]


def fetch(examples: Any, indices: Sequence[int], *, fill: Callable[[], None]) -> list[Any]:
    """Return some examples as torch's loaders fetch them: together, if the data set has a method for that.

    Args:
        examples: The data set.
        indices: Which of them.
        fill: Fills the global generators; called before each example, or once for those that are fetched together.
    """
    if getattr(examples, "__getitems__", None) is not None:
        fill()
        return list(examples.__getitems__(list(indices)))
    found = []
    for index in indices:
        fill()
        found.append(examples[index])
    return found


@final
class FilledCollator:
    """A collator before each of whose batches the generators are filled.

    Args:
        collator: The collator.
        fill: Fills the global generators.
    """

    def __init__(self, collator: Collator, fill: Callable[[], None]) -> None:
        self._collator, self._fill = collator, fill

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return a batch of the examples."""
        self._fill()
        return self._collator(examples)
