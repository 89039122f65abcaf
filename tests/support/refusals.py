"""Errors of the package, which tests tell apart by their codes: the words of a message may change."""

import contextlib
from collections.abc import Iterator

import pytest

from doppler_hf.errors import CodedError


@contextlib.contextmanager
def refused(code: str, *, match: str | None = None) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expect an error with this code in the block, as `pytest.raises` expects a class.

    `match` is for a value or a command that the message must name, not for its words.
    """
    with pytest.raises(CodedError, match=match) as refusal:
        yield refusal
    assert refusal.value.code == code, f"expected {code!r}, got {refusal.value.code!r}: {refusal.value}"
