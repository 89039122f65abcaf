"""Algorithm 3 for all parameters on a GPU in one kernel, which reads and writes each number once.

    m ← s_1 + b_0 g,    s_i ← s_{i+1} + b_i g - a_i m,    v ← β₂ v + (1 - β₂) g²
    x ← decay·x - step_size·m / √max(v - noise_var, floor)

The kernel computes what `update` computes, in float32, or in float64 for weights in float64. Half precision is rounded once,
when the result is written. The kernel reads the addresses of the tensors from a table of 64-bit words:

    β₂ | 1 - β₂ | b_0 … b_K | a_0 … a_K |
    for each tensor: size, first program, step_size, decay, noise_var, floor, addresses of x, g, s_1 … s_K and v

A program updates `BLOCK` numbers of one tensor.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int64

from doppler_hf import triton_support
from doppler_hf.optim.update import ParameterTensors, Step, StepConstants, full_dtype

BLOCK: Final = 2048
_WARPS: Final = 8  # Each lane then has 8 numbers, which are one 16-byte vector in half precision.


@triton.jit
def _read(row, word: tl.constexpr, start, lanes, count, WHOLE: tl.constexpr, T: tl.constexpr, S: tl.constexpr):
    numbers = tl.load(row + word).to(tl.pointer_type(T))
    if WHOLE:
        found = tl.load(tl.multiple_of(numbers, 16) + start + lanes)
    else:
        found = tl.load(numbers + start + lanes, mask=lanes < count, other=0.0)
    return found.to(S)


@triton.jit
def _write(row, word: tl.constexpr, start, lanes, count, value, WHOLE: tl.constexpr, T: tl.constexpr):
    numbers = tl.load(row + word).to(tl.pointer_type(T))
    if WHOLE:
        tl.store(tl.multiple_of(numbers, 16) + start + lanes, value.to(T))
    else:
        tl.store(numbers + start + lanes, value.to(T), mask=lanes < count)


@triton.jit
def _number(place, S: tl.constexpr):
    return tl.load(place).to(tl.float64, bitcast=True).to(S)


@triton.jit
def _over_root(x, y, S: tl.constexpr):
    # Triton's default division and root are approximate in float32, so the variants that round correctly are used.
    return x / tl.sqrt(y) if tl.float64 == S else tl.div_rn(x, tl.sqrt_rn(y))


@triton.jit
def _update_block(
    table, row, start, count, BLOCK: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, HAS_V: tl.constexpr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    x = _read(row, 6, start, lanes, count, WHOLE, X, S)
    g = _read(row, 7, start, lanes, count, WHOLE, G, S)
    change = g * _number(table + 2, S)  # This becomes m, and then m / √(v̂ - n̂).
    if K > 0:
        change += _read(row, 8, start, lanes, count, WHOLE, S, S)
    m = change
    if HAS_V:
        v = _read(row, 8 + K, start, lanes, count, WHOLE, S, S) * _number(table, S) + g * g * _number(table + 1, S)
        # Like torch's clamp, the maximum keeps NaN.
        corrected = tl.maximum(v - _number(row + 4, S), _number(row + 5, S), propagate_nan=tl.PropagateNan.ALL)
        change = _over_root(change, corrected, S)
        _write(row, 8 + K, start, lanes, count, v, WHOLE, S)
    _write(row, 6, start, lanes, count, x * _number(row + 3, S) - change * _number(row + 2, S), WHOLE, X)
    for i in tl.static_range(1, K + 1):
        state = g * _number(table + 2 + i, S) - m * _number(table + 3 + K + i, S)
        if i < K:
            state += _read(row, 8 + i, start, lanes, count, WHOLE, S, S)
        _write(row, 7 + i, start, lanes, count, state, WHOLE, S)


@triton.jit
def _update(
    table, owner, BLOCK: tl.constexpr, K: tl.constexpr, HAS_V: tl.constexpr, X: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = table + 4 + 2 * K + tl.load(owner + program) * (8 + K + HAS_V)
    start = (program - tl.load(row + 1)) * BLOCK
    count = tl.minimum(tl.load(row) - start, BLOCK).to(tl.int32)
    bits = tl.load(row + 6)
    for word in tl.static_range(7, 8 + K + HAS_V):
        bits |= tl.load(row + word)
    # Vector loads of 16 bytes need addresses that are multiples of 16, and no mask.
    if (bits % 16 == 0) & (count == BLOCK):
        _update_block(table, row, start, count, BLOCK, True, K, HAS_V, X, G, S)
    else:
        _update_block(table, row, start, count, BLOCK, False, K, HAS_V, X, G, S)


def fused_update(steps: Sequence[Step]) -> list[Step]:
    """Make the steps of all parameters that the kernel supports (everything but the gradients is modified in place).

    Returns:
        The steps that are left. The kernel does not support other devices, tensors that are not contiguous, and weights
        that overlap in memory (as where PEFT ties adapters), because one launch would lose one of their steps.
    """
    kinds: dict[Any, list[Step]] = {}
    for step in steps:
        kinds.setdefault(_kind(*step), []).append(step)
    left = kinds.pop(None, [])
    for some in kinds.values():
        left += _launch(some)
    return left


def _kind(tensors: ParameterTensors, constants: StepConstants) -> tuple[Any, ...] | None:
    """Return the properties that all steps of one launch share; None if the kernel does not support the step."""
    weight, grad, v = tensors.weight, tensors.grad, tensors.exp_avg_sq
    device, dtype = weight.device, full_dtype(weight)
    if not (weight.is_contiguous() and grad.is_contiguous()):
        return None
    for state in tensors.filter_states if v is None else (*tensors.filter_states, v):
        if not (state.is_contiguous() and state.device == device and state.dtype == dtype):
            return None
    kind = constants.coefficients, constants.beta2, device, weight.dtype, grad.dtype, v is None
    return kind if triton_support.are_usable(device) else None


def _launch(steps: Sequence[Step]) -> list[Step]:
    """Make the steps of one kind, and return the steps of weights that overlap other weights."""
    tensors, constants = steps[0]
    weight = tensors.weight
    sizes = np.array([each.weight.numel() for each, _ in steps])
    addresses = np.array([[triton_support.address_of(tensor) for tensor in each.of_shape] for each, _ in steps])
    are_disjoint = _are_disjoint(addresses[:, 0], sizes * weight.itemsize)
    programs = np.where(are_disjoint, -(-sizes // BLOCK), 0)
    numbers = np.array([(each.step_size, each.decay, each.noise_var, each.floor) for _, each in steps])
    rows = np.column_stack([sizes, np.cumsum(programs) - programs, numbers.view(np.int64), addresses])
    b_and_a = list(zip_longest(*constants.coefficients, fillvalue=0.0))
    order, has_v = len(b_and_a) - 1, tensors.exp_avg_sq is not None
    assert addresses.shape[1] == 2 + order + has_v
    header = np.array([constants.beta2, 1 - constants.beta2, *(b for b, _ in b_and_a), *(a for _, a in b_and_a)])
    if count := int(programs.sum()):
        triton_support.launch(
            _update,
            (count,),
            np.concatenate([header.view(np.int64), rows.reshape(-1)]),
            triton_support.owners_of_programs(programs),
            device=weight.device,
            BLOCK=BLOCK,
            K=order,
            HAS_V=has_v,
            X=triton_support.triton_dtype(weight.dtype),
            G=triton_support.triton_dtype(tensors.grad.dtype),
            S=triton_support.triton_dtype(full_dtype(weight)),
            num_warps=_WARPS,
        )
        # Torch's own operators count versions too, so that autograd notices the change.
        torch.autograd.graph.increment_version([each.weight for each, _ in steps])
    return [step for step, is_disjoint in zip(steps, are_disjoint, strict=True) if not is_disjoint]


def _are_disjoint(
    starts: Int64[np.ndarray, " tensors"], sizes: Int64[np.ndarray, " tensors"]
) -> Bool[np.ndarray, " tensors"]:
    """Return for each range of bytes whether it begins after the end of all ranges with an earlier start."""
    order = np.argsort(starts, kind="stable")
    ends = np.maximum.accumulate((starts + sizes)[order])
    disjoint = np.ones(len(starts), dtype=bool)
    disjoint[order[1:]] = starts[order[1:]] >= ends[:-1]
    return disjoint
