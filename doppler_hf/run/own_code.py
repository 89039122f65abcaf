"""Tell whether a method of a trainer is the user's own, or comes from a library on which a private run relies."""

import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

LIBRARIES: Final = ("doppler_hf", "transformers", "trl")
# Libraries whose decorators and wrappers may surround a library's own method.
_WRAPPING: Final = (*LIBRARIES, "torch", "accelerate", "contextlib", "functools", "jaxtyping")


class Definition(NamedTuple):
    """A definition of a method: on the trainer itself, or in a class."""

    owner: Any  # the trainer or the class
    name: str
    value: Any

    @property
    def place(self) -> str:
        """Return its name as a user knows it, such as `trainer.log` or `Mine.log`."""
        return f"{self.owner.__name__ if isinstance(self.owner, type) else 'trainer'}.{self.name}"

    @property
    def is_user_code(self) -> bool:
        """Whether the user has written it, in a class or as a replacement for a library's method."""
        if isinstance(self.owner, type) and _root(self.owner.__module__) not in LIBRARIES:
            return True
        return any(_root(module) not in _WRAPPING for module in _modules_of(self.value))

    @property
    def is_installed(self) -> bool:
        """Whether another installed package, such as sentence-transformers, has written it, which a user cannot change."""
        package = _root(getattr(self.owner, "__module__", None))
        if not isinstance(self.owner, type) or package in LIBRARIES or _root(next(_modules_of(self.value), None)) != package:
            return False  # a method that was set on the class from outside is the user's
        module = sys.modules.get(getattr(self.owner, "__module__", ""))
        place = Path(getattr(module, "__file__", None) or "").resolve()
        return any(place.is_relative_to(folder) for folder in _folders_of_packages())


@functools.cache
def _folders_of_packages() -> list[Path]:
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")} | {each for each in sys.path if each}
    return [Path(each).resolve() for each in folders if Path(each).name in ("site-packages", "dist-packages")]


def definitions(trainer: Any, method: str) -> Iterator[Definition]:
    """Yield all definitions of a method, in the order in which Python looks for them.

    Args:
        trainer: A trainer, whose own attributes come first, or a class of trainers.
        method: The method's name.
    """
    if not isinstance(trainer, type) and method in vars(trainer):
        yield Definition(trainer, method, vars(trainer)[method])
    for cls in (trainer if isinstance(trainer, type) else type(trainer)).__mro__:
        if method in vars(cls):
            yield Definition(cls, method, vars(cls)[method])


def overrides(trainer: Any, method: str) -> bool:
    """Return whether this method of a trainer, or of a class of trainers, is the user's own.

    Example:
        >>> from doppler_hf import DopplerTrainer
        >>> class Mine(DopplerTrainer):
        ...     def log(self, logs, start_time=None): ...
        >>> overrides(Mine, "log"), overrides(Mine, "train")
        (True, False)
    """
    return next(definitions(trainer, method)).is_user_code


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _modules_of(value: Any) -> Iterator[str | None]:
    """Yield the modules in which a function and all functions that it wraps were written, not the names they claim."""
    while value is not None:
        if isinstance(value, functools.partial | functools.partialmethod):
            value = value.func
            continue
        function = getattr(value, "__func__", value)  # methods, static methods and class methods have it
        if hasattr(function, "__globals__"):
            yield function.__globals__.get("__name__")
        else:
            yield type(function).__module__
        value = getattr(function, "__wrapped__", None)
