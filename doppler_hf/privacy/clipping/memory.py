"""What a forward pass remembers of its examples outside of buffers: wherever Python code of model and loss can keep it.

In attributes of objects and classes, containers, closures and global variables, as numbers, tensors or arrays.

A running mean that moves by a thousandth of each loss shows in no few losses, but one example more moves all later ones; so
does a count of calls, since the examples drawn decide how many calls a draw takes. So what a pass writes is found, and then
changed by much: a loss that reads it changes by much too.
"""

import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from types import CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.linalg import same
from doppler_hf.privacy.reachable import globals_of, is_a, is_ours, own_classes, reachable

# The number of an owner, and the key there.
Place = tuple[int, Any]
_CONTENTS: Final = "cell_contents"
# Of a class that is made by Python code: others take no attributes.
_CAN_BE_WRITTEN: Final = 1 << 9
# By how much a count is changed: beyond what any is compared with, and odd, for whoever takes turns.
_MANY: Final = 1_000_003
# What a number is changed into. Of one that is a threshold, far beyond whatever is compared with it, on both sides.
_OTHERS: Final[tuple[Callable[[Any], Any], ...]] = (
    lambda value: 2 * value + 1,
    lambda value: (value + 1) * _MANY,
    lambda value: value / _MANY,
    lambda value: -value - 1,
)
_OTHER_COUNTS: Final[tuple[Callable[[Any], Any], ...]] = (
    lambda value: value + _MANY,
    lambda value: value - _MANY,
    lambda value: 2 * value + 1,
    lambda value: value * _MANY,
)
_NUMBERS: Final = (float, complex, np.number, np.ndarray)
# A longer array holds data.
_MOST_IN_AN_ARRAY: Final = 100_000


class _InTuple(NamedTuple):
    """Where a number is in a tuple, which is replaced as a whole."""

    key: Any
    number: int


@final
class Memory:
    """The numbers that some objects refer to, before a pass.

    Args:
        roots: The objects, such as the loss, the model and the trainer behind them.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        # The numbers themselves: a new one must not lie where an old one lay.
        self._before = {place: (value, mark_of(value)) for place, value in self._now().items()}

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
        return is_read_at(of_content, self._roots, losses, tolerance=tolerance)

    def _now(self) -> dict[Place, Any]:
        # Not truth values: what is noted for later may change at any pass, and what the first one notes is looked at apart.
        return {place: value for place, (_, value) in numbers(*self._roots).items() if not is_truth(value)}

    def _written(self) -> dict[Place, Any]:
        """Return copies of the numbers that have been replaced, or written in place."""
        found = {}
        for place, value in self._now().items():
            before, mark = self._before.get(place, (None, None))
            is_another = value != before if is_a(value, int) else value is not before
            if is_another or mark_of(value) != mark:
                found[place] = copy_of(value)
        return found


def is_read_at(
    places: Collection[Place],
    roots: Sequence[object],
    losses: Callable[[], Float[Tensor, " batch"]],
    *,
    tolerance: float,
) -> bool:
    """Return whether losses change with the numbers at some places, each of which is changed by much.

    Args:
        places: The places.
        roots: The objects among which they are.
        losses: As in `Memory.is_read`.
        tolerance: As in `Memory.is_read`.
    """
    first = losses()
    now = numbers(*roots)
    changed = [(*now[place], place[1]) for place in places if place in now]
    try:
        for number in range(len(_OTHERS)):
            for owner, value, key in changed:
                put(owner, key, other_than(value, number))
            if not torch.allclose(losses(), first, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True):
                return True
        return False
    finally:
        for owner, value, key in changed:
            put(owner, key, value)


def numbers(*roots: object) -> dict[Place, tuple[Any, Any]]:
    """Return the numbers, tensors and arrays of numbers that can be replaced, with their owners, by owner and key."""
    found: dict[Place, tuple[Any, Any]] = {}
    for number, (owner, items) in contents(*roots).items():
        for key, value in items.items():
            found |= {(number, place): (owner, each) for place, each in numbers_in(key, value)}
    return found


def numbers_in(key: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a value if it is a number, or an array or tensor of numbers, and those in a tuple, each with its key."""
    if is_kept(value):
        yield key, value
    elif is_a(value, tuple):
        yield from ((_InTuple(key, index), each) for index, each in enumerate(tuple.__iter__(value)) if is_kept(each))


def contents(*roots: object) -> dict[int, tuple[Any, dict[Any, Any]]]:
    """Return what some objects refer to that can be replaced: by the number of each owner the owner, and values by key."""
    found: dict[int, tuple[Any, dict[Any, Any]]] = {}
    classes: set[type] = set()
    # What a pass writes into parameters of the model is looked at elsewhere; in shards they are written with each use.
    modules = (module for root in roots if isinstance(root, nn.Module) for module in root.modules())
    of_model = {id(module._parameters) for module in modules}

    def add(owner: Any, items: Iterable[tuple[Any, Any]]) -> None:
        found.setdefault(id(owner), (owner, {}))[1].update(items)

    for owner in reachable(*roots):
        kind: type = owner if is_a(owner, type) else type(owner)
        if id(owner) in of_model or is_ours(kind):
            continue
        add(owner, items_of(owner))
        if is_a(owner, FunctionType):
            add(owner.__globals__, globals_of(owner).items())
        if kind not in classes:
            classes.add(kind)
            for base in own_classes(kind):
                if base.__flags__ & _CAN_BE_WRITTEN:
                    add(base, vars(base).items())
    return found


def is_kept(value: Any) -> bool:
    """Return whether a value is a number or an array or tensor of numbers, which may be of what was seen."""
    kind: type = type(value)
    return is_number(kind) and not is_data(value)


@functools.cache
def is_number(kind: type) -> bool:
    """Return whether a class is that of numbers or truth values, or of tensors or arrays of them."""
    is_whole = issubclass(kind, int) and not issubclass(kind, Enum)
    return is_whole or issubclass(kind, (*_NUMBERS, Tensor))


def is_data(value: Any) -> bool:
    """Return whether an array is too long for a number that is kept, or has none, or a tensor has none."""
    if isinstance(value, np.ndarray):
        return value.size > _MOST_IN_AN_ARRAY or value.dtype.kind not in "iufcb"
    return False


def is_truth(value: Any) -> bool:
    """Return whether a value is of truth values."""
    if isinstance(value, Tensor):
        return value.dtype is torch.bool
    return value.dtype.kind == "b" if isinstance(value, (np.ndarray, np.generic)) else is_a(value, bool)


def items_of(owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an object can have replaced, by key."""
    if is_a(owner, dict):
        yield from dict.items(owner)  # transformers' own mappings import every model when they are asked
    elif is_a(owner, list, deque):
        yield from enumerate(owner)
    elif is_a(owner, CellType):
        yield _CONTENTS, getattr(owner, _CONTENTS, None)  # Empty before its first assignment.
    elif not is_a(owner, ModuleType, type, tuple, str, float, int):  # namespaces are not looked into
        with contextlib.suppress(AttributeError):
            yield from object.__getattribute__(owner, "__dict__").items()
        kind: type = type(owner)
        for name in slots_of(kind):
            with contextlib.suppress(AttributeError):  # nothing there yet
                yield name, object.__getattribute__(owner, name)


@functools.cache
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of what the user's classes keep in slots."""
    return tuple(
        name for base in own_classes(kind) for name, value in vars(base).items() if is_a(value, MemberDescriptorType)
    )


def put(owner: Any, key: Any, value: Any) -> None:
    """Replace what an object has at a key; see `items_of`."""
    kind: type = type(owner)
    if isinstance(key, _InTuple):
        before = get(owner, key.key)
        parts = [value if number == key.number else each for number, each in enumerate(before)]
        put(owner, key.key, type(before)._make(parts) if hasattr(type(before), "_make") else tuple(parts))
    elif is_a(owner, OrderedDict):  # which has an order of its own
        OrderedDict.__setitem__(owner, key, value)
    elif is_a(owner, dict):
        dict.__setitem__(owner, key, value)
    elif is_a(owner, list, deque):
        owner[key] = value
    elif is_a(owner, CellType):
        owner.cell_contents = value
    elif is_a(owner, type):
        type.__setattr__(owner, key, value)
    elif key in slots_of(kind):
        object.__setattr__(owner, key, value)
    else:
        object.__getattribute__(owner, "__dict__")[key] = value


def remove(owner: Any, key: Any) -> None:
    """Remove what an object has at a key, if it has not gone with the dictionary of its attributes; see `items_of`."""
    kind: type = type(owner)
    if is_a(owner, OrderedDict):
        OrderedDict.pop(owner, key, None)
    elif is_a(owner, dict):
        dict.pop(owner, key, None)
    elif is_a(owner, type):
        type.__delattr__(owner, key)
    elif key in slots_of(kind):
        object.__delattr__(owner, key)
    elif not is_a(owner, CellType):
        object.__getattribute__(owner, "__dict__").pop(key, None)


def get(owner: Any, key: Any) -> Any:
    """Return what an object has at a key."""
    return vars(owner)[key] if is_a(owner, type) else dict(items_of(owner))[key]


def other_than(value: Any, number: int) -> Any:
    """Return a number, or numbers, far from some, in one of several ways."""
    if is_truth(value):
        return not value if is_a(value, bool, np.bool_) else ~value
    change = (_OTHER_COUNTS if is_count(value) else _OTHERS)[number]
    if is_a(value, np.integer) or (is_count(value) and isinstance(value, np.ndarray)):
        return change(value.astype(np.int64)).astype(value.dtype)  # which wraps around where it must
    with np.errstate(all="ignore"):
        return change(value)


def is_count(value: Any) -> bool:
    """Return whether a value is of whole numbers."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return value.dtype.kind in "iu" if isinstance(value, np.ndarray) else is_a(value, int, np.integer)


def mark_of(value: Any) -> Any:
    """Return what tells whether a tensor or an array was written in place."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor or an array, and a number itself."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if isinstance(value, Tensor) else value


def equal(first: Any, second: Any) -> bool:
    """Return whether two numbers, tensors or arrays are the same."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and same(first, second)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return type(first) is type(second) and bool(first == second)
