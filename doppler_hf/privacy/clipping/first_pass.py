"""What the first forward pass keeps for all later ones, outside of buffers: an initialization by the first batch.

A second pass leaves it alone, so that a change shows in the first one only. There are two first passes here, over different
examples of the same shapes, after each of which everything is put back.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.clipping.memory import (
    Place,
    contents,
    copy_of,
    equal,
    is_read_at,
    items_of,
    mark_of,
    numbers_in,
    put,
    remove,
)
from doppler_hf.privacy.reachable import is_a, reachable

# A larger tensor holds data.
_MOST: Final = 100_000


@contextlib.contextmanager
def first_pass_put_back(*roots: object) -> Iterator["FirstPass"]:
    """Put back after the block what the first pass in it has written into what some objects refer to.

    Sensitivity: the examples of a check would otherwise speak in every later step, drawn or not.
    """
    first_pass = FirstPass(*roots)
    try:
        yield first_pass
    finally:
        first_pass.put_back()


@final
class FirstPass:
    """What some objects refer to, before the first pass.

    Args:
        roots: The objects, such as the loss, the model and the trainer behind them.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self._before = contents(*roots)
        self._numbers = {
            (number, key): (mark_of(value), copy_of(value))
            for number, (_, items) in self._before.items()
            for key, value in items.items()
            if is_a(value, Tensor, np.ndarray) and _size_of(value) <= _MOST
        }
        # Of what a dictionary holds a set beside it may tell, so that both are put back.
        self._sets = [(each, {*each}) for each in reachable(*roots) if is_a(each, set) and len(each) <= _MOST]
        self._touched: set[int] = set()

    def is_read(
        self, losses: Callable[[], Float[Tensor, " batch"]], of_others: Callable[[], object], *, tolerance: float
    ) -> bool:
        """Return whether losses depend on what a first pass has written of the content of its examples.

        Args:
            losses: Returns the losses of a batch, the same for the same memory.
            of_others: Makes a pass over other examples of the same shapes.
            tolerance: The difference allowed, relative to the losses.
        """
        losses()
        written = self.written()
        self.put_back()
        if not written:
            return False
        of_others()
        of_other = self.written()
        self.put_back()
        # What a pass has made is another object each time.
        of_new = [(key, value) for (owner, key), value in of_other.items() if owner not in self._before]

        def is_of_content(place: Place, value: Any) -> bool:
            # Sensitivity: what is the same of other examples, such as a table of positions, holds none of them.
            if place[0] in self._before:
                return place not in of_other or not equal(of_other[place], value)
            return not any(key == place[1] and equal(other, value) for key, other in of_new)

        if not any(is_of_content(place, value) for place, value in written.items()):
            return False
        losses()
        places = [place for place, value in self.written().items() if is_of_content(place, value)]
        try:
            return is_read_at(places, self._roots, losses, tolerance=tolerance)
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Put back what the objects had into which some first pass has written."""
        for owner, content in self._sets:
            if id(owner) in self._touched:
                owner.clear()
                owner.update(content)
        now = contents(*self._roots) if self._touched else {}
        for number in self._touched & self._before.keys():
            owner, before = self._before[number]
            if is_a(owner, list, deque):
                owner.clear()
                owner.extend(before.values())
            else:
                items = now[number][1] if number in now else dict(items_of(owner))
                for key in items.keys() - before.keys():
                    remove(owner, key)
                for key, value in before.items():
                    if key not in items or not _is_same(items[key], value):
                        # What Python code cannot write no pass of it has written.
                        with contextlib.suppress(AttributeError, TypeError):
                            put(owner, key, value)
            for key, value in before.items():
                if not self._is_as_before(number, key, value):
                    _write(value, self._numbers[number, key][1])

    def _is_as_before(self, number: int, key: Any, value: Any) -> bool:
        before = self._before[number][1] if number in self._before else {}
        if key not in before or not _is_same(before[key], value):
            return False
        return (number, key) not in self._numbers or self._numbers[number, key][0] == mark_of(value)

    def written(self) -> dict[Place, Any]:
        """Note into which objects a pass has written, to put them back, and return copies of the numbers among that."""
        found: dict[Place, Any] = {}
        self._touched |= {id(owner) for owner, content in self._sets if owner != content}
        for number, (_, items) in contents(*self._roots).items():
            is_known = number in self._before
            before = self._before[number][1] if is_known else {}
            changed = [key for key, value in items.items() if not self._is_as_before(number, key, value)]
            if is_known and (changed or len(items) < len(before)):
                self._touched.add(number)
            for key in changed:
                found |= {(number, place): copy_of(each) for place, each in numbers_in(key, items[key])}
        return found


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two values are one object, or equal numbers or words, which may be made anew when asked for."""
    return first is second or (type(first) is type(second) and is_a(first, int, float, str) and bool(first == second))


def _size_of(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else value.size


def _write(value: Any, content: Any) -> None:
    """Write numbers into a tensor or an array."""
    if isinstance(value, Tensor):
        # Into a view whose elements are one number none can be written; what it is a view of is put back itself.
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            value.copy_(content)
    else:
        value[...] = content
