"""Shared numerics of tensors: equality, digests of bits, and the precision of products."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def in_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values themselves, or a float32 copy if they are of half precision."""
    return values.float() if values.itemsize < 4 else values


@functools.cache
def adds_halves_in_float32(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of half precision into one of float32, as CUDA's do; tried once."""
    if device.type == "cpu":
        return False
    try:
        empty = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        return torch.mm(empty, empty, out_dtype=torch.float32).dtype == torch.float32
    except (NotImplementedError, RuntimeError):
        return False


def product_in_float32(left: Float[Tensor, "*stack m k"], right: Float[Tensor, "*stack k n"]) -> Float[Tensor, "*stack m n"]:
    """Return left @ right, added up in float32 or better.

    A product of two numbers of half precision is exact in float32, so that tensor cores take them as they are.
    """
    is_half = left.dtype == right.dtype and left.itemsize == 2
    if is_half and (isinstance(left, FakeTensor) or adds_halves_in_float32(left.device)):
        return (torch.mm if left.ndim == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
    return in_float32(left) @ in_float32(right)


def same(first: Shaped[Tensor, "..."], second: Shaped[Tensor, "..."]) -> bool:
    """Return whether two tensors hold the same numbers, NaN included."""
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())


def sums_of_bytes(values: Shaped[Tensor, "..."]) -> Int64[Tensor, "2"]:
    """Return two sums modulo 2⁶⁴: over a tensor's whole words of eight bytes, and over the bytes left."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    # A view into a larger tensor may begin within a word.
    words = flat[:whole].clone() if flat.storage_offset() % 8 else flat[:whole]
    return torch.stack([words.view(torch.int64).sum(), flat[whole:].sum(dtype=torch.int64)])


def highest_conv_precision() -> contextlib.AbstractContextManager[None]:
    """Convolve float32 numbers in float32 on CUDA, where torch lets cuDNN round them to TF32 unless told otherwise."""
    cudnn: Any = torch.backends.cudnn
    # Or code that asks for TF32 in the block would be told of a contradiction.
    return _exact(
        (cudnn.conv, cudnn.rnn), lambda: cudnn.allow_tf32, lambda allowed: setattr(cudnn, "allow_tf32", allowed), False
    )


def highest_matmul_precision() -> contextlib.AbstractContextManager[None]:
    """Multiply float32 matrices in float32, even if the user allows TF32 or bfloat16 for the model."""
    switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    return _exact(switches, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")


@contextlib.contextmanager
def _exact(switches: tuple[Any, ...], read: Callable[[], Any], write: Callable[[Any], None], exact: Any) -> Iterator[None]:
    """Set torch's older switch, which `read` and `write` reach, and those of single backends; put all back afterwards."""
    before = [switch.fp32_precision for switch in switches]
    try:
        for_all = read()
    except RuntimeError:  # torch lets it be neither read nor set once the switches of the backends are in use
        for_all = None
    else:
        write(exact)
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        if for_all is not None:
            write(for_all)
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
