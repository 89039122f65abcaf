"""Random numbers that the examples of a micro-batch share, such as LayerDrop's choice of layers or one crop for a batch.

Sensitivity. Where each row has numbers of its own, those of the others are as likely with an example as without it, and a
coupling leaves them unchanged. Numbers that rows share are harmless in a draw that is one micro-batch: they do not depend on
the data, and given them each example's contribution is its own, of norm C at most. But a draw that is cut by what is in it,
into pieces of equal count or within a budget of tokens, has numbers of its own for each piece. One example more moves the
borders, and the examples there then follow the numbers of another piece: each moves the sum by up to 2C.

What is drawn for each row grows with the number of rows, whatever comes out. So it is counted, and nothing is left to luck.
"""

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # the only way to see what a composite operation draws

from doppler_hf.privacy.generators import filled_generators, fresh_seed

# Two primes: what has a multiple of both as its number of elements is for each row, or as long as 143 rows.
ROWS: Final = (11, 13)
# Copies of an example in two batches, even since normal numbers are drawn in pairs.
_FEW, _MANY = 4, 12
# Trials in halves, and at most of the mean, which take that many seconds.
_HALVED, _TRIALS, _SECONDS = 8, 4096, 1.0
MEND = (
    "One example more would move the borders between the micro-batches of a draw, and examples there would follow the "
    "numbers of others, which no noise covers. Set gradient_accumulation_steps=1 and leave out "
    "max_tokens_per_micro_batch, so that a draw is one micro-batch"
)


def draws(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether an operation of torch draws random numbers; attention does if it has a dropout that is not zero."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    return (
        "dropout_p" not in names or dict(zip(names, args, strict=False)).get("dropout_p", options.get("dropout_p", 0.0)) > 0
    )


@final
class TorchDraws(TorchDispatchMode):
    """Notes what torch draws at random during a block.

    Args:
        note: Called with each operation that draws, and the number of its results.
    """

    def __init__(self, note: Callable[[str, int], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation."""
        result = func(*args, **(kwargs or {}))
        if draws(func, args, kwargs or {}):
            self._note(str(func), (result if isinstance(result, Tensor) else result[0]).numel())
        return result


# --- in the forward pass --------------------------------------------------------------------------------------------------


class DrawnInForward(NamedTuple):
    """What a forward pass in training mode draws.

    Attributes:
        shared: Where numbers are drawn that the rows of a batch share, in words.
        is_of_torch: Whether all numbers are torch's.
    """

    shared: list[str]
    is_of_torch: bool


def drawn_in_forward(model: nn.Module, forward: Callable[[int], object]) -> DrawnInForward:
    """Return what a forward pass in training mode draws.

    Args:
        model: The model.
        forward: Computes the losses of that many copies of an example, for each of `ROWS`.
    """
    shared: dict[str, None] = {}
    moved: set[str] = set()
    for number in ROWS:
        drawn, moved_now = _drawn_by(number, model, forward)
        # A loop over rows draws single numbers, together as many for each row.
        found = [place for (place, operation, _), size in drawn.items() if size % number or _mixes(operation, size, number)]
        shared |= dict.fromkeys(f"in {place}" if place else "in the loss" for place in found)
        # Of these two nothing is seen but that they have moved: SpecAugment rounds with one number for all rows.
        shared |= dict.fromkeys(f"from {name}" for name in moved_now)
        moved.update(moved_now)
    return DrawnInForward(list(shared), not moved)


def _drawn_by(
    number: int, model: nn.Module, forward: Callable[[int], object]
) -> tuple[dict[tuple[str, str, int], int], list[str]]:
    drawn: dict[tuple[str, str, int], int] = {}
    inside = [""]

    def note(operation: str, size: int) -> None:
        key = inside[-1], operation, size
        drawn[key] = drawn.get(key, 0) + size

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            place = f"the layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            enter = module.register_forward_pre_hook(lambda *_, place=place: inside.append(place))
            leave = module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(filled_generators(None))
        before = {"NumPy": _numpy_words(), "Python's random": _python_words()}
        with TorchDraws(note):
            forward(number)
        after = {"NumPy": _numpy_words(), "Python's random": _python_words()}
    return drawn, [name for name in before if not _same(before[name], after[name])]


def _mixes(operation: str, size: int, rows: int) -> bool:
    """Return whether an order of the rows is drawn, which belongs to none of them."""
    return operation.startswith("aten.randperm") and size == rows


def refuse_shared_in_forward(places: Sequence[str], probabilities: Sequence[str]) -> None:
    """Refuse numbers that rows share, for a draw that may come in several micro-batches.

    Args:
        places: As `drawn_in_forward` returns them.
        probabilities: Names of the probabilities in the model's config that are not zero and may be at fault.
    """
    if places:
        names = " and ".join(f"{name}=0.0" for name in probabilities) or "these probabilities zero"
        raise ValueError(
            "The model must draw its random numbers for each example where a draw may come in several micro-batches, got "
            f"some that all rows share, drawn {', '.join(places[:3])}. {MEND}, or load the model with {names}."
        )


# --- in a collator --------------------------------------------------------------------------------------------------------


def is_shared_in_collation(make: Callable[[int], object]) -> bool:
    """Return whether a batch is made with random numbers that its rows share.

    A batch whose rows draw one after the other, or alike, takes as many numbers as two halves that are made in turn. Of any
    other whose rows share nothing, the mean number over many trials is in proportion to the number of rows.

    Args:
        make: Makes a batch of that many copies of an example, from the global generators.
    """
    if all(_is_additive(make) for _ in range(_HALVED)):
        return False
    few: list[tuple[int, int, int]] = []
    many: list[tuple[int, int, int]] = []
    until = time.process_time() + _SECONDS
    with filled_generators(None):
        while len(few) < _HALVED or (len(few) < _TRIALS and time.process_time() < until):
            few.append(numbers_drawn(lambda: make(_FEW)))
            many.append(numbers_drawn(lambda: make(_MANY)))
    # What all rows share, of a number that is affine in the number of rows.
    shared = (3 * np.mean(few, axis=0) - np.mean(many, axis=0)) / 2
    error = np.sqrt((9 * np.var(few, axis=0) + np.var(many, axis=0)) / len(few)) / 2
    # Four standard errors: by chance once in ten thousand starts, and only of those that are not additive.
    return bool((np.abs(shared) > 4 * error + 0.25).any())


def refuse_shared_in_collation(make: Callable[[int], object]) -> None:
    """Refuse random numbers that rows share, for a draw that may come in several micro-batches."""
    if is_shared_in_collation(make):
        raise ValueError(
            "data_collator must draw its random numbers for each example where a draw may come in several micro-batches, "
            "got some that all rows share, as in one size of crop or one share of masked tokens for a batch. "
            f"{MEND}, or draw for each row."
        )


def is_order_drawn(make: Callable[[int], object]) -> bool:
    """Return whether a batch is made with a random order of its rows, of torch's.

    Args:
        make: As in `is_shared_in_collation`.
    """
    with filled_generators(None):
        return all(_draws_order(make, number) for number in ROWS)


def _draws_order(make: Callable[[int], object], number: int) -> bool:
    found: list[bool] = []
    with TorchDraws(lambda operation, size: found.append(_mixes(operation, size, number))):
        make(number)
    return any(found)


def refuse_order_in_collation(make: Callable[[int], object]) -> None:
    """Refuse random orders of the rows, by which a share of them may be chosen that is counted over the batch."""
    if is_order_drawn(make):
        raise ValueError(
            "data_collator must draw its random numbers for each example, got a random order of all rows (torch.randperm). "
            "What is chosen by it, such as a fixed share of the rows, would be chosen otherwise with one example more, "
            "which no noise covers. Draw for each row whether it is chosen (torch.rand(rows) < share)."
        )


def _is_additive(make: Callable[[int], object]) -> bool:
    """Return whether a batch takes as many numbers as its halves, which are made in turn from the same numbers."""
    seed, half = fresh_seed(), _FEW // 2
    with filled_generators(seed):
        whole = numbers_drawn(lambda: make(_FEW))
    with filled_generators(seed):
        return numbers_drawn(lambda: (make(half), make(half))) == whole


def numbers_drawn(make: Callable[[], object]) -> tuple[int, int, int]:
    """Return how many random numbers a function takes from torch, and how many words from NumPy and Python.

    A generator that is seeded on the way counts as if nothing were drawn.
    """
    sizes: list[int] = []
    of_numpy, of_python = _numpy_words(), _python_words()
    with TorchDraws(lambda _, size: sizes.append(size)):
        make()
    return sum(sizes), words_between(of_numpy, _numpy_words()), words_between(of_python, _python_words())


Words = tuple[Sequence[int] | np.ndarray, int]


def _numpy_words() -> Words:
    state: Any = np.random.get_state(legacy=False)["state"]
    return state["key"], state["pos"]


def _python_words() -> Words:
    words = random.getstate()[1]
    return words[:-1], words[-1]


def words_between(start: Words, end: Words) -> int:
    """Return how many words a Mersenne twister has given out between two states; 0 if the one does not lead to the other."""
    if _same(start, end):
        return 0
    number, twister = len(start[0]), np.random.MT19937()
    twister.state = _beginning_of(end[0])
    sought = twister.random_raw(number)
    twister.state = _beginning_of(start[0])
    # Nearly always one of the first two blocks of what it gives out.
    for before, blocks in ((0, 2), (2, 254)):
        found = np.flatnonzero((twister.random_raw(blocks * number).reshape(blocks, number) == sought).all(axis=1))
        if len(found):
            return number * (before + int(found[0])) + end[1] - start[1]
    return 0


def _beginning_of(words: Sequence[int] | np.ndarray) -> Any:
    """Return the state of a Mersenne twister that has given out none of a block of words."""
    return {"bit_generator": "MT19937", "state": {"key": np.asarray(words, np.uint32), "pos": 0}}


def _same(first: Words, second: Words) -> bool:
    return first[1] == second[1] and (first[0] is second[0] or bool(np.all(first[0] == second[0])))
