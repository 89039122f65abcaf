"""Names of earlier versions that still work and warn, and what replaces them, for one minor version.

- MODULES: a module that has moved
- NAMES: what public packages had
- ARGUMENTS: of `DopplerTrainingArguments`, with the only value that they may still have: what a run does anyway
- OPTIONS, WORDS: of the command `doppler-hf`, likewise

Standard library only: `import doppler_hf` reads this file.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final, TypeVar

from doppler_hf.errors import Refusal

MODULES: Final[Mapping[str, str]] = {
    "doppler_hf.workloads.mean_pooling": "doppler_hf.mean_pooling",
}
"""Old → new."""

NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "doppler_hf.audit": {"DiracAuditTrainer": "doppler_hf.audit.AuditTrainer"},
    "doppler_hf.filters": {
        name: f"doppler_hf.filters.earlier_names.{name}"
        for name in ("corrected_output", "from_coefficients", "power_spectral_density", "write_coefficients")
    },
}
"""Package → old name → where it is. Those in `filters.earlier_names` go too; their docstrings say what to write instead."""

ARGUMENTS: Final[Mapping[str, tuple[Any, str]]] = {
    "accountant": ("prv", "Each sampling has one accountant."),
    "clipping_quantile": (None, "The clip norm C stays. Choose it with per_sample_max_grad_norm."),
    "noise_generator": ("csprng", "Noise always comes from a cryptographic generator, on a GPU too."),
    "weight_filter": (None, "The weights are not filtered. Choose the filter of the gradients with low_pass_filter."),
}
"""Old argument → its value, and why there is no other."""

OPTIONS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "plan": {"--accountant": ("prv", "Each sampling has one accountant.")},
    "estimate": {"--engine": ("book_keeping", "A training has this engine.")},
    "audit": {
        "--canary-kind": ("dirac", "Other canaries proved less."),
        "--runs": ("1", "One training with many canaries proves more."),
    },
}
"""Command → old option → its value, and why there is no other."""

WORDS: Final[Mapping[str, str]] = {"filter": "show"}
"""Command → an old word behind it, which is left out."""

C = TypeVar("C", bound=type)


def in_words(old: str, instead: str) -> str:
    """Return the warning of an old name, and what to do."""
    return f"{old} is deprecated, and the next minor version will not have it. {instead}"


def attribute_of(package: str, name: str) -> Any:
    """Return what a public package had under an old name, or raise the `AttributeError` of a name that it never had."""
    target = NAMES.get(package, {}).get(name)
    if target is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home, _, new = target.rpartition(".")
    found = getattr(import_module(home), new)
    instead = (found.__doc__ or "").splitlines()[0] if new == name else f"Use {target}."
    # The caller is the package's __getattr__, and the line that is shown should be the user's.
    warnings.warn(in_words(f"{package}.{name}", instead), FutureWarning, stacklevel=3)
    return found


def keep_modules() -> None:
    """Let moved modules be imported by their old names, each of which warns when something is taken from it."""
    for old, new in MODULES.items():
        package, _, _ = old.rpartition(".")
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package, "Deprecated.")
            sys.modules[package].__path__ = []
        sys.modules[old] = module = ModuleType(old, "Deprecated.")
        vars(module)["__getattr__"] = functools.partial(_moved, old, new)


def _moved(old: str, new: str, name: str) -> Any:
    # Whoever looks through all modules asks for their __file__ and the like.
    if name.startswith("__"):
        raise AttributeError(f"module {old!r} has no attribute {name!r}")
    found = getattr(import_module(new), name)
    warnings.warn(in_words(old, f"Import {name} from {new}."), FutureWarning, stacklevel=2)
    return found


def with_earlier_arguments(cls: C) -> C:
    """Let a class of training arguments take those of `ARGUMENTS` too, with the value that they had by default."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in ARGUMENTS.keys() & options.keys():
            value, (only, why) = options.pop(name), ARGUMENTS[name]
            if value != only:
                raise Refusal(
                    "earlier-value", f"{name} must be {only!r} or left out, got {value!r}: other values are gone. {why}"
                )
            warnings.warn(in_words(f"{name}={value!r}", f"Leave it out. {why}"), FutureWarning, stacklevel=2)
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def words_of_today(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line without old ones, and a warning for each of these.

    Raises:
        ValueError: If an old option has another value than a command has anyway.
    """
    command = next((word for word in words if not word.startswith("-")), "")
    left, warned = list(words), []
    for name, (only, why) in OPTIONS.get(command, {}).items():
        index = next((index for index, word in enumerate(left) if word.partition("=")[0] == name), None)
        if index is None:
            continue
        _, equals, value = left.pop(index).partition("=")
        if not equals and index < len(left):
            value = left.pop(index)
        if value != only:
            raise Refusal(
                "earlier-value", f"{name} must be {only} or left out, got {value or 'nothing'}: other values are gone. {why}"
            )
        warned.append(in_words(f"{name} {value}", f"Leave it out. {why}"))
    old = WORDS.get(command)
    behind = left.index(command) + 1 if old is not None else 0
    if old is not None and left[behind : behind + 1] == [old]:
        del left[behind]
        warned.append(in_words(f"{command} {old}", f"Write doppler-hf {command} without it."))
    return left, warned
