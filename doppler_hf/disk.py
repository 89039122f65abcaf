"""One clear error when the disk is full."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

# In the words of the operating system, which safetensors repeats, and of torch's writer, which only says that it failed.
_WORDS: Final = (
    *(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    "iostream error",
    "inline_container",
)


@final
class NoSpaceError(OSError):
    """The disk has no space left for a file."""


@contextlib.contextmanager
def space_for(what: str, *, folder: Path) -> Iterator[None]:
    """Turn a full disk or quota, in a block that writes `what` to `folder`, into one clear error."""
    try:
        yield
    except NoSpaceError:  # of a part of it
        raise
    except Exception as error:
        if not any(words in str(error) for words in _WORDS):
            raise
        raise NoSpaceError(
            f"{folder} must have space for {what}, got a full disk or quota. Free space (save_total_limit keeps fewer "
            "checkpoints), and resume from the last complete checkpoint."
        ) from error
