"""Norms and sums on an accelerator, in a few kernels for all layers of a model.

    compare           of products g = lᵀr: Σ_st L_st R_st, Σ_st |L_st R_st| and Σ_t ‖l_t‖‖r_t‖, for the norm
    weighed           one factor of each product, multiplied by its example's clip factor
    normalized_sums   the gradients of a normalization's weight and bias

Gram matrices are made tile by tile and never written: of a pair of tiles beside the diagonal, which are each other's
transposes, one. Factors of half precision are multiplied as they are, since a product of two such numbers is exact in
float32, in which they are added up.

Sensitivity: a program reads rows of one example alone, and writes what is that example's. `compare` reads the factors that
`weighed` multiplies, and what `weighed` rounds is in the clip factor already.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from doppler_hf import triton_support

# The places in a tile, and how many numbers of a place are multiplied at a time.
TILE: Final = 64
_DEPTH: Final = 64
# So many numbers are added up before they are added to the rest, so that small numbers are not lost beside a large sum.
_RUN: Final = 1024
# How many numbers a program multiplies by their factors at a time, and how many programs work on an example.
CHUNK: Final = 4096
_PIECES: Final = 4
# Tensors of up to so many bytes are copied together and multiplied by their factors in one kernel.
AT_ONCE: Final = 2**26
_ROWS: Final = 32
_COLUMNS: Final = 128
_WARPS: Final = 4

Key = TypeVar("Key")


@triton.jit
def _gram(
    factor,
    s,
    t,
    time,
    dim,
    INTERPRETED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return the inner products of the places s with the places t."""
    total = tl.zeros([TILE, TILE], tl.float32)
    column = tl.arange(0, DEPTH)
    first, second = factor + s[:, None] * dim, factor + t[:, None] * dim
    for begin in range(0, dim, RUN):
        part = tl.zeros([TILE, TILE], tl.float32)
        for at in range(begin, tl.minimum(begin + RUN, dim), DEPTH):
            inside = (at + column < dim)[None, :]
            one = tl.load(first + at + column[None, :], mask=(s < time)[:, None] & inside, other=0.0)
            two = tl.load(second + at + column[None, :], mask=(t < time)[:, None] & inside, other=0.0)
            if INTERPRETED:  # The interpreter would multiply the bit patterns of bfloat16 numbers.
                one, two = one.to(tl.float32), two.to(tl.float32)
            part = tl.dot(one, tl.trans(two), part, input_precision="ieee")
        total += part
    return total


@triton.jit
def _tiles_of(pair):
    """Return the tiles i and j of a pair, with j ≤ i; pairs are counted row by row, from i = 0."""
    i = ((tl.sqrt_rn(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int64)
    # The root may be wrong by less than one, because it is rounded.
    i -= (i * (i + 1) // 2 > pair).to(tl.int64)
    i += ((i + 1) * (i + 2) // 2 <= pair).to(tl.int64)
    return i, pair - i * (i + 1) // 2


@triton.jit
def _compare(
    table,
    found,
    most,
    VANISHED: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    IS_LOOKUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    RUN: tl.constexpr,
):
    program, row = tl.program_id(0).to(tl.int64), table + tl.program_id(1) * 5
    time, p, q = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    tiles = tl.cdiv(time, TILE)
    pairs = tiles * (tiles + 1) // 2
    example, pair = program // most, program % most
    if pair < pairs:
        i, j = _tiles_of(pair)
        s, t = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        left = tl.load(row).to(tl.pointer_type(L)) + example * time * p
        right = tl.load(row + 1).to(tl.pointer_type(R)) + example * time * q
        if ALIGNED:
            left, p = tl.multiple_of(left, 16), tl.multiple_of(p, 16)
            if not IS_LOOKUP:
                right, q = tl.multiple_of(right, 16), tl.multiple_of(q, 16)
        of_left = _gram(left, s, t, time, p, INTERPRETED, TILE, DEPTH, RUN)
        if IS_LOOKUP:
            one = tl.load(right + s, mask=s < time, other=-1)
            of_right = (one[:, None] == tl.load(right + t, mask=t < time, other=-2)[None, :]).to(tl.float32)
        else:
            of_right = _gram(right, s, t, time, q, INTERPRETED, TILE, DEPTH, RUN)
        terms = of_left * of_right
        times = tl.where(i == j, 1.0, 2.0)
        out = found + (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + program) * 3
        tl.store(out, times * tl.sum(tl.sum(terms, 1), 0))
        tl.store(out + 1, times * tl.sum(tl.sum(tl.abs(terms), 1), 0))
        is_own = (s[:, None] == t[None, :]) & (s < time)[:, None]
        sizes = tl.sqrt_rn(tl.where(is_own, (of_left + VANISHED) * (of_right + VANISHED), 0.0))
        tl.store(out + 2, tl.sum(tl.sum(sizes, 1), 0))


def compare(
    products: Sequence[
        tuple[Float[Tensor, "examples time p"], Float[Tensor, "examples time q"] | Int[Tensor, "examples time"]]
    ],
    *,
    vanished: float,
) -> list[Float[Tensor, "examples 3"]]:
    """Return Σ L∘R, Σ |L∘R| and Σ_t ‖l_t‖‖r_t‖ of each product's examples.

    Args:
        products: The factors l and r of each, contiguous, of one floating-point dtype; or l and the rows of a table that
            were looked up, of which R_st is 1 if both are the same, and else 0.
        vanished: What is added to Gram matrices before the root is taken.
    """
    found: list[Tensor] = [products[0][0]] * len(products)
    kinds: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[int]] = {}
    for index, (left, right) in enumerate(products):
        is_aligned = all(
            each.shape[2:].numel() % 16 == 0 and triton_support.address_of(each) % 16 == 0
            for each in (left, right)
            if each.ndim > 2
        )
        kinds.setdefault((left.dtype, right.dtype, right.ndim == 2, is_aligned), []).append(index)
    for (of_left, of_right, is_lookup, is_aligned), indices in kinds.items():
        some = [products[index] for index in indices]
        device, examples = some[0][0].device, len(some[0][0])
        rows = [
            (*map(triton_support.address_of, (left, right)), left.shape[1], left.shape[2], right.shape[2:].numel())
            for left, right in some
        ]
        tiles = [-(-left.shape[1] // TILE) for left, _ in some]
        most = max(count * (count + 1) // 2 for count in tiles)
        out = torch.zeros(len(some), examples, most, 3, dtype=torch.float32, device=device)
        triton_support.launch(
            _compare,
            (examples * most, len(some)),
            np.array(rows, dtype=np.int64).reshape(-1),
            out,
            most,
            device=device,
            VANISHED=vanished,
            L=triton_support.triton_dtype(of_left),
            R=triton_support.triton_dtype(of_right),
            IS_LOOKUP=is_lookup,
            ALIGNED=is_aligned,
            INTERPRETED=triton.knobs.runtime.interpret,
            TILE=TILE,
            DEPTH=_DEPTH // (1 if of_left.itemsize == 2 else 2),
            RUN=_RUN,
            num_warps=_WARPS,
        )
        for index, terms in zip(indices, out.squeeze(2) if most == 1 else out.sum(dim=2), strict=True):
            found[index] = terms
    return found


@triton.jit
def _weigh(
    table,
    T: tl.constexpr,
    OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
):
    example, row, piece = tl.program_id(0).to(tl.int64), table + tl.program_id(1) * 6, tl.program_id(2).to(tl.int64)
    count, others = tl.load(row + 4), tl.load(row + 5)
    source, out = tl.load(row).to(tl.pointer_type(T)), tl.load(row + 1).to(tl.pointer_type(OUT))
    if ALIGNED:
        source, out, count = tl.multiple_of(source, 16), tl.multiple_of(out, 16), tl.multiple_of(count, 16)
    factor = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.float32)) + example)
    is_finite = factor == factor
    for begin in range(piece * CHUNK, count, PIECES * CHUNK):
        at = begin + tl.arange(0, CHUNK)
        value = tl.load(source + example * count + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(out + example * count + at, tl.where(is_finite, value * factor, 0.0).to(OUT), mask=at < count)
    if factor != factor:
        other = tl.load(row + 2).to(tl.pointer_type(T)) + example * others
        for begin in range(piece * CHUNK, others, PIECES * CHUNK):
            at = begin + tl.arange(0, CHUNK)
            # Tensors with finite numbers stay as they are: they may be a user's inputs, or a weight that was expanded to a
            # batch of one.
            size = tl.abs(tl.load(other + at, mask=at < others, other=0.0).to(tl.float32))
            tl.store(other + at, tl.zeros([CHUNK], T), mask=(at < others) & ((size == float("inf")) | (size != size)))


def weighed(
    products: dict[
        Key, tuple[Float[Tensor, "examples time p"], Float[Tensor, "examples time q"], Float[Tensor, " examples"]]
    ],
) -> Iterator[tuple[Key, Float[Tensor, "examples time p"], Float[Tensor, "examples time q"]]]:
    """Yield the factors l and r of products, with the narrower one multiplied by its example's clip factor.

    In bfloat16 it is rounded to it once: see `gradients.Squares.roundings`. Of float16, whose range is small, it is float32.

    Args:
        products: l, r and the clip factors of each (taken out, not in order). Contiguous, l and r of one dtype, the clip
            factors of float32. NaN marks an example that is left out: what is not finite in its wider factor becomes zero
            (modified in place), since 0·∞ would be NaN.
    """
    while products:
        some = _run(products)
        (left, _, _), *_ = some.values()
        out_dtype = torch.float32 if left.dtype == torch.float16 else left.dtype
        narrow = {key: l if l.shape[2] <= r.shape[2] else r for key, (l, r, _) in some.items()}
        wide = {key: r if l.shape[2] <= r.shape[2] else l for key, (l, r, _) in some.items()}
        scaled = {key: torch.empty_like(values, dtype=out_dtype) for key, values in narrow.items()}
        factors = [factors for *_, factors in some.values()]
        columns = [
            [*map(triton_support.address_of, each)] for each in (narrow.values(), scaled.values(), wide.values(), factors)
        ]
        counts = [[values[0].numel() for values in each.values()] for each in (narrow, wide)]
        table = np.array([*columns, *counts], dtype=np.int64).T
        triton_support.launch(
            _weigh,
            (len(left), len(some), _PIECES),
            np.ascontiguousarray(table).reshape(-1),
            device=left.device,
            T=triton_support.triton_dtype(left.dtype),
            OUT=triton_support.triton_dtype(out_dtype),
            ALIGNED=not (table[:, [0, 1, 4]] % 16).any(),
            CHUNK=CHUNK,
            PIECES=_PIECES,
            num_warps=_WARPS,
        )
        for key in tuple(some):
            l, r, _ = some.pop(key)
            yield (key, scaled.pop(key), r) if narrow.pop(key) is l else (key, l, scaled.pop(key))
            del wide[key]


def _run(products: dict[Key, tuple[Tensor, Tensor, Tensor]]) -> dict[Key, tuple[Tensor, Tensor, Tensor]]:
    """Take out products of one dtype, as many as are weighed in one go."""
    some: dict[Key, tuple[Tensor, Tensor, Tensor]] = {}
    size, dtype = 0, next(iter(products.values()))[0].dtype
    for key, (left, right, _) in tuple(products.items()):
        size += min(left.nbytes, right.nbytes)
        if not some or (left.dtype == dtype and size <= AT_ONCE):
            some[key] = products.pop(key)
    return some


@triton.jit
def _sum_normalized(x, mean, rstd, grad, of_weight, of_bias, time, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight, bias = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, time, ROWS):
        place = begin + tl.arange(0, ROWS)
        row = example * time + place
        is_place = place < time
        inside = is_place[:, None] & (column < n)[None, :]
        at = row[:, None] * n + column[None, :]
        middle = tl.load(mean + row, mask=is_place, other=0.0).to(tl.float32)[:, None]
        scale = tl.load(rstd + row, mask=is_place, other=0.0).to(tl.float32)[:, None]
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        weight += tl.sum((tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - middle) * scale * gradient, 0)
        bias += tl.sum(gradient, 0)
    tl.store(of_weight + example * n + column, weight, mask=column < n)
    tl.store(of_bias + example * n + column, bias, mask=column < n)


def normalized_sums(
    x: Float[Tensor, "rows time n"],
    mean: Float[Tensor, "rows time 1"],
    rstd: Float[Tensor, "rows time 1"],
    grad: Float[Tensor, "rows time n"],
) -> tuple[Float[Tensor, "rows n"], Float[Tensor, "rows n"]]:
    """Return Σ_t (x − mean)·rstd ∘ grad and Σ_t grad of every row, in float32."""
    rows, time, n = x.shape
    of_weight, of_bias = torch.empty(2, rows, n, dtype=torch.float32, device=x.device)
    tensors = (x.contiguous(), mean.contiguous(), rstd.contiguous(), grad.contiguous(), of_weight, of_bias)
    grid, options = (rows, -(-n // _COLUMNS)), {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
    triton_support.launch(_sum_normalized, grid, *tensors, time, n, device=x.device, num_warps=_WARPS, **options)
    return of_weight, of_bias
