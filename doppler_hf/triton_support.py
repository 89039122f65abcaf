"""Test whether Triton kernels work on a device, and launch them on tensors of any sizes, with a table of their addresses.

Torch's builds for CUDA and ROCm bring Triton. With TRITON_INTERPRET=1, as in tests on a CPU, kernels are interpreted. On
other devices, torch's own operators compute the same.

The interpreter of Triton 3.9 and a compiled kernel differ. Our kernels are written so that both give the same results:

    x·y + z            rounded once if compiled, twice if interpreted      every launch has `enable_fp_fusion=False`
    sqrt, rsqrt, x/y   approximate if compiled, exact if interpreted       `sqrt_rn` and `div_rn`, no `rsqrt`
    sums of bfloat16   interpreted as sums of the 16-bit patterns          numbers become float32 first
    dot of bfloat16    interpreted as a product of these patterns          they become float32 if INTERPRETED
    to bfloat16        rounded if compiled, cut off if interpreted         tests repair the interpreter, look for `cvt.rn`
    from bfloat16      interpreted wrongly below 1e-38                     tests repair the interpreter
    order of a sum     in pairs by both, but in a different order          tests allow for rounding
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
    """Return whether Triton kernels work on a device, which is tried once; on a GPU, warn if they do not work."""
    if device.type != "cuda":
        return False
    try:
        import triton

        launch(triton.jit(_nothing), (1,), device=device)
    except Exception as error:  # Triton is missing, or finds no C compiler, or does not know the device.
        warnings.warn(
            f"Triton does not work on this GPU, so training is slow ({error}). Install triton and a C compiler.",
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
    """Launch a Triton kernel on a device, and move NumPy arguments there without waiting; skip tensors without memory.

    Triton by itself would choose the current device. `options` are the kernel's constants, and options of Triton. Products
    and sums are rounded separately, as torch rounds them; only the products of `dot` are fused.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        moved = (_moved(each, device) if isinstance(each, np.ndarray) else each for each in arguments)
        kernel[grid](*moved, **options, enable_fp_fusion=False)


def address_of(values: Shaped[Tensor, "..."]) -> int:
    """Return the address of a tensor's first number; 0 for a tensor without memory."""
    return 0 if isinstance(values, FakeTensor) else values.data_ptr()


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's dtype for a dtype of torch."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def owners_of_programs(programs: Int64[np.ndarray, " tensors"]) -> Int[np.ndarray, " programs"]:
    """Return the index of the tensor for every program of a launch, shape (programs,), given the programs per tensor."""
    return np.repeat(np.arange(len(programs), dtype=np.int32), programs)


def _moved(words: Int[np.ndarray, " _"], device: torch.device) -> Int[Tensor, " _"]:
    here = torch.from_numpy(words)
    # The allocator does not reuse pinned memory before the copy is done.
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)
