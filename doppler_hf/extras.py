"""What only some uses need: the package's extras, and how to install the one that is missing."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "recipes": ("datasets", "evaluate", "peft", "PIL", "sklearn", "yaml"),
    "plot": ("matplotlib",),
}
"""Extra → the modules that it brings."""


class MissingExtraError(ImportError):
    """What was asked for needs an extra that is not installed."""


def require(extra: str) -> None:
    """Refuse to begin what an extra is needed for without it.

    Args:
        extra: A key of `EXTRAS`.

    Raises:
        MissingExtraError: With what is missing, and the line that installs it.
    """
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f'{", ".join(missing)} must be installed for this. Run pip install "doppler_hf[{extra}]".')
