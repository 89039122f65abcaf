"""Handle interruptions of a run: Ctrl-C, an error, or SIGTERM, which schedulers send before they kill a process."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Terminated(SystemExit):
    """The process was asked to end by SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)  # the exit status that a shell reports


class Termination:
    """Whether SIGTERM has arrived, for processes that can end together only.

    Attributes:
        is_asked_for: Whether it has.
    """

    def __init__(self) -> None:
        self.is_asked_for = False


@contextlib.contextmanager
def raised_if_terminated(later: Termination | None = None) -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the block, unless something else handles it.

    Args:
        later: If it is given, the signal is only noted there, and the block raises.
    """

    def end(_signal: int, _frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt saving
        if later is None:
            raise Terminated
        later.is_asked_for = True

    # Only the main thread may set a handler.
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGTERM) in (end, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def reason_in_words(error: BaseException | None) -> str:
    """Return in words why a run stopped early."""
    if isinstance(error, Terminated):
        return "Stopped by SIGTERM"
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted"
    return "Stopped" if error is None else f"Stopped by an error ({type(error).__name__})"
