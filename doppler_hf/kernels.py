"""What the kernels share: on which device they work, and a launch for tensors of any sizes by a table of their addresses.

They are written in Triton, which CUDA's and ROCm's builds of torch bring, and are interpreted where TRITON_INTERPRET=1 is
set, as on a CPU in tests. Elsewhere torch's own operators do the same.
"""

import contextlib
import functools
import warnings

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor


@functools.cache
def are_usable(device: torch.device) -> bool:
    """Return whether Triton's kernels work on a device, which a launch tries once; where they might, it warns if not."""
    if device.type != "cuda":
        return False
    try:
        import triton

        with launching_on(device):
            triton.jit(_nothing)[(1,)]()
    except Exception as error:  # Triton is missing, or finds no C compiler, or does not know the device.
        warnings.warn(
            f"Training on this GPU is slow: Triton does not work here ({error}). Install triton and a C compiler.",
            stacklevel=2,
        )
        return False
    return True


def _nothing():  # type: ignore[no-untyped-def]  # noqa: ANN202  # Triton's compiler takes no annotation
    pass


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Let kernels be launched on a device for the duration of the block: Triton's own choice is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def words_on(device: torch.device, words: Int[np.ndarray, " n"]) -> Int[Tensor, " n"]:
    """Return words on a device, moved without a wait."""
    here = torch.from_numpy(words)
    # The allocator of pinned memory does not reuse it before the copy is done.
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def owners_of_programs(programs: Int64[np.ndarray, " tensors"]) -> Int[np.ndarray, " programs"]:
    """Return for every program of a launch to which tensor it belongs, from how many programs each has."""
    return np.repeat(np.arange(len(programs), dtype=np.int32), programs)
