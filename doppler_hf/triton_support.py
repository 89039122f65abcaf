"""On which devices kernels in Triton work, and how one is launched for tensors of any sizes, by a table of their addresses.

They are written in Triton, which CUDA's and ROCm's builds of torch bring, and are interpreted where TRITON_INTERPRET=1 is
set, as on a CPU in tests. Elsewhere torch's own operators do the same.

The interpreter of Triton 3.9 does not compute what the compiler lets a GPU compute. Our kernels are written so that both do:

    x·y + z            rounded once if compiled, twice if interpreted      every launch has `enable_fp_fusion=False`
    sqrt, rsqrt, x/y   approximate if compiled, exact if interpreted       `sqrt_rn` and `div_rn`, no `rsqrt`
    sums of bfloat16   interpreted as sums of the 16-bit patterns          numbers become float32 first
    dot of bfloat16    interpreted as a product of these patterns          they become float32 if INTERPRETED
    to bfloat16        rounded if compiled, cut off if interpreted         tests repair the interpreter, look for `cvt.rn`
    from bfloat16      interpreted wrongly below 1e-38                     likewise
    order of a sum     in pairs by both, but in another order              tests allow for rounding
    log, cos, sin      in float64, by CUDA's library or NumPy's            tests allow for some units in the last place

`tests/test_triton_support.py` compiles every kernel for an H100, and lists the instructions that may occur in it.
"""

import contextlib
import functools
import warnings
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Int64, Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@functools.cache
def are_usable(device: torch.device) -> bool:
    """Return whether Triton's kernels work on a device, which a launch tries once; where they might, it warns if not."""
    if device.type != "cuda":
        return False
    try:
        import triton

        launch(triton.jit(_nothing), (1,), device=device)
    except Exception as error:  # Triton is missing, or finds no C compiler, or does not know the device.
        warnings.warn(
            f"Training on this GPU is slow: Triton does not work here ({error}). Install triton and a C compiler.",
            stacklevel=2,
        )
        return False
    return True


def _nothing():  # type: ignore[no-untyped-def]  # noqa: ANN202  # Triton's compiler takes no annotation
    pass


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Tensor | Int[np.ndarray, " _"] | int,
    device: torch.device,
    **options: Any,
) -> None:
    """Launch a kernel of Triton's on a device, with words for it moved there without a wait; not on tensors without memory.

    Triton's own choice of a device would be the current one. `options` are the kernel's constants, and Triton's own. A
    product and a sum are rounded one after the other, as torch rounds them; the products of `dot` are fused all the same.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        moved = (_moved(each, device) if isinstance(each, np.ndarray) else each for each in arguments)
        kernel[grid](*moved, **options, enable_fp_fusion=False)


def address_of(values: Shaped[Tensor, "..."]) -> int:
    """Return where a tensor's first number is; 0 for one without memory."""
    return 0 if isinstance(values, FakeTensor) else values.data_ptr()


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def owners_of_programs(programs: Int64[np.ndarray, " tensors"]) -> Int[np.ndarray, " programs"]:
    """Return for every program of a launch to which tensor it belongs, from how many programs each has."""
    return np.repeat(np.arange(len(programs), dtype=np.int32), programs)


def _moved(words: Int[np.ndarray, " _"], device: torch.device) -> Int[Tensor, " _"]:
    here = torch.from_numpy(words)
    # The allocator of pinned memory does not reuse it before the copy is done.
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)
