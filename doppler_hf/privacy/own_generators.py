"""Random generators that an object holds besides the global ones, wherever it keeps them.

The global generators hold secret words (see `generators`). One of a collator's own follows a public seed in the order of the
draw, so that one example more gives the others other numbers. To look at what it does is not enough: a flip of one example
in a hundred shows in few batches. So it is searched for, through attributes, containers, closures, partial functions, bound
methods, and the globals and class attributes of code that is the user's.
"""

import collections
import dis
import functools
import gc
import random
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)
_NOT_LOOKED_INTO = (ModuleType, type, CodeType, torch.Tensor, np.ndarray, str, bytes, int, float, *GENERATORS)
# Longer containers hold data.
_MOST_IN_A_CONTAINER = 1000
# A model has some thousands of objects; nearer ones are seen first.
_MOST_OBJECTS = 100_000
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# What builds an object draws before the training.
_BUILDERS = ("__init__", "__new__", "__post_init__")


def own_generators(*roots: object) -> list[Any]:
    """Return the generators that can be reached from some objects, without the global ones."""
    of_numpy = np.random.mtrand._rand
    of_python = random._inst
    of_torch = (torch.default_generator, *torch.cuda.default_generators)
    known = {id(generator) for generator in (of_numpy, of_numpy._bit_generator, of_python, *of_torch)}
    return [
        found
        for found in reachable(*roots)
        # What the operating system gives follows no order.
        if isinstance(found, GENERATORS) and not isinstance(found, random.SystemRandom) and id(found) not in known
    ]


def state_of(generator: Any) -> str:
    """Return the state of a generator."""
    match generator:
        case torch.Generator():
            return str(generator.get_state().tolist())
        case np.random.Generator():
            return str(generator.bit_generator.state)
        case np.random.BitGenerator():
            return str(generator.state)
        case np.random.RandomState():
            return str([part.tolist() if isinstance(part, np.ndarray) else part for part in generator.get_state()])
        case _:
            return str(generator.getstate())


def reachable(*roots: object) -> Iterator[Any]:
    """Yield the objects that some objects refer to, and these, nearer ones first and each once."""
    ahead = collections.deque(roots)
    seen: dict[int, Any] = {}  # kept alive, so that no number is given twice
    while ahead and len(seen) < _MOST_OBJECTS:
        found = ahead.popleft()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield found
        ahead.extend(referents_of(found))


def referents_of(owner: Any) -> list[Any]:
    """Return what an object refers to itself; nothing of the numbers of data and of this package's own noise."""
    if isinstance(owner, _NOT_LOOKED_INTO) or type(owner).__module__.startswith("doppler_hf.privacy."):
        return []
    if isinstance(owner, list | tuple | dict | set | frozenset | collections.deque) and len(owner) > _MOST_IN_A_CONTAINER:
        return []
    if isinstance(owner, FunctionType):
        parts = [owner.__closure__, owner.__defaults__, owner.__kwdefaults__, owner.__dict__]
        return parts if is_library(owner.__code__.co_filename) else [*parts, *globals_of(owner)]
    return [*gc.get_referents(owner), *class_attributes(type(owner))]


def globals_of(function: FunctionType) -> list[Any]:
    """Return the global variables that a function reads."""
    return [function.__globals__[name] for name in global_names(function.__code__) if name in function.__globals__]


@functools.cache
def global_names(code: CodeType) -> frozenset[str]:
    """Return the names of the global variables that code reads, within functions in it too."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own).union(*(global_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def class_attributes(kind: type) -> list[Any]:
    """Return the methods and other attributes of a class and its bases, those of libraries left out."""
    return [
        value
        for base in kind.__mro__
        if not is_library(str(vars(sys.modules.get(base.__module__, base)).get("__file__", "")))
        for name, value in vars(base).items()
        if name not in _BUILDERS
    ]


def is_library(file: str) -> bool:
    """Return whether a file of code is installed, and so not the user's."""
    return file.startswith(_LIBRARIES)
