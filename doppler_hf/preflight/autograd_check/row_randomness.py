"""Give each example its own random numbers, the same in every batch, to compare losses that draw random numbers.

A loss with dropout of its own gives a different value at each call. Seeding the generators equally for each call does not
help if batches differ in size or order, since rows then get each other's numbers. So within a block, torch's operations that
draw random numbers are repeated for each row, with the generators seeded by the row's example. The loss of an example is
then a fixed number that other examples may not change: a loss of a random half of the batch, or weights that depend on its
size, can no longer be mistaken for randomness.

A dimension counts as that of the rows if it is as long as the batch, or if it is the first one and a multiple of it. So
batches should have sizes that occur nowhere else in model and data. All other draws, such as one number for the whole batch
or numbers in a loop over rows, are the same at each call of one shape.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from doppler_hf.privacy.randomness import filled_generators, states_of_generators

# After so many draws of one shape, the numbers change, since a loop may draw until a number is small enough.
_MOST_ALIKE: Final = 1 << 14
_PRIMES: Final = tuple(n for n in range(5, 257) if all(n % divisor for divisor in range(2, n)))


def unusual_size(most: int, *, usual: Collection[int], is_least: bool = False) -> int | None:
    """Return the largest (or least) batch size up to `most` that divides no usual length, or None if there is none."""
    sizes = [size for size in _PRIMES if size <= most and all(length % size for length in usual if length)]
    return (min if is_least else max)(sizes) if sizes else None


@contextlib.contextmanager
def row_randomness(examples: Sequence[Any], *, seed: int = 0, seen: set[Any] | None = None) -> Iterator[None]:
    """Give each row of a batch random numbers that depend only on its example and the seed, for the duration of the block.

    Args:
        examples: The example of each row.
        seed: Other seeds give other numbers.
        seen: Which draws of larger batches were for rows. In a batch of a single row, every dimension could be that of the
            rows, so there it is the one that was seen before.
    """
    with filled_generators(seed), _OfRows(examples, seed=seed, seen=set() if seen is None else seen):
        yield


def shapes_drawn(call: Callable[[], object]) -> set[Any]:
    """Return the shapes of the numbers that a call draws from torch's generators, each with its operation."""
    drawn = _Drawn()
    with filled_generators(0), torch.no_grad(), drawn:
        call()
    return drawn.shapes


def uses_other_generators(calls: Sequence[Any]) -> bool:
    """Return whether calls, such as with batches of different sizes, draw different amounts from NumPy or Python."""
    states = []
    for call in calls:
        with filled_generators(0), torch.no_grad():
            call()
            after = states_of_generators()
            states.append((after["NumPy"], after["Python"]))
    return any(state != states[0] for state in states)


class _Drawn(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = states_of_generators()
        found = func(*args, **(kwargs or {}))
        if states_of_generators() != before:  # dropout with a probability of 0 draws nothing
            self.shapes.add((str(func), _shape(args)))
        return found


class _OfRows(TorchDispatchMode):
    def __init__(self, examples: Sequence[Any], *, seed: int, seen: set[Any]) -> None:
        super().__init__()
        self._examples, self._first, self._seen, self._drawn = examples, seed, seen, Counter[Any]()
        module = torch.get_device_module() if torch.accelerator.is_available() else None
        self._seed_device = None if module is None else getattr(module, "manual_seed_all", module.manual_seed)

    def _seed(self, *content: Any) -> None:
        """Seed torch's generators by this content."""
        seed = int.from_bytes(hashlib.blake2b(repr((self._first, *content)).encode(), digest_size=7).digest(), "little")
        # For each kind of device that is absent, torch.manual_seed of 2.13 formats the stack of calls. In a training it then
        # takes a thousand times as long as this.
        torch.default_generator.manual_seed(seed)
        if self._seed_device is not None:
            self._seed_device(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        size, shape = len(self._examples), _shape(args)
        places = [(str(func), *_of_one_row(shape, size, each)) for each in (*_dimensions_of_rows(shape, size), None)]
        place = next((each for each in places if each in self._seen), places[0]) if size == 1 else places[0]
        self._seen.add(place)
        _, shape, dimension = place
        self._drawn[place] += 1
        number = self._drawn[place] if dimension is not None else self._drawn[place] // _MOST_ALIKE
        self._seed(place, number)
        whole = func(*args, **kwargs)
        if dimension is not None:
            for row, example in enumerate(self._examples):
                self._seed(place, number, example)
                rows = slice(row * shape[dimension], (row + 1) * shape[dimension])
                with contextlib.suppress(RuntimeError):  # some operations, such as a permutation, cannot draw a single row
                    _draw_rows(func, args, kwargs, whole, dimension=dimension, rows=rows)
        return whole


def _dimensions_of_rows(shape: Sequence[int], size: int) -> list[int]:
    """Return the dimensions that could be that of a batch's rows, the likeliest first."""
    first = [0] if shape and shape[0] and shape[0] % size == 0 else []
    return [*first, *(place for place, length in enumerate(shape) if length == size and place not in first)]


def _of_one_row(shape: tuple[int, ...], size: int, dimension: int | None) -> tuple[tuple[int, ...], int | None]:
    """Return the shape of the numbers for one row, which is the same in batches of all sizes, and the dimension of rows."""
    if dimension is None:
        return shape, None
    return (*shape[:dimension], shape[dimension] // size, *shape[dimension + 1 :]), dimension


def _draw_rows(func: Any, args: Any, kwargs: Any, whole: Any, *, dimension: int, rows: slice) -> None:
    """Overwrite some rows of the drawn numbers by calling the operation for these rows only."""
    outputs = [value for value in (whole if isinstance(whole, list | tuple) else [whole]) if isinstance(value, Tensor)]
    length = outputs[0].shape[dimension]

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > dimension and value.shape[dimension] == length:
            return value.narrow(dimension, rows.start, rows.stop - rows.start)
        if isinstance(value, list | tuple) and [*value] == [*outputs[0].shape]:
            return [rows.stop - rows.start if place == dimension else size for place, size in enumerate(value)]
        return value

    drawn = func(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
    if any(output is value for output in outputs for value in args):  # it was drawn in place
        return
    for output, value in zip(outputs, drawn if isinstance(drawn, list | tuple) else [drawn], strict=False):
        if output.ndim > dimension and output.shape[dimension] == length:
            there = output.narrow(dimension, rows.start, rows.stop - rows.start)
            if there.shape == value.shape:
                there.copy_(value)


def _shape(args: Any) -> tuple[int, ...]:
    """Return the shape of the numbers that an operation draws: the shape of its tensors, or the sizes in its arguments."""
    for value in args:
        if isinstance(value, Tensor):
            return tuple(value.shape)
        if isinstance(value, list | tuple) and all(isinstance(size, int) for size in value):
            return tuple(value)
    return ()
