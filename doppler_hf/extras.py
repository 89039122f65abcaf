"""The optional extras of the package, and the error if one is missing."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from doppler_hf.errors import CodedError

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "recipes": ("datasets", "peft", "PIL", "pyarrow", "sklearn", "yaml"),
    "plot": ("matplotlib",),
    "trl": ("trl",),
}
"""Extra → the modules that it installs."""


class MissingExtraError(CodedError, ImportError):
    """A required extra is not installed."""


def require(extra: str) -> None:
    """Check that an extra of `EXTRAS` is installed, before work that needs it.

    Raises:
        MissingExtraError: If a module of the extra is missing.
    """
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            "missing-extra",
            f'This needs packages that are not installed: {", ".join(missing)}. Run pip install "doppler_hf[{extra}]".',
        )
