"""Where the CPU waits for its device: the lines at which Python reads what the device has yet to compute.

On CUDA they are what torch itself warns of (`torch.cuda.set_sync_debug_mode`). On a CPU, where nothing waits, they are the
operators that would wait on CUDA: those that read a number into Python, or whose result has as many rows as a mask has ones.
What torch hides from its dispatcher is missing there, such as `tolist` and copies from one device to the other.
"""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
OURS = str(ROOT / "doppler_hf")
TORCH = str(Path(torch.__file__).parent)
SYNCHRONIZING = "called a synchronizing CUDA operation"
aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def synchronizations(step: Callable[[], Any], *, device: str) -> dict[str, int]:
    """Call a function, and return how often each line waits for the device, the most frequent first.

    A line is the innermost one of doppler_hf, or of whatever called torch where there is none.
    """
    found: Counter[str] = Counter()
    with (warned_of if device == "cuda" else WouldWait)(found):
        step()
    return dict(found.most_common())


@contextlib.contextmanager
def warned_of(found: Counter[str]) -> Iterator[None]:
    """Count torch's warnings by line, in all threads."""

    def note(message: Warning | str, *details: Any, **more: Any) -> None:
        if SYNCHRONIZING in str(message):
            found[line_of(sys._getframe(1))] += 1

    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class WouldWait(TorchDispatchMode):
    """Counts operators that would wait on CUDA, where they are called on the CPU.

    Args:
        found: Line → how often (modified in place).
    """

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator."""
        packet = operator.overloadpacket
        if packet in WAITING or (packet in INDEXED and any(is_mask(index) for index in args[1])):
            self._found[line_of(sys._getframe(1))] += 1
        return operator(*args, **(kwargs or {}))


def is_mask(index: Tensor | None) -> bool:
    """Return whether an index says of each row whether it is taken."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line of doppler_hf that led to a frame, or the innermost one outside of torch."""
    outside = "torch"
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            return f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
        if outside == "torch" and not path.startswith((TORCH, str(Path(__file__)))):
            outside = f"{'/'.join(Path(path).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return outside
