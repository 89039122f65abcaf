"""What the other processes are told when one refuses or ends: one line, and none waits."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import torch.distributed as dist

# What gloo says of a process that is no more, in messages without a class of their own.
_OF_A_SOCKET: Final = re.compile("gloo|Connection closed by peer|Connection reset by peer")


class OthersKnow(RuntimeError):
    """An error that the other processes have too, or cannot be told of."""


def another_has_ended() -> OthersKnow:
    """Return the error of a process that cannot go on without another one."""
    return OthersKnow(
        "All processes of a training must run to its end, and another one has ended, so that this one ends too. What "
        "that one has printed says why. Start all of them again with resume_from_checkpoint=True."
    )


@contextlib.contextmanager
def one_line_if_a_process_ends() -> Iterator[None]:
    """Say in one line that another process has ended, where torch names a socket."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OthersKnow) or not (isinstance(error, dist.DistError) or _OF_A_SOCKET.search(str(error))):
            raise
        raise another_has_ended() from error


def returned(outcome: Any) -> Any:
    """Return the outcome of a process on another one, or raise what it sent instead."""
    if isinstance(outcome, ValueError | OthersKnow):
        raise outcome
    return outcome
