"""Tensors: the shorter side of a matrix and its subspace, precision of products, equal numbers and bits.

A gradient G of shape (m, n) is read in a subspace of its *shorter* side, with P of shape (min(m, n), rank):

    PᵀG for m ≤ n,    G·P for m > n,    and back  P·Y,    Y·Pᵀ
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor


def is_wide(matrix: Float[Tensor, "m n"]) -> bool:
    """Return whether the first side is the shorter one, m ≤ n: the one that a subspace belongs to."""
    return matrix.shape[0] <= matrix.shape[1]


def project(matrix: Float[Tensor, "m n"], basis: Float[Tensor, "short rank"]) -> Float[Tensor, "_ _"]:
    """Return PᵀG, shape (rank, n), for m ≤ n and G·P, shape (m, rank), for m > n; P in the dtype of G."""
    return basis.mT @ matrix if is_wide(matrix) else matrix @ basis


def lift(low_rank: Float[Tensor, "_ _"], basis: Float[Tensor, "short rank"], *, out: Float[Tensor, "m n"]) -> None:
    """Set `out` to P·Y for m ≤ n and to Y·Pᵀ for m > n, from which `project` returns Y (modified in place)."""
    torch.mm(*factors(low_rank, basis, wide=is_wide(out)), out=out)


def factors(
    low_rank: Float[Tensor, "_ _"], basis: Float[Tensor, "short rank"], *, wide: bool
) -> tuple[Float[Tensor, "m _"], Float[Tensor, "_ n"]]:
    """Return the two matrices whose product is Y at full size: (P, Y), or (Y, Pᵀ) if the matrix is not wide."""
    return (basis, low_rank) if wide else (low_rank, basis.mT)


def in_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values themselves, or a float32 copy if they are of half precision."""
    return values.float() if values.itemsize < 4 else values


def same(first: Shaped[Tensor, "..."], second: Shaped[Tensor, "..."]) -> bool:
    """Return whether two tensors hold the same numbers, of which some may be NaN."""
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())


def sums_of_bytes(values: Shaped[Tensor, "..."]) -> Int64[Tensor, "2"]:
    """Return the sum of the whole words of eight bytes of a tensor, modulo 2⁶⁴, and that of the bytes after them."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    # A view into a larger tensor may begin within a word.
    words = flat[:whole].clone() if flat.storage_offset() % 8 else flat[:whole]
    return torch.stack([words.view(torch.int64).sum(), flat[whole:].sum(dtype=torch.int64)])


@contextlib.contextmanager
def highest_conv_precision() -> Iterator[None]:
    """Convolve float32 numbers in float32 on CUDA, where torch lets cuDNN round them to TF32 unless told otherwise."""
    cudnn: Any = torch.backends.cudnn
    switches = cudnn.conv, cudnn.rnn
    before = [switch.fp32_precision for switch in switches]
    try:
        for_all = cudnn.allow_tf32
    except RuntimeError:  # as below
        for_all = None
    else:
        cudnn.allow_tf32 = False  # or code that asks for it in the block would be told of a contradiction
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        if for_all is not None:
            cudnn.allow_tf32 = for_all
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


@contextlib.contextmanager
def highest_matmul_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever the user has allowed (TF32, bfloat16) for the model."""
    switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    before = [switch.fp32_precision for switch in switches]
    try:
        for_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch does not let it be read, nor set, once the switches of the backends are in use
        for_all = None
        for switch in switches:
            switch.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if for_all is not None:
            torch.set_float32_matmul_precision(for_all)
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
