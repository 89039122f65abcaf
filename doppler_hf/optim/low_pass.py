"""The filter stage: m̂_t = m_t / c_t (DOPPLER, Algorithm 2, lines 6-8), in the transposed direct form II.

    m_t = s_1 + b_0 g_t,    s_i ← s_{i+1} + b_i g_t - a_i m_t    (i = 1 ... n, s_{n+1} = 0),

with n = max(n_a, n_b) states instead of n_a + n_b (Oppenheim and Schafer, *Discrete-Time Signal Processing*, Section 6.4).

In float32 the states' rounding grows with the order and 1/cutoff: 1e-6 relative for the paper's filters, 1e-2 for a
Butterworth filter of order 4 at 0.02 of Nyquist. Prefer a lower order to a very low cutoff.
"""

import functools
from itertools import zip_longest

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import LowPassFilter

Coefficients = tuple[tuple[float, ...], tuple[float, ...]]  # b and a, the latter with order + 1 numbers


def low_pass(
    grad: Float[Tensor, "*shape"], states: list[Float[Tensor, "*shape"]], coefficients: Coefficients
) -> Float[Tensor, "*shape"]:
    """Advance the filter by one step and return m_t, a new tensor (the ``order`` states modified in place)."""
    b, a = coefficients
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
