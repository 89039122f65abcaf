"""Names of earlier versions, which still work for one minor version, with a warning that names the replacement.

- MODULES: modules that have moved
- NAMES: names in public packages
- ATTRIBUTES, PARAMETERS: names of attributes of public classes, and of parameters of their constructors
- ARGUMENTS: arguments of `DopplerTrainingArguments`, with the only value that is still allowed: the present behaviour
- OPTIONS, WORDS: options and words of the command `doppler-hf`, with the same rule

This file uses the standard library only, because `import doppler_hf` reads it.
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
"""Old name → new name."""

NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "doppler_hf.audit": {"DiracAuditTrainer": "doppler_hf.audit.AuditTrainer"},
    "doppler_hf.filters": {
        name: f"doppler_hf.filters.earlier_names.{name}"
        for name in ("corrected_output", "from_coefficients", "power_spectral_density", "write_coefficients")
    },
}
"""Package → old name → new place. Functions in `filters.earlier_names` will go; their docstrings name the replacement."""

ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = {"DopplerTrainer": {"private_run": "privacy"}}
"""Class → old attribute → new name."""

PARAMETERS: Final[Mapping[str, Mapping[str, str]]] = {"AllocationSampler": {"micro_batches": "pieces"}}
"""Class → old parameter → new name."""

ARGUMENTS: Final[Mapping[str, tuple[Any, str]]] = {
    "accountant": ("prv", "Each sampling has one accountant."),
    "clipping_quantile": (None, "The clip norm C is constant. Set it with per_sample_max_grad_norm."),
    "noise_generator": ("csprng", "Noise always comes from a cryptographic generator, on a GPU too."),
    "weight_filter": (None, "The weights are not filtered. Set the filter of the gradients with low_pass_filter."),
}
"""Old argument → the value that is still allowed, and why there is no other."""

OPTIONS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "plan": {"--accountant": ("prv", "Each sampling has one accountant.")},
    "estimate": {"--engine": ("book_keeping", "Training runs use this engine by default.")},
    "audit": {
        "--canary-kind": ("dirac", "Other canaries proved less."),
        "--runs": ("1", "One training run with many canaries proves more."),
    },
}
"""Command → old option → the value that is still allowed, and why there is no other."""

WORDS: Final[Mapping[str, str]] = {"filter": "show"}
"""Command → an old word after it, which is now left out."""

C = TypeVar("C", bound=type)


def in_words(old: str, instead: str) -> str:
    """Return the deprecation warning for an old name, with the instruction what to use instead."""
    return f"{old} is deprecated and will be removed in the next minor version. {instead}"


def attribute_of(package: str, name: str) -> Any:
    """Return the object with an old name of a public package, with a warning.

    Raises:
        AttributeError: If the package never had this name.
    """
    target = NAMES.get(package, {}).get(name)
    if target is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home, _, new = target.rpartition(".")
    found = getattr(import_module(home), new)
    instead = (found.__doc__ or "").splitlines()[0] if new == name else f"Use {target}."
    # The caller is the package's __getattr__, so with stacklevel=3 the warning shows the user's line.
    warnings.warn(in_words(f"{package}.{name}", instead), FutureWarning, stacklevel=3)
    return found


def keep_modules() -> None:
    """Make moved modules importable by their old names, with a warning when an attribute is read."""
    for old, new in MODULES.items():
        package, _, _ = old.rpartition(".")
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package, "Deprecated.")
            sys.modules[package].__path__ = []
        sys.modules[old] = module = ModuleType(old, "Deprecated.")
        vars(module)["__getattr__"] = functools.partial(_moved, old, new)


def _moved(old: str, new: str, name: str) -> Any:
    # Tools that look through all modules read names such as __file__, and should get no warning.
    if name.startswith("__"):
        raise AttributeError(f"module {old!r} has no attribute {name!r}")
    found = getattr(import_module(new), name)
    warnings.warn(in_words(old, f"Import {name} from {new}."), FutureWarning, stacklevel=2)
    return found


def with_earlier_attributes(cls: C) -> C:
    """Let the attributes of a class be read by their old names in `ATTRIBUTES` too."""
    for old, new in ATTRIBUTES[cls.__name__].items():
        setattr(cls, old, _earlier_attribute(f"{cls.__name__}.{old}", new))
    return cls


def _earlier_attribute(old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warnings.warn(in_words(old, f"Use {new}, its new name."), FutureWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)


def with_earlier_parameters(cls: C) -> C:
    """Make the constructor of a class accept the old names in `PARAMETERS` too."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for old, new in PARAMETERS[cls.__name__].items():
            if old in options:
                options[new] = options.pop(old)
                warnings.warn(in_words(f"{cls.__name__}({old}=…)", f"Use {new}, its new name."), FutureWarning, stacklevel=2)
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def with_earlier_arguments(cls: C) -> C:
    """Make a class of training arguments accept the old names in `ARGUMENTS` too, with their allowed value only."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in ARGUMENTS.keys() & options.keys():
            value, (only, why) = options.pop(name), ARGUMENTS[name]
            if value != only:
                raise Refusal(
                    "earlier-value",
                    f"{name} is deprecated: {only!r} is the only value that it still accepts; got {value!r}. {why} Leave it "
                    "out.",
                )
            warnings.warn(in_words(f"{name}={value!r}", f"Leave it out. {why}"), FutureWarning, stacklevel=2)
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def without_deprecated_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line without old options and words, and a warning for each one that was removed.

    Raises:
        ValueError: If an old option has a value that is no longer supported.
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
                "earlier-value",
                f"{name} is deprecated: {only} is the only value that it still accepts; got {value or 'none'}. {why} Leave "
                "it out.",
            )
        warned.append(in_words(f"{name} {value}", f"Leave it out. {why}"))
    old = WORDS.get(command)
    behind = left.index(command) + 1 if old is not None else 0
    if old is not None and left[behind : behind + 1] == [old]:
        del left[behind]
        warned.append(in_words(f"{command} {old}", f"Use doppler-hf {command} without {old}."))
    return left, warned
