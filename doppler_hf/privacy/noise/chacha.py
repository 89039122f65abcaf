"""The release on an accelerator, in one kernel over all tensors: secret noise, its shape over the steps, and the mean.

    g ← (s + y_t)·scale,    y_t = z − Σ_{k≥1} c_k·y_{t−k},    z ~ 𝒩(0, std²) by Box–Muller from the words of ChaCha20

ChaCha20 (RFC 8439, with a nonce of zeros) is a stream cipher, as AES in counter mode is, made of additions and rotations. An
attacker who could tell its words from coin flips would have broken it, even one who reads the noise of single coordinates.
Each launch has a key of its own from the operating system, so that no word can come twice, whatever is forked, resumed or
tried again. A block of the cipher is 64 bytes: eight normals of 64 random bits each, computed in float64 as in `gaussian`.
The value is rounded once, when it is written.

The kernel takes tensors of one dtype by their addresses, from a table of 64-bit words:

    4 words of key | std | scale | c_1 … c_K | of each tensor: address, size, first program, y_t, y_{t−1} … y_{t−K}
"""

import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from doppler_hf import triton_support

# How many blocks of the cipher a program computes, one in each lane, and how many normals follow from a block.
LANES: Final = 256
_NORMALS: Final = 8
_WARPS: Final = 8


@triton.jit
def _quarter_round(a, b, c, d):
    # The rounds are written out, because Triton's interpreter takes longer for a call than for the work inside it.
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _half(table, word: tl.constexpr, zeros):
    return zeros + (tl.load(table + word // 2) >> 32 * (word % 2)).to(tl.uint32)


@triton.jit
def _block(table, counter, LANES: tl.constexpr):
    """Return the sixteen words of the blocks of a counter, RFC 8439, section 2.3."""
    o = tl.zeros([LANES], tl.uint32)
    c0, c1, c2, c3 = o + 0x61707865, o + 0x3320646E, o + 0x79622D32, o + 0x6B206574
    k0, k1, k2, k3 = _half(table, 0, o), _half(table, 1, o), _half(table, 2, o), _half(table, 3, o)
    k4, k5, k6, k7 = _half(table, 4, o), _half(table, 5, o), _half(table, 6, o), _half(table, 7, o)
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, xa, xb, xc, xd, xe, xf = k4, k5, k6, k7, counter, o, o, o
    for _ in range(10):
        x0, x4, x8, xc = _quarter_round(x0, x4, x8, xc)
        x1, x5, x9, xd = _quarter_round(x1, x5, x9, xd)
        x2, x6, xa, xe = _quarter_round(x2, x6, xa, xe)
        x3, x7, xb, xf = _quarter_round(x3, x7, xb, xf)
        x0, x5, xa, xf = _quarter_round(x0, x5, xa, xf)
        x1, x6, xb, xc = _quarter_round(x1, x6, xb, xc)
        x2, x7, x8, xd = _quarter_round(x2, x7, x8, xd)
        x3, x4, x9, xe = _quarter_round(x3, x4, x9, xe)
    x0, x1, x2, x3, x4, x5, x6, x7 = x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3
    x8, x9, xa, xb, xc = x8 + k4, x9 + k5, xa + k6, xb + k7, xc + counter
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, xa, xb, xc, xd, xe, xf


@triton.jit
def _uniform(low, high):
    # An integer plus one half is never 0. A float64 is most precise near 0, where the logarithm needs precision.
    return (high.to(tl.float64) * 4294967296.0 + low.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2⁻⁶⁴


@triton.jit
def _pair(a, b, c, d, std):
    radius = std * tl.sqrt(-2.0 * tl.log(_uniform(a, b)))
    angle = 6.283185307179586 * _uniform(c, d)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _write(table, row, at, size, y, scale, K: tl.constexpr, SHAPED: tl.constexpr, T: tl.constexpr):
    inside = at < size
    sums = tl.load(row).to(tl.pointer_type(T)) + at
    if SHAPED:
        for k in tl.static_range(K):
            past = tl.load(row + 4 + k).to(tl.pointer_type(T)) + at
            y -= tl.load(table + 6 + k).to(tl.float64, bitcast=True) * tl.load(past, mask=inside, other=0.0).to(tl.float64)
        tl.store(tl.load(row + 3).to(tl.pointer_type(T)) + at, y.to(T), mask=inside)
    value = (tl.load(sums, mask=inside, other=0.0).to(tl.float64) + y) * scale
    tl.store(sums, value.to(T), mask=inside)


@triton.jit
def _release(table, owner, LANES: tl.constexpr, TERMS: tl.constexpr, K: tl.constexpr, SHAPED: tl.constexpr, T: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = table + 6 + K + tl.load(owner + program) * (4 + K)
    size = tl.load(row + 1)
    std = tl.load(table + 4).to(tl.float64, bitcast=True)
    scale = tl.load(table + 5).to(tl.float64, bitcast=True)
    o = tl.zeros([LANES], tl.float64)
    z0, z1, z2, z3, z4, z5, z6, z7 = o, o, o, o, o, o, o, o
    lane = tl.arange(0, LANES)
    for term in tl.static_range(TERMS):
        counter = ((program * TERMS + term) * LANES + lane).to(tl.uint32)
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, wa, wb, wc, wd, we, wf = _block(table, counter, LANES)
        a0, a1 = _pair(w0, w1, w2, w3, std)
        a2, a3 = _pair(w4, w5, w6, w7, std)
        a4, a5 = _pair(w8, w9, wa, wb, std)
        a6, a7 = _pair(wc, wd, we, wf, std)
        z0, z1, z2, z3, z4, z5, z6, z7 = z0 + a0, z1 + a1, z2 + a2, z3 + a3, z4 + a4, z5 + a5, z6 + a6, z7 + a7
    at = (program - tl.load(row + 2)) * LANES * 8 + lane
    _write(table, row, at, size, z0, scale, K, SHAPED, T)
    _write(table, row, at + LANES, size, z1, scale, K, SHAPED, T)
    _write(table, row, at + 2 * LANES, size, z2, scale, K, SHAPED, T)
    _write(table, row, at + 3 * LANES, size, z3, scale, K, SHAPED, T)
    _write(table, row, at + 4 * LANES, size, z4, scale, K, SHAPED, T)
    _write(table, row, at + 5 * LANES, size, z5, scale, K, SHAPED, T)
    _write(table, row, at + 6 * LANES, size, z6, scale, K, SHAPED, T)
    _write(table, row, at + 7 * LANES, size, z7, scale, K, SHAPED, T)


def add_noise_and_scale(
    values: Sequence[Float[Tensor, "..."]],
    *,
    std: float,
    scale: float,
    terms: int = 1,
    coefficients: Sequence[float] = (),
    states: Sequence[Sequence[Float[Tensor, "..."]]] = (),
) -> None:
    """Add noise to every coordinate of some tensors, and multiply them (modified in place).

    Args:
        values: Contiguous tensors of one dtype on one accelerator.
        std: Standard deviation of the white noise, in the units of the values.
        scale: The factor, after the noise was added.
        terms: How many independent normals make one, each of std/√terms.
        coefficients: c_1, …, c_K, for shaped noise.
        states: For shaped noise, of each tensor y_t (overwritten) and y_{t−1}, …, y_{t−K}, of its shape and dtype.
    """
    values, states = [value for value in values if value.numel()], [state for state in states if state[0].numel()]
    if not values:
        return
    device, dtype = values[0].device, values[0].dtype
    assert all(each.is_contiguous() and each.dtype == dtype for state in (values, *states) for each in state)
    sizes = np.array([value.numel() for value in values])
    programs = -(-sizes // (LANES * _NORMALS))
    firsts = np.cumsum(programs) - programs
    # Privacy: the cipher's counter has 32 bits, and no value of it may be used twice under one key.
    assert programs.sum() * LANES * terms <= 1 << 32, "too many coordinates for one key"
    rows = np.zeros((len(values), 4 + len(coefficients)), dtype=np.int64)
    rows[:, 0] = [triton_support.address_of(value) for value in values]
    rows[:, 1], rows[:, 2] = sizes, firsts
    for row, state in zip(rows, states, strict=False):
        row[3:] = [triton_support.address_of(each) for each in state]
    key = np.frombuffer(os.urandom(32), dtype=np.int64)
    numbers = np.array([std / terms**0.5, scale, *coefficients]).view(np.int64)
    triton_support.launch(
        _release,
        (int(programs.sum()),),
        np.concatenate([key, numbers, rows.reshape(-1)]),
        triton_support.owners_of_programs(programs),
        device=device,
        LANES=LANES,
        TERMS=terms,
        K=len(coefficients),
        SHAPED=bool(states),
        T=triton_support.triton_dtype(dtype),
        num_warps=_WARPS,
    )
