r"""What a filter does to a signal: its response to an impulse, to a step, and to white noise.

    m_t = Σ_{τ=0..t} κ_τ g_{t-τ},    c_t = Σ_{τ=0..t} κ_τ,    Var[m_∞] / Var[g] = Σ_{τ≥0} κ_τ²   (white g)

κ is the impulse response of the paper's equation "kappa", c_t the bias correction of Algorithm 1, line 7, and Σκ²
the denominator of the normalized SNR (equation "snr").
"""

import numpy as np
import scipy.signal
from jaxtyping import Float64

from doppler_hf.filters.design import LowPassFilter, impulse_blocks


def impulse_response(filter: LowPassFilter, steps: int) -> Float64[np.ndarray, " steps"]:
    r"""The weights κ_τ with which past gradients enter the filtered one: m_t = Σ_τ κ_τ g_{t-τ}.

    Args:
        filter: The filter.
        steps: How many weights, at least 1.

    Returns:
        κ_0 ... κ_{steps-1}, shape (steps,).

    Raises:
        ValueError: If steps is less than 1.

    Example:
        >>> impulse_response(LowPassFilter(b=(0.5,), a=(1.0, -0.5)), 3)
        array([0.5  , 0.25 , 0.125])

    Source:
        DOPPLER, equation "kappa".
    """
    _check_steps(steps)
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(scipy.signal.lfilter(filter.b, filter.a, impulse))


def step_response(filter: LowPassFilter, steps: int) -> Float64[np.ndarray, " steps"]:
    r"""The output for a constant input of one: c_t = Σ_{τ≤t} κ_τ, the share of m_t that is not its zero start.

    Args:
        filter: The filter.
        steps: How many steps, at least 1.

    Returns:
        c_0 ... c_{steps-1}, shape (steps,): positive, and 1 in the limit.

    Raises:
        ValueError: If steps is less than 1.

    Example:
        >>> step_response(LowPassFilter(b=(0.5,), a=(1.0, -0.5)), 3)
        array([0.5  , 0.75 , 0.875])

    Source:
        DOPPLER, Algorithm 1, line 7.
    """
    _check_steps(steps)
    return np.asarray(scipy.signal.lfilter(filter.b, filter.a, np.ones(steps)))


def noise_gain(filter: LowPassFilter) -> float:
    r"""The share of white noise power that passes, Σ_{τ≥0} κ_τ² over the infinite response.

    It is summed until what is left is below the rounding of a float64, which stays accurate for long filters without
    feedback, where a Lyapunov equation is ill-conditioned.

    Args:
        filter: The filter.

    Returns:
        Variance of the settled output per variance of the input: 1 for no filter, (1 - β)/(1 + β) for momentum.

    Example:
        >>> round(noise_gain(LowPassFilter(b=(0.1,), a=(1.0, -0.9))), 9)
        0.052631579

    Source:
        DOPPLER, equation "snr" (its denominator, per step).
    """
    return float(sum(np.sum(kappa**2) for kappa in impulse_blocks(filter.b, filter.a)))


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}: ask for at least one step of the response")
