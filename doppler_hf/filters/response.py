r"""What a filter does to a signal: its response to an impulse, to a step, to white noise and to slow changes.

    m_t = Σ_{τ=0..t} κ_τ g_{t-τ},    c_t = Σ_{τ=0..t} κ_τ,    Var[m_∞] / Var[g] = Σ_{τ≥0} κ_τ²   (white g)

κ is the impulse response of the paper's equation "kappa", c_t the bias correction of Algorithm 2, line 7, and Σκ²
the denominator of the normalized SNR (equation "snr"). What the noise gain buys costs time: the output follows a slow
change of the gradient after the group delay, Σ τ κ_τ steps.
"""

import warnings
from typing import Final

import numpy as np
import scipy.signal
from jaxtyping import Complex128, Float64

from doppler_hf.filters.low_pass_filter import LowPassFilter, impulse_blocks
from doppler_hf.filters.noise_shape import WHITE, NoiseShape

# Below this gain (-180 dB) a delay would be the ratio of two rounding errors.
_REMOVED: Final = 1e-9


def impulse_response(filter: LowPassFilter, steps: int) -> Float64[np.ndarray, " steps"]:
    r"""Return the weights κ_τ with which past gradients enter the filtered one: m_t = Σ_τ κ_τ g_{t-τ}.

    Args:
        filter: The filter.
        steps: How many weights, at least 1.

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
    r"""Return the output for a constant input of one: c_t = Σ_{τ≤t} κ_τ, the share of m_t that is not its zero start.

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
        DOPPLER, Algorithm 2, line 7.
    """
    _check_steps(steps)
    return np.asarray(scipy.signal.lfilter(filter.b, filter.a, np.ones(steps)))


def noise_gain(filter: LowPassFilter, noise: NoiseShape = WHITE) -> float:
    r"""Return the noise power that passes, in units of white noise of the same σ: ‖c‖² Σ (κ * g)², or Σ κ² for white noise.

    It is summed in blocks of at least 4096 steps until one adds less than 1e-18 of the sum. The slowest pole that is
    accepted, 1 - 1e-6, loses 0.8 % of its energy in a block, so that what is left out is below 1.3e-16 of the sum, the
    rounding of a float64. The sum stays accurate for long filters without feedback, where a Lyapunov equation is
    ill-conditioned.

    Args:
        filter: The filter.
        noise: The shape of the noise, whose response g goes ahead of κ.

    Returns:
        Variance of the settled output per σ²: for white noise 1 without a filter, (1 - β)/(1 + β) for momentum.

    Example:
        >>> round(noise_gain(LowPassFilter(b=(0.1,), a=(1.0, -0.9))), 9)
        0.052631579

    Source:
        DOPPLER, equation "snr" (its denominator, per step).
    """
    response = impulse_blocks(filter.b, np.convolve(filter.a, noise.c).tolist())
    return noise.norm**2 * float(sum(np.sum(kappa**2) for kappa in response))


def frequency_response(
    filter: LowPassFilter, frequencies: Float64[np.ndarray, " frequencies"]
) -> Complex128[np.ndarray, " frequencies"]:
    r"""Return what becomes of an oscillation e^{iωt}: H = Σ_τ κ_τ e^{-iωτ}, its gain |H| and phase.

    Args:
        filter: The filter.
        frequencies: As fractions of Nyquist (ω = π · frequency), in [0, 1], shape (frequencies,).

    Returns:
        H, shape (frequencies,); 1 at frequency 0.

    Raises:
        ValueError: If a frequency lies outside [0, 1].

    Example:
        >>> abs(frequency_response(LowPassFilter(b=(0.5, 0.5)), np.array([0.0, 0.5, 1.0]))).round(6)
        array([1.      , 0.707107, 0.      ])

    Source:
        `scipy.signal.freqz`.
    """
    _check_frequencies(frequencies)
    return np.asarray(scipy.signal.freqz(filter.b, filter.a, worN=frequencies, fs=2)[1])


def group_delay(
    filter: LowPassFilter, frequencies: Float64[np.ndarray, " frequencies"]
) -> Float64[np.ndarray, " frequencies"]:
    r"""Return by how many steps the filter delays the components of a signal around each frequency: -dφ/dω, H = |H|e^{iφ}.

    At frequency 0 and for unit gain it is the mean age of the gradients in the output, Σ_τ τ κ_τ.

    Args:
        filter: The filter.
        frequencies: As fractions of Nyquist, in [0, 1], shape (frequencies,).

    Returns:
        Steps, shape (frequencies,); NaN at a frequency that the filter removes (gain below 1e-9), where no delay is
        defined.

    Raises:
        ValueError: If a frequency lies outside [0, 1].

    Example:
        >>> group_delay(LowPassFilter(b=(0.5,), a=(1.0, -0.5)), np.array([0.0])).round(12)
        array([1.])

    Source:
        `scipy.signal.group_delay`.
    """
    passed = np.abs(frequency_response(filter, frequencies)) >= _REMOVED
    delay = np.full(len(frequencies), np.nan)
    with warnings.catch_warnings():
        # SciPy measures |Σb e^{-iωτ}|·|Σa e^{-iωτ}|, which is small for every slow filter, against a fixed number.
        warnings.filterwarnings("ignore", message="The filter's denominator is extremely small")
        _, delay[passed] = scipy.signal.group_delay((filter.b, filter.a), w=frequencies[passed], fs=2)
    return delay


def _check_frequencies(frequencies: Float64[np.ndarray, " frequencies"]) -> None:
    outside = frequencies[~((frequencies >= 0) & (frequencies <= 1))]
    if len(outside):
        raise ValueError(f"frequencies must be fractions of Nyquist (half a cycle per step) in [0, 1], got {outside[0]}.")


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
