"""The package's optional extras, and the message when one is missing."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from doppler_hf.errors import CodedError

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "recipes": ("datasets", "peft", "PIL", "pyarrow", "sklearn", "yaml"),
    "plot": ("matplotlib",),
    "trl": ("trl",),
}
"""Extra → the modules that it brings."""


class MissingExtraError(CodedError, ImportError):
    """An extra is needed that is not installed."""


def require(extra: str) -> None:
    """Check that an extra of `EXTRAS` is installed, before work that needs it."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            "missing-extra", f'{", ".join(missing)} must be installed for this. Run pip install "doppler_hf[{extra}]".'
        )
