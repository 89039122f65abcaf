"""What an object refers to, through whatever Python code may keep something in.

Attributes, containers, closures, partial functions, bound methods, and the globals and class attributes of code that is the
user's. What builds an object is left out, and so are the numbers of data.
"""

import collections
import dis
import functools
import gc
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)
_NOT_LOOKED_INTO = (ModuleType, type, CodeType, torch.Tensor, np.ndarray, str, bytes, int, float, *GENERATORS)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
# They refer to nothing, and most of what is referred to is one of them.
_ATOMS = frozenset({str, bytes, int, float, bool, type(None), CodeType})
# Longer ones hold data.
_MOST_IN_A_CONTAINER = 1000
# A model has some thousands of objects; nearer ones are seen first.
_MOST_OBJECTS = 100_000
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# An environment may see the packages of others: of the system, or of the user's home.
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
# What builds an object draws before the training.
_BUILDERS = ("__init__", "__new__", "__post_init__")


def reachable(*roots: object) -> Iterator[Any]:
    """Yield the objects that some objects refer to, and these, nearer ones first and each once, without single values."""
    ahead = collections.deque(roots)
    seen: dict[int, Any] = {}  # kept alive, so that no number is given twice
    kinds: set[type] = set()
    while ahead and len(seen) < _MOST_OBJECTS:
        found = ahead.popleft()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield found
        kind: type = type(found)
        if is_opaque(kind):
            continue
        ahead.extend(each for each in referents_of(found) if type(each) not in _ATOMS)
        if kind not in kinds:
            kinds.add(kind)
            ahead.extend(class_attributes(kind))


@functools.cache
def is_opaque(kind: type) -> bool:
    """Return whether objects of a class are not looked into: the numbers of data, this package's own noise, torch's FSDP.

    Sensitivity: FSDP keeps gathered weights, and nothing of an example. Modules are looked into, whose classes it makes.
    """
    if issubclass(kind, torch.nn.Module):
        return False
    return issubclass(kind, _NOT_LOOKED_INTO) or is_ours(kind)


def is_ours(kind: type) -> bool:
    """Return whether a class is this package's own of noise and gradients, or torch's of several processes; no module is."""
    packages = "doppler_hf.privacy.", "torch.distributed."
    return kind.__module__.startswith(packages) and not issubclass(kind, torch.nn.Module)


def referents_of(owner: Any) -> list[Any]:
    """Return what an object refers to itself, but for its class and its data."""
    kind: type = type(owner)  # which is not asked, since it may do anything when it is asked
    if issubclass(kind, CONTAINERS) and len(owner) > _MOST_IN_A_CONTAINER:
        return []
    if kind is FunctionType:
        parts = [owner.__closure__, owner.__defaults__, owner.__kwdefaults__, owner.__dict__]
        return [*parts, *globals_of(owner).values()]
    return gc.get_referents(owner)


def globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the global variables that a function of the user reads, by name."""
    if is_library(function.__code__.co_filename):
        return {}
    names = global_names(function.__code__)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


@functools.cache
def global_names(code: CodeType) -> frozenset[str]:
    """Return the names of the global variables that code reads, within functions in it too."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own).union(*(global_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def class_attributes(kind: type) -> list[Any]:
    """Return the methods and other attributes of a class and its bases, those of libraries left out."""
    return [value for base in own_classes(kind) for name, value in vars(base).items() if name not in _BUILDERS]


@functools.cache
def own_classes(kind: type) -> tuple[type, ...]:
    """Return those of a class and its bases that are the user's."""
    return tuple(
        base
        for base in kind.__mro__
        if not is_library(str(vars(sys.modules.get(base.__module__, base)).get("__file__", "")))
    )


def is_library(file: str) -> bool:
    """Return whether a file of code is installed, and so not the user's."""
    return file.startswith(_LIBRARIES) or _INSTALLED.search(file) is not None


def is_a(value: Any, *kinds: type) -> bool:
    """Return whether a value is of one of some classes, without asking the value, which may do anything when it is asked."""
    return issubclass(type(value), kinds)
