r"""The filter stage: m̂_t = m_t / c_t (DOPPLER, Algorithm 1, lines 6-8).

Lines 6 and 7 as printed keep n_a past outputs and n_b past gradients for each parameter. The transposed direct form
II is the same filter,

    m_t = s_1 + b_0 g_t,    s_i ← s_{i+1} + b_i g_t - a_i m_t    (i = 1 ... n, s_{n+1} = 0),

with n = max(n_a, n_b) states (Oppenheim and Schafer, *Discrete-Time Signal Processing*, Section 6.4).

In float32 the rounding of the states grows with the order and with 1/cutoff: about 1e-6 relative for every filter of
the paper, 1e-2 for a Butterworth filter of order 4 at 0.02 of Nyquist. Prefer a lower order to a very low cutoff.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import LowPassFilter


def padded_coefficients(low_pass_filter: LowPassFilter) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns (b, a), the shorter one filled with zeros to ``order + 1`` coefficients.

    Example:
        >>> padded_coefficients(LowPassFilter(b=(0.1,), a=(1.0, -0.9)))
        ((0.1, 0.0), (1.0, -0.9))
    """
    b, a = zip(*zip_longest(low_pass_filter.b, low_pass_filter.a, fillvalue=0.0), strict=True)
    return b, a


def low_pass(
    grad: Float[Tensor, "*shape"],
    states: list[Float[Tensor, "*shape"]],
    *,
    b: Sequence[float],
    a: Sequence[float],
) -> Float[Tensor, "*shape"]:
    r"""Advances the filter by one step: m_t from g_t.

    Args:
        grad: The gradient g_t, any shape.
        states: The ``order`` states, of the gradient's shape and dtype, zeros at first (modified in place).
        b: Feed-forward coefficients, padded to ``order + 1``.
        a: Feedback coefficients, padded to ``order + 1``; ``a[0]`` is 1.

    Returns:
        The filtered gradient m_t, a new tensor, not yet corrected for its zero start.

    Example:
        >>> states = [torch.zeros(1)]
        >>> [low_pass(torch.ones(1), states, b=(0.5, 0.0), a=(1.0, -0.5)).item() for _ in range(3)]
        [0.5, 0.75, 0.875]

    Source:
        DOPPLER, Algorithm 1, line 6.
    """
    if not states:
        return grad * b[0]
    filtered = torch.add(states[0], grad, alpha=b[0])
    for state, later, b_i, a_i in zip(states, [*states[1:], None], b[1:], a[1:], strict=True):
        # Each pass over the state costs as much as any other, so coefficients of zero are left out.
        if later is None:
            torch.mul(filtered, -a_i, out=state)
        else:
            torch.add(later, filtered, alpha=-a_i, out=state)
        if b_i:
            state.add_(grad, alpha=b_i)
    return filtered


def bias_correction(states: list[float], *, b: Sequence[float], a: Sequence[float]) -> float:
    r"""Advances the step response by one step: c_t, the same recursion driven by ones.

    Args:
        states: The ``order`` states, zeros at first (modified in place).
        b: Feed-forward coefficients, padded to ``order + 1``.
        a: Feedback coefficients, padded to ``order + 1``; ``a[0]`` is 1.

    Returns:
        c_t, positive for every `LowPassFilter`.

    Example:
        >>> states = [0.0]
        >>> [bias_correction(states, b=(0.5, 0.0), a=(1.0, -0.5)) for _ in range(3)]
        [0.5, 0.75, 0.875]

    Source:
        DOPPLER, Algorithm 1, line 7.
    """
    shifted = [*states, 0.0]
    response = shifted[0] + b[0]
    states[:] = [state + b_i - a_i * response for state, b_i, a_i in zip(shifted[1:], b[1:], a[1:], strict=True)]
    return response
