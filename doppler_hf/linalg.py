"""Shared numerics of tensors: sums and norms, cross-entropies, equality, checksums, and the precision of products.

Every norm of the package is computed here. On a CPU, torch's `vector_norm`, `Tensor.norm` and `_foreach_norm` add the
squares of some memory layouts one after another in float32. A large partial sum then loses the small squares that follow: on
a view of 4,096 × 4,096 equal numbers the norm is 4 % too small. Even `sum` does so over several dimensions at once, if the
inner dimensions have few numbers. How many terms are added to one partial sum depends on the layout, the processor and the
version of torch. Nothing here relies on it: at most `RUN` numbers are added at a time, then at most `RUN` of these sums, and
so on. Whatever the order of each addition, a sum of n terms has an error of at most

    u·RUN·⌈log n / log RUN⌉·Σ|terms|,    u = 2⁻²⁴ in float32 (Higham 2002, section 4.2),

which is a relative error of 6e-5 for four billion positive terms. The error of a norm is half as large, and clipping raises
norms by a thousandth. docs/method/sums.md lists all sums over the numbers of one example, and how large each may become.
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
    """Return the sum of every row, shape (rows,), in float32 or better, for any memory layout and length.

    Example:
        >>> row_sums(torch.full((1, 1), 0.25).expand(2, 2**26))
        tensor([16777216., 16777216.])
    """
    return _in_runs(terms, functools.partial(torch.sum, dim=-1, dtype=sum_dtype(terms)))


def row_norms(values: Float[Tensor, "rows n"]) -> Float[Tensor, " rows"]:
    """Return the norm of every row, shape (rows,), in float32 or better, for any memory layout and length."""
    # This is the norm of the norms of runs, which needs no copy of the squares.
    return _in_runs(values, functools.partial(torch.linalg.vector_norm, dim=-1, dtype=sum_dtype(values)))


def norm(values: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Return the norm of all numbers of a tensor, in float32 or better, for any memory layout."""
    return row_norms(values.reshape(1, -1)).squeeze(0)


def sum_dtype(values: Float[Tensor, "..."]) -> torch.dtype:
    """Return the dtype in which the numbers of a tensor are added: their own, or float32 for half precision."""
    return torch.promote_types(values.dtype, torch.float32)


def _in_runs(
    values: Float[Tensor, "rows n"], of_run: Callable[[Float[Tensor, "rows *runs n"]], Float[Tensor, "rows *runs"]]
) -> Float[Tensor, " rows"]:
    """Apply `of_run` to at most `RUN` numbers of a row at a time, then to the results, until one number per row is left."""
    while (number := values.shape[1]) > RUN:
        whole = number // RUN * RUN
        runs = of_run(values[:, :whole].unflatten(1, (-1, RUN)))
        values = runs if whole == number else torch.cat([runs, of_run(values[:, None, whole:])], dim=1)
    return of_run(values)


def in_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values themselves, or a float32 copy if they have half precision."""
    return values.float() if values.itemsize < 4 else values


@functools.cache
def adds_halves_in_float32(device: torch.device) -> bool:
    """Return whether a device can multiply matrices of half precision with a float32 result, as CUDA can; tried once."""
    if device.type == "cpu":
        return False
    try:
        empty = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        return torch.mm(empty, empty, out_dtype=torch.float32).dtype == torch.float32
    except (NotImplementedError, RuntimeError):
        return False


def product_in_float32(left: Float[Tensor, "*stack m k"], right: Float[Tensor, "*stack k n"]) -> Float[Tensor, "*stack m n"]:
    """Return left @ right, with sums in float32 or better.

    A product of two numbers of half precision is exact in float32, so tensor cores can multiply them without a copy.
    """
    is_half = left.dtype == right.dtype and left.itemsize == 2
    if is_half and (isinstance(left, FakeTensor) or adds_halves_in_float32(left.device)):
        return (torch.mm if left.ndim == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
    return in_float32(left) @ in_float32(right)


def same(first: Shaped[Tensor, "..."], second: Shaped[Tensor, "..."]) -> bool:
    """Return whether two tensors hold the same numbers, NaN included."""
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())


def sums_of_bytes(values: Shaped[Tensor, "..."]) -> Int64[Tensor, "2"]:
    """Return two sums modulo 2⁶⁴: over a tensor's words of eight bytes, and over the remaining bytes."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    # A view into a larger tensor may begin in the middle of a word.
    words = flat[:whole].clone() if flat.storage_offset() % 8 else flat[:whole]
    return torch.stack([words.view(torch.int64).sum(), flat[whole:].sum(dtype=torch.int64)])


def highest_conv_precision() -> contextlib.AbstractContextManager[None]:
    """Compute convolutions of float32 numbers in float32 on CUDA, where cuDNN rounds them to TF32 by default."""
    cudnn: Any = torch.backends.cudnn
    # Both switches are set. Otherwise torch raises an error about a contradiction if code in the block reads allow_tf32.
    return _exact(
        (cudnn.conv, cudnn.rnn), lambda: cudnn.allow_tf32, lambda allowed: setattr(cudnn, "allow_tf32", allowed), False
    )


def highest_matmul_precision() -> contextlib.AbstractContextManager[None]:
    """Compute products of float32 matrices in float32, even if the user allows TF32 or bfloat16 for the model."""
    switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    return _exact(switches, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")


@contextlib.contextmanager
def _exact(switches: tuple[Any, ...], read: Callable[[], Any], write: Callable[[Any], None], exact: Any) -> Iterator[None]:
    """Set torch's older switch (with `read` and `write`) and the switches of the backends, and restore all afterwards."""
    before = [switch.fp32_precision for switch in switches]
    try:
        for_all = read()
    except RuntimeError:  # Torch refuses to read or set the older switch once the switches of the backends are in use.
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


NUMBER_OF_CLASSES: Final = "Set num_labels in the model's config to the number of classes, and number the classes from 0"


def cross_entropies(
    logits: Float[Tensor, "batch labels *places"],
    labels: Int[Tensor, "batch *places"],
    *,
    ignored: int,
    fix: str = NUMBER_OF_CLASSES,
) -> Float[Tensor, "batch *places"]:
    """Return the cross-entropy at each place, 0 where there is no label."""
    try:
        return F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")
    except IndexError:
        # Torch's message and traceback have the label of an example, so they are replaced: messages end up in logs.
        raise no_class(logits.shape[1], ignored, fix) from None


def no_class(classes: int, ignored: int, fix: str) -> Refusal:
    """Return the error for a label that is not the index of a class."""
    return Refusal(
        "label-without-class",
        f"A label is out of range: labels must be from 0 to {classes - 1}, or {ignored} for no label. {fix}.",
    )
