"""Algorithm 3: weight decay, the filter, the second moment, and the resulting step.

`update` makes a dozen passes over memory, so it works on `packs` that stay in the cache: slices of large tensors, or many
small tensors at once, since for these the calls take longer than the numbers. On a GPU, `fused_update` does the same in one
pass, for all tensors.

The filter stage: m̂_t = m_t / c_t (DOPPLER, Algorithm 2, lines 6-8), in the transposed direct form II.

    m_t = s_1 + b_0 g_t,    s_i ← s_{i+1} + b_i g_t - a_i m_t    (i = 1 ... n, s_{n+1} = 0),

with n = max(n_a, n_b) states instead of n_a + n_b (Oppenheim and Schafer, *Discrete-Time Signal Processing*, Section 6.4).

In float32 the rounding error of the states grows with the order and with 1/cutoff: 1e-6 relative for the paper's filters,
1e-2 for a Butterworth filter of order 4 with its cutoff at 0.02 of Nyquist. At a very low cutoff, use a low order.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import LowPassFilter

Coefficients = tuple[tuple[float, ...], tuple[float, ...]]  # b and a, the latter with order + 1 numbers
Base = Literal["sgd", "adam", "adam_bc", "muon"]
BASES: Final[tuple[Base, ...]] = get_args(Base)
# Both subtract the variance of the noise from the second moment: Muon is AdamBC whose updates are orthogonalized.
CORRECTED: Final[tuple[Base, ...]] = ("adam_bc", "muon")
CPU_SLICE: Final = 9 * 2**15  # Half a 768 × 768 matrix; gradient, weight, states and temporaries then fit into the cache.
DEVICE_SLICE: Final = 2**24  # On an accelerator, this bounds the memory of the temporaries.


@dataclass(slots=True)
class ParameterTensors:
    """The tensors that a step of one parameter reads and writes: x_t, g_t, the filter's states, and v_{t-1} if used."""

    weight: Float[Tensor, "*shape"]
    grad: Float[Tensor, "*shape"]
    filter_states: list[Float[Tensor, "*shape"]]
    exp_avg_sq: Float[Tensor, "*shape"] | None = None

    @property
    def of_shape(self) -> list[Float[Tensor, "*shape"]]:
        """All tensors with the parameter's shape: weight, gradient, filter states, second moment."""
        v = self.exp_avg_sq
        return [self.weight, self.grad, *self.filter_states, *(() if v is None else (v,))]


class StepConstants(NamedTuple):
    """The constants of a step; they contain the correction for the zero start of the second moment, k_t = 1 - β₂ᵗ."""

    coefficients: Coefficients  # coefficients of the filter
    beta2: float = 0.0
    step_size: float = 0.0  # lr / c_t, times √k_t if there is a second moment
    decay: float = 1.0  # 1 - lr·weight_decay
    noise_var: float = 0.0  # k_t times the mean variance of the noise, with the weights of the second moment
    floor: float = 0.0  # k_t times the smallest squared denominator


Step = tuple[ParameterTensors, StepConstants]


def full_dtype(p: Tensor) -> torch.dtype:
    """Return the parameter's dtype, or float32 if it has half precision."""
    return torch.float32 if p.itemsize < 4 else p.dtype


def slices(tensors: ParameterTensors) -> Iterator[ParameterTensors]:
    """Yield slices of a parameter's tensors that fit into the cache; tensors that are not contiguous are yielded whole."""
    size = CPU_SLICE if tensors.weight.device.type == "cpu" else DEVICE_SLICE
    numel, of_shape = tensors.weight.numel(), tensors.of_shape
    if numel <= size or not all(tensor.is_contiguous() for tensor in of_shape):
        yield tensors
        return
    for weight, grad, *states in zip(*(tensor.view(-1).split(size) for tensor in of_shape), strict=True):
        v = None if tensors.exp_avg_sq is None else states.pop()
        yield ParameterTensors(weight, grad, states, v)


def packs(steps: Iterable[Step]) -> Iterator[tuple[list[ParameterTensors], StepConstants]]:
    """Yield slices of parameters that have the same constants, as many at once as fit into the cache together.

    Parameters of one storage, such as tied adapters, are in different packs: each reads what the one before has written.
    """
    open_packs: dict[StepConstants, tuple[int, list[ParameterTensors]]] = {}
    storages: set[int] = set()
    for tensors, constants in steps:
        if (storage := tensors.weight.untyped_storage()._cdata) in storages:
            yield from ((pack, those) for those, (_, pack) in open_packs.items())
            open_packs, storages = {}, set()
        storages.add(storage)
        for part in slices(tensors):
            size, pack = open_packs.get(constants, (0, []))
            numel = part.weight.numel()
            if pack and size + numel > CPU_SLICE:
                yield pack, constants
                size, pack = 0, []
            pack.append(part)
            open_packs[constants] = size + numel, pack
    yield from ((pack, those) for those, (_, pack) in open_packs.items())


def update(steps: Iterable[Step]) -> None:
    """Make one step of Algorithm 3 for some parameters (everything but the gradients is modified in place).

    The second moment is that of the *unfiltered* gradient, in torch's convention of β₂. DPAdamBC subtracts the variance of
    the noise from it (Tang et al. 2024), which the paper's listing leaves out. The corrections c_t and k_t are in the
    constants: √max(v̂ - n̂, floor) = √max(v - n, k floor) / √k.
    """
    for pack, constants in packs(steps):
        _update_pack(pack, constants)


def _update_pack(pack: Sequence[ParameterTensors], constants: StepConstants) -> None:
    x = [tensors.weight.to(full_dtype(tensors.weight)) for tensors in pack]
    g = [tensors.grad.to(full_dtype(tensors.grad)) for tensors in pack]
    m = low_pass(g, [tensors.filter_states for tensors in pack], constants.coefficients)
    # In half precision, decay and step are rounded together, once. A decay of 1 - 1e-5 would be lost if rounded alone.
    if constants.decay != 1.0:
        torch._foreach_mul_(x, constants.decay)
    v = [tensors.exp_avg_sq for tensors in pack if tensors.exp_avg_sq is not None]
    if not v:
        torch._foreach_add_(x, m, alpha=-constants.step_size)
    else:
        torch._foreach_mul_(v, constants.beta2)
        torch._foreach_addcmul_(v, g, g, value=1 - constants.beta2)
        # A division by the root would take half as long again on a CPU.
        reciprocal = torch._foreach_sub(v, constants.noise_var)
        torch._foreach_clamp_min_(reciprocal, constants.floor)
        torch._foreach_rsqrt_(reciprocal)
        torch._foreach_addcmul_(x, m, reciprocal, value=-constants.step_size)
    for tensors, weight in zip(pack, x, strict=True):
        if weight is not tensors.weight:
            tensors.weight.copy_(weight)


def low_pass(
    grads: list[Float[Tensor, "..."]], states: Sequence[list[Float[Tensor, "..."]]], coefficients: Coefficients
) -> list[Float[Tensor, "..."]]:
    """Advance the filters of some tensors by one step. Return each m_t, a new tensor (`states` are modified in place)."""
    b, a = coefficients
    if len(a) == 1:
        return list(torch._foreach_mul(grads, b[0]))
    m = list(torch._foreach_add([own[0] for own in states], grads, alpha=b[0]))
    for own, m_t in zip(states, m, strict=True):
        for i, (s_i, later) in enumerate(zip_longest(own, own[1:]), start=1):
            if later is None:
                torch.mul(m_t, -a[i], out=s_i)
            else:
                torch.add(later, m_t, alpha=-a[i], out=s_i)
    # A pass over a state for a coefficient of zero would cost as much as any other.
    for i in range(1, len(b)):
        torch._foreach_add_([own[i - 1] for own in states], grads, alpha=b[i])
    return m


@functools.lru_cache  # Most parameters have made the same number of steps, so the arguments repeat.
def bias_correction(states: tuple[float, ...], coefficients: Coefficients) -> tuple[float, tuple[float, ...]]:
    """Advance the step response by one step: return c_t > 0 (Algorithm 2, line 7) and the new states."""
    b, a = coefficients
    shifted = [*states, 0.0]
    response = shifted[0] + b[0]
    parts = zip_longest(shifted[1:], b[1:], a[1:], fillvalue=0.0)
    return response, tuple(later + b_i - a_i * response for later, b_i, a_i in parts)


def padded_coefficients(low_pass_filter: LowPassFilter) -> Coefficients:
    """Return (b, a), with a padded with zeros to ``order + 1`` coefficients."""
    b, a = low_pass_filter.b, low_pass_filter.a
    return b, a + (0.0,) * (len(b) - len(a))
