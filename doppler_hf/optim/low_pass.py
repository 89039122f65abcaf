"""The filter stage: m̂_t = m_t / c_t (DOPPLER, Algorithm 2, lines 6-8), in the transposed direct form II.

    m_t = s_1 + b_0 g_t,    s_i ← s_{i+1} + b_i g_t - a_i m_t    (i = 1 ... n, s_{n+1} = 0),

with n = max(n_a, n_b) states instead of n_a + n_b (Oppenheim and Schafer, *Discrete-Time Signal Processing*, Section 6.4).

In float32 the states' rounding grows with the order and 1/cutoff: 1e-6 relative for the paper's filters, 1e-2 for a
Butterworth filter of order 4 at 0.02 of Nyquist. Prefer a lower order to a very low cutoff.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim.update import Coefficients, ParameterTensors


def low_pass(
    grad: Float[Tensor, "*shape"], states: list[Float[Tensor, "*shape"]], *, b: Sequence[float], a: Sequence[float]
) -> Float[Tensor, "*shape"]:
    """Advance the filter by one step and return m_t, a new tensor (the ``order`` states modified in place)."""
    m = torch.add(states[0], grad, alpha=b[0]) if states else grad * b[0]
    for i, (s_i, later) in enumerate(zip_longest(states, states[1:]), start=1):
        if later is None:
            torch.mul(m, -a[i], out=s_i)
        else:
            torch.add(later, m, alpha=-a[i], out=s_i)
        if i < len(b):  # Each pass over the state costs as much as any other.
            s_i.add_(grad, alpha=b[i])
    return m


@functools.lru_cache  # most parameters have had as many steps
def bias_correction(states: tuple[float, ...], coefficients: Coefficients) -> tuple[float, tuple[float, ...]]:
    """Advance the step response by one step: return c_t > 0 (Algorithm 2, line 7) and the states after it."""
    b, a = coefficients
    shifted = [*states, 0.0]
    response = shifted[0] + b[0]
    parts = zip_longest(shifted[1:], b[1:], a[1:], fillvalue=0.0)
    return response, tuple(later + b_i - a_i * response for later, b_i, a_i in parts)


def padded_coefficients(low_pass_filter: LowPassFilter) -> Coefficients:
    """Return (b, a), the latter filled with zeros to ``order + 1`` coefficients."""
    b, a = low_pass_filter.b, low_pass_filter.a
    return b, a + (0.0,) * (len(b) - len(a))


@final
class FixedFilter:
    """A `LowPassFilter` with the interface that `DopplerOptimizer` needs; `OptimalFIR` has the same.

    It keeps its states with each parameter's. `begin` begins a step of a parameter and returns c_t, `advance` turns g_t
    into m_t, whole or slice by slice, and `end` ends the step of a group.
    """

    def __init__(self, low_pass_filter: LowPassFilter) -> None:
        self.order = low_pass_filter.order
        self._name = str(low_pass_filter)
        self._coefficients = padded_coefficients(low_pass_filter)

    def new_group(self) -> dict[str, Any]:
        """Return its name, by which a checkpoint tells its filter, for the options of a parameter group."""
        return {"low_pass_filter": self._name}

    def new_state(self, zeros: Callable[[], Tensor]) -> dict[str, Any]:
        """Return the states of filter and step response; both per parameter, since one may begin later than others."""
        return {"filter_states": [zeros() for _ in range(self.order)], "bias_states": [0.0] * self.order}

    def coefficients(self, group: dict[str, Any]) -> Coefficients:
        """Return the last argument of `advance` for the parameters of a group: (b, a)."""
        return self._coefficients

    def begin(self, state: dict[str, Any], group: dict[str, Any], *, noise_std: float) -> float:
        """Begin a step of one parameter (state modified in place), and return c_t."""
        c, state["bias_states"][:] = bias_correction(tuple(state["bias_states"]), self._coefficients)
        return c

    @staticmethod
    def advance(
        grad: Float[Tensor, "*shape"], tensors: ParameterTensors, coefficients: Coefficients
    ) -> Float[Tensor, "*shape"]:
        """Return m_t from g_t, in float32 at least (the states modified in place)."""
        b, a = coefficients
        return low_pass(grad, tensors.filter_states, b=b, a=a)

    def end(self, group: dict[str, Any], states: Iterable[dict[str, Any]], *, noise_std: float) -> None:
        """End a step of a group: nothing is left to do."""
