"""The version, by itself, so that a source tree on `PYTHONPATH` knows it without an installation."""

from typing import Final

VERSION: Final = "0.3.0"
