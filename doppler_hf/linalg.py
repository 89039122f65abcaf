"""Shared numerics of tensors: sums and norms, cross-entropies, equality, digests of bits, and the precision of products.

Every norm of the package is computed here. On a CPU torch's `vector_norm`, `Tensor.norm` and `_foreach_norm` add the squares
of some layouts one after another in float32. A partial sum that has grown large then swallows the small squares that follow:
on a view of 4,096 × 4,096 equal numbers the norm is 4 % too small. Even `sum` does so over several dimensions at once, if
the inner ones hold a few numbers only. How many terms meet in one partial sum depends on layout, processor and version of
torch. Nothing here relies on it: at most `RUN` numbers are added at a time, then at most `RUN` of these sums, and so on. In
whatever order each of these is added up, a sum of n terms is wrong by at most

    u·RUN·⌈log n / log RUN⌉·Σ|terms|,    u = 2⁻²⁴ in float32 (Higham 2002, section 4.2),

which for four billion terms is 6e-5 of it. The error of a norm is half as large, and clipping raises norms by a thousandth.
docs/method/sums.md lists all sums over one example's numbers, and how large each may become.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from doppler_hf.errors import Refusal

# The most numbers that are added to one partial sum.
RUN: Final = 256


def row_sums(terms: Float[Tensor, "rows n"]) -> Float[Tensor, " rows"]:
    """Return the sum of every row, of any layout and length, in float32 or better.

    Example:
        >>> row_sums(torch.full((1, 1), 0.25).expand(2, 2**26))
        tensor([16777216., 16777216.])
    """
    return _in_runs(terms, functools.partial(torch.sum, dim=-1, dtype=sum_dtype(terms)))


def row_norms(values: Float[Tensor, "rows n"]) -> Float[Tensor, " rows"]:
    """Return the norm of every row, of any layout and length, in float32 or better."""
    # The norm of the norms of runs; there is no copy of the squares.
    return _in_runs(values, functools.partial(torch.linalg.vector_norm, dim=-1, dtype=sum_dtype(values)))


def norm(values: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Return the norm of all numbers of a tensor of any layout, in float32 or better."""
    return row_norms(values.reshape(1, -1)).squeeze(0)


def sum_dtype(values: Float[Tensor, "..."]) -> torch.dtype:
    """Return the dtype in which numbers are added up: their own, or float32 for half precision."""
    return torch.promote_types(values.dtype, torch.float32)


def _in_runs(
    values: Float[Tensor, "rows n"], of_run: Callable[[Float[Tensor, "rows *runs n"]], Float[Tensor, "rows *runs"]]
) -> Float[Tensor, " rows"]:
    """Return what `of_run` makes of every row, of `RUN` numbers at a time and then of what it has made of these."""
    while (number := values.shape[1]) > RUN:
        whole = number // RUN * RUN
        runs = of_run(values[:, :whole].unflatten(1, (-1, RUN)))
        values = runs if whole == number else torch.cat([runs, of_run(values[:, None, whole:])], dim=1)
    return of_run(values)


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


def cross_entropies(
    logits: Float[Tensor, "batch labels *places"], labels: Int[Tensor, "batch *places"], *, ignored: int
) -> Float[Tensor, "batch *places"]:
    """Return the cross-entropy at each place, 0 where there is no label."""
    try:
        return F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")
    except IndexError:
        # Neither torch's words nor its traceback, which have the label of an example: messages end in logs.
        raise no_class(
            logits.shape[1],
            ignored,
            "Set num_labels in the model's config to the number of classes, and let them begin at 0",
        ) from None


def no_class(classes: int, ignored: int, fix: str) -> Refusal:
    """Return the error of a label that is none of the classes."""
    return Refusal(
        "label-without-class",
        f"labels must be classes from 0 to {classes - 1}, or {ignored} where there is none, got another one. {fix}.",
    )
