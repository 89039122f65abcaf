"""Finds random numbers that do not come from the secret global generators, and that an attacker may therefore know.

A layer, loss or collator that has a generator of its own, or that seeds a global one, takes numbers that anybody can repeat
who knows the seed. They follow the order of the rows: one record more shifts those of all records behind it, and the sum
moves by more than C. With secret numbers the others' masks are as likely with the record as without it.

What an object holds is found by looking into it. What is hidden, such as a generator in a global variable or a call of
`manual_seed`, shows when the same pass is made three times: twice after the same filling of the global generators, and in
between after another one.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from doppler_hf.errors import Refusal
from doppler_hf.linalg import same
from doppler_hf.privacy.batching.collators import copied
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.privacy.randomness import filled_generators, states_of_generators

_GENERATORS: Final = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)
LEAVES: Final = (str, bytes, int, float, complex, type(None), type, ModuleType, np.ndarray, Tensor, torch.dtype)
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)
# How deep a search goes: from a layer to an object that it holds, to a list in it, and so on.
_DEEPEST: Final = 5
_MOST_OBJECTS: Final = 200_000
# The relative change of a loss that is allowed when the same pass is repeated.
_SAME_ON_CPU: Final = 1e-6
_SAME_ON_ACCELERATOR: Final = 1e-4  # On an accelerator, sums have no fixed order.
_FIRST: Final = 100  # Only so many items of a list or dictionary are searched, since it may hold records.


def held_generators(*owners: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield an owner, where it holds a generator of its own as a path of names, and the generator.

    Attributes, lists, dictionaries, partial functions and closures are searched. What one owner holds is not searched again
    for another, and other owners are not searched within one.
    """
    seen = {*map(id, owners)}
    for owner in owners:
        ahead = deque([("", owner, 0)])
        while ahead and len(seen) < _MOST_OBJECTS:
            path, value, depth = ahead.popleft()
            if isinstance(value, _GENERATORS):
                if is_own_generator(value):
                    yield owner, path, value
            elif depth < _DEEPEST:
                for name, each in _parts(value):
                    # Most attributes of a layer are numbers, tensors and empty dictionaries of hooks, which are skipped.
                    if isinstance(each, LEAVES) or id(each) in seen or (isinstance(each, _CONTAINERS) and not each):
                        continue
                    seen.add(id(each))
                    ahead.append((path + name, each, depth + 1))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{name!r}]", each) for name, each in islice(value.items(), _FIRST))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{place}]", each) for place, each in enumerate(islice(value, _FIRST)))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("", each) for each in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:  # The attribute has no value yet.
                continue
        yield from (("", each) for each in value.__defaults__ or ())
    for name, each in getattr(value, "__dict__", {}).items():
        yield f".{name}", each


def is_own_generator(value: Any) -> bool:
    """Return whether an object is a random generator, other than the global ones and that of the operating system."""
    if not isinstance(value, _GENERATORS):
        return False
    shared = [torch.default_generator, random._inst, np.random.mtrand._rand, np.random.get_bit_generator()]  # type: ignore[attr-defined]
    shared += torch.cuda.default_generators
    return not isinstance(value, random.SystemRandom) and not any(value is each for each in shared)


def refuse_generators_of_layers(model: nn.Module) -> None:
    """Refuse a model with a layer that holds a random generator."""
    names = {module: name for name, module in model.named_modules()}
    for module, path, generator in held_generators(*names):
        # Sensitivity: the numbers of such a generator depend on the order of the rows in the batch.
        where = f" in its attribute {path.removeprefix('.')}" if path else ""
        raise Refusal(
            "generator-of-its-own",
            f"The layer {names[module]!r} ({type(module).__name__}) has its own random generator, a "
            f"{type(generator).__name__}{where}. "
            "An attacker may know its random numbers, and adding one record would change the random numbers that all other "
            "records get. Let the layer use the global generators, which the trainer seeds secretly: leave out a seed such "
            "as generator_seed, or set the attribute that holds the generator to None.",
        )


def refuse_known_numbers(compute: Callable[[], Any], what: str, *, is_same: Callable[[Any, Any], bool]) -> Any:
    """Refuse a computation that seeds a global generator or uses another generator, and return its result.

    It is made three times. `is_same` compares what it returned the first and the last time, after the same filling.
    """
    found, states = [], []
    for seed in (0, 1, 0):
        with filled_generators(seed):
            found.append(compute())
            states.append(states_of_generators())
    seeded = [name for name, state in states[0].items() if state == states[1][name]]
    if seeded:
        # Sensitivity: after seeding, the numbers of a row are known, and depend on its place in the batch.
        raise Refusal(
            "public-seed",
            f"{what} seeds the global generator of {' and '.join(seeded)}, so it draws the same random numbers every time. "
            "An attacker may know them, and adding one record would change the random numbers that all other records get. "
            "Remove the call of manual_seed, random.seed, np.random.seed or set_seed; the trainer seeds these generators "
            "secretly.",
        )
    if not is_same(found[0], found[2]):
        raise Refusal(
            "not-repeatable",
            f"{what} gave two results for the same batch and the same random state. Either it has its own random generator, "
            "or it remembers earlier batches. Draw from the global generators of torch, NumPy and Python, which the trainer "
            "seeds secretly, and keep nothing between batches.",
        )
    return found[0]


def refuse_known_numbers_in_passes(
    model: nn.Module, losses_of: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, Any]
) -> None:
    """Refuse a model or loss that seeds a generator or has its own, tested in passes as in training, with dropout."""

    def computed() -> Any:
        losses = losses_of(dict(inputs))
        return losses.detach() if isinstance(losses, Tensor) else None

    def is_same(first: Any, second: Any) -> bool:
        if first is None or second is None or first.shape != second.shape:
            return True  # Other checks refuse losses without a value or of changing shape.
        # With the same numbers in the same shapes, a CPU adds them in the same order.
        is_on_cpu = first.device.type == "cpu"
        return torch.allclose(
            first, second, rtol=_SAME_ON_CPU if is_on_cpu else _SAME_ON_ACCELERATOR, atol=0.0, equal_nan=True
        )

    with modes_kept(model), torch.no_grad():
        model.train()
        refuse_known_numbers(computed, "The model or its loss", is_same=is_same)


def refuse_known_numbers_in_collator(collate: Callable[[list[Any]], Any], rows: list[Any]) -> None:
    """Refuse a collator that seeds a generator or has its own."""

    def is_same(first: Any, second: Any) -> bool:
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return True  # Another check refuses a collator that returns no mapping.
        return all(same(value, second[name]) for name, value in first.items() if isinstance(value, Tensor))

    # A collator may modify its input.
    refuse_known_numbers(lambda: collate(copied(rows)), "data_collator", is_same=is_same)
