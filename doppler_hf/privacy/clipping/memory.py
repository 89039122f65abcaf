"""What a forward pass remembers of its examples outside of buffers: in attributes, lists and closures of model and loss.

A running mean that moves by a thousandth of each loss shows in no few losses, but one example more moves all later ones; so
does a count of calls, since the examples drawn decide how many calls a draw takes. So what a pass writes is found, and then
changed by much: a loss that reads it changes by much too.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from types import CellType, ModuleType
from typing import Any, Final, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.linalg import same
from doppler_hf.privacy.reachable import is_a, reachable

_Place = tuple[int, Any]
_CONTENTS: Final = "cell_contents"
# By how much a count is changed: beyond what any is compared with, and odd, for whoever takes turns.
_MANY: Final = 1_000_003


@final
class Memory:
    """The numbers that some objects refer to, before a pass.

    Args:
        roots: The objects, such as the loss, the model and the trainer behind them.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        # The numbers themselves: a new one must not lie where an old one lay.
        self._before = {place: (value, version_of(value)) for place, (_, value) in numbers(*roots).items()}

    def is_read(
        self, losses: Callable[[], Float[Tensor, " batch"]], of_others: Callable[[], object], *, tolerance: float
    ) -> bool:
        """Return whether losses depend on what passes since then have written of the content of their examples.

        Args:
            losses: Returns the losses of a batch, the same for the same memory.
            of_others: Makes a pass over other examples of the same shapes.
            tolerance: The difference allowed, relative to the losses.
        """
        if not self._written():
            return False
        losses()
        written = self._written()
        of_others()
        now = numbers(*self._roots)
        # Sensitivity: what other examples of the same shapes leave alone, such as a table of positions, holds none of them.
        of_content = [place for place, value in written.items() if place not in now or not equal(now[place][1], value)]
        if not of_content:
            return False
        first = losses()
        now = numbers(*self._roots)
        changed = [(*now[place], place[1]) for place in of_content if place in now]
        try:
            for owner, value, key in changed:
                put(owner, key, value + _MANY if is_a(value, int) else 2.0 * value + 1.0)
            return not torch.allclose(losses(), first, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)
        finally:
            for owner, value, key in changed:
                put(owner, key, value)

    def _written(self) -> dict[_Place, Any]:
        """Return copies of the numbers that have been replaced, or written in place."""
        found = {}
        for place, (_, value) in numbers(*self._roots).items():
            before, version = self._before.get(place, (None, None))
            is_another = value != before if is_a(value, int) else value is not before
            if is_another or version_of(value) != version:
                found[place] = copy_of(value)
        return found


def numbers(*roots: object) -> dict[_Place, tuple[Any, Any]]:
    """Return the numbers and floating-point tensors that can be replaced, with their owners, by owner and key."""
    found: dict[_Place, tuple[Any, Any]] = {}
    for owner in reachable(*roots):
        for key, value in items_of(owner):
            kind: type = type(value)
            if is_number(kind) and (issubclass(kind, (float, int)) or value.is_floating_point()):
                found[id(owner), key] = owner, value
    return found


@functools.cache
def is_number(kind: type) -> bool:
    """Return whether a class is that of numbers, or of tensors that nothing trains."""
    is_whole = issubclass(kind, int) and not issubclass(kind, (bool, Enum))
    return is_whole or issubclass(kind, float) or (issubclass(kind, Tensor) and not issubclass(kind, nn.Parameter))


def items_of(owner: Any) -> Iterable[tuple[Any, Any]]:
    """Return what an object can have replaced, by key."""
    if is_a(owner, dict):
        return dict.items(owner)  # transformers' own mappings import every model when they are asked
    if is_a(owner, list, deque):
        return enumerate(owner)
    if is_a(owner, CellType):
        return [(_CONTENTS, getattr(owner, _CONTENTS, None))]  # Empty before its first assignment.
    if is_a(owner, ModuleType, type, tuple, str, float, int):  # namespaces are not looked into
        return ()
    try:
        return object.__getattribute__(owner, "__dict__").items()
    except AttributeError:
        return ()


def put(owner: Any, key: Any, value: Any) -> None:
    """Replace what an object has at a key; see `items_of`."""
    if is_a(owner, dict):
        dict.__setitem__(owner, key, value)
    elif is_a(owner, list, deque):
        owner[key] = value
    elif is_a(owner, CellType):
        owner.cell_contents = value
    else:
        object.__getattribute__(owner, "__dict__")[key] = value


def version_of(value: Any) -> int | None:
    """Return how often a tensor was written in place."""
    return value._version if isinstance(value, Tensor) else None


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor, and a number itself."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def equal(first: Any, second: Any) -> bool:
    """Return whether two numbers or tensors are the same."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and same(first, second)
    return type(first) is type(second) and first == second
