"""The responses of a filter to an impulse, a step, white noise and slow changes, and a summary of them.

    m_t = Σ_{τ=0..t} κ_τ g_{t-τ},    c_t = Σ_{τ=0..t} κ_τ,    Var[m_∞] / Var[g] = Σ_{τ≥0} κ_τ²   (white g)

κ is the paper's equation "kappa", c_t the bias correction of Algorithm 2, line 7, and Σκ² the denominator of equation "snr".
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import scipy.optimize
from jaxtyping import Complex128, Float64
from numpy.typing import NDArray

from doppler_hf.errors import Refusal
from doppler_hf.filters.closed_loop import stability_limit
from doppler_hf.filters.low_pass_filter import LowPassFilter, filtered, impulse_blocks, number_of_steps
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.filters.on_circle import delays_on_circle, values_on_circle

# A frequency with a smaller gain (below -180 dB) counts as removed, and its delay is not computed.
_REMOVED: Final = 1e-9
# The largest allowed rounding error of a delay: in steps for delays below one step, otherwise relative.
_DELAY_ERROR: Final = 1e-9
SETTLED: Final = 0.02
STARTED: Final = 0.1
HALF_POWER: Final = 0.5**0.5


def impulse_response(filter: LowPassFilter, steps: int) -> Float64[np.ndarray, " steps"]:
    """Return the weights κ_0 ... κ_{steps-1} of past gradients, m_t = Σ_τ κ_τ g_{t-τ}.

    The recursion rounds to float64 at each step, which changes a weight by at most 1e-16 Σ|a| / |Σa| times the largest
    weight: 1e-14 for the paper's filters, and 1e-3 for the slowest designs that `butterworth` accepts (measured: 1e-5). The
    same holds for everything computed from these weights, such as step response and noise gain.
    """
    return filtered(filter.b, filter.a, np.eye(1, number_of_steps(steps))[0])


def step_response(filter: LowPassFilter, steps: int) -> Float64[np.ndarray, " steps"]:
    """Return the output for a constant input of one, c_t = Σ_{τ≤t} κ_τ > 0."""
    return filtered(filter.b, filter.a, np.ones(number_of_steps(steps)))


def noise_gain(filter: LowPassFilter, noise: NoiseShape = WHITE) -> float:
    """Return the noise power that passes, in units of σ²: ‖c‖² Σ (κ * g)², g the response of `noise`; Σ κ² for white noise.

    Blocks of at least 4096 steps are summed until a block adds less than 1e-18 of the sum. The slowest allowed pole,
    1 - 1e-6, loses 0.8 % of its energy in a block, so less than 1.3e-16 of the sum is left out. The weights are rounded, see
    `impulse_response`. Unlike a Lyapunov equation, this stays accurate for long filters without feedback.
    """
    response = impulse_blocks(filter.b, np.convolve(filter.a, noise.c).tolist())
    return noise.norm**2 * float(sum(np.sum(kappa**2) for kappa in response))


def frequency_response(
    filter: LowPassFilter, frequencies: Float64[np.ndarray, " frequencies"]
) -> Complex128[np.ndarray, " frequencies"]:
    """Return H = Σ_τ κ_τ e^{-iωτ} at fractions of Nyquist in [0, 1], ω = π · frequency, with the precision of float64.

    Raises:
        ValueError: If a frequency is outside [0, 1].
    """
    outside = frequencies[~((frequencies >= 0) & (frequencies <= 1))]
    if len(outside):
        raise Refusal(
            "out-of-range",
            "The argument frequencies must have fractions of Nyquist (half a cycle per step) from 0 to 1; got "
            f"{outside[0]}.",
        )
    return values_on_circle(filter.b, frequencies) / values_on_circle(filter.a, frequencies)


def group_delay(
    filter: LowPassFilter, frequencies: Float64[np.ndarray, " frequencies"]
) -> Float64[np.ndarray, " frequencies"]:
    """Return by how many steps a filter delays a signal around each frequency: -dφ/dω; at 0, Σ_τ τ κ_τ.

    Frequencies are fractions of Nyquist. The error is at most 1e-9 steps, or 1e-9 of the delay if that is longer than one
    step. The delay is NaN if the filter removes the frequency (gain below 1e-9), or if rounding could change the delay by
    more than this error.

    Raises:
        ValueError: If a frequency is outside [0, 1].
    """
    is_passed = np.abs(frequency_response(filter, frequencies)) >= _REMOVED
    above, below = (delays_on_circle(coefficients, frequencies) for coefficients in (filter.b, filter.a))
    with np.errstate(invalid="ignore"):
        delay = above.steps - below.steps
        is_known = above.error + below.error <= _DELAY_ERROR * np.maximum(1.0, np.abs(delay))
    return np.where(is_passed & is_known, delay, np.nan)


@dataclass(frozen=True)
class FilterFigures:
    """The figures by which filters are compared."""

    order: int  # buffers that an optimizer keeps per parameter
    noise_gain: float  # share of white noise power that passes, Σκ²
    cutoff: float  # lowest frequency at which the gain is 1/√2 (-3 dB), as a fraction of Nyquist; 1 if there is none
    delay: float  # group delay at frequency 0, in steps: how far the output lags behind a slow change
    settling_steps: int  # steps until the step response stays within 2 % of 1
    startup_steps: int  # steps until Σ_{τ≤t} κ_τ² / c_t², the noise of m_t / c_t, stays within 10 % of the noise gain
    largest_pole: float  # largest modulus of a pole, 0 without feedback; its error is about 1e-16^(1/m) if m poles coincide
    stability_limit: float  # largest stable product of learning rate and curvature, for SGD; 2 without a filter


def filter_figures(filter: LowPassFilter) -> FilterFigures:
    """Compute the figures of a filter."""
    kappa = np.concatenate(list(impulse_blocks(filter.b, filter.a)))
    response, energy = np.cumsum(kappa), np.cumsum(kappa**2)
    return FilterFigures(
        order=filter.order,
        noise_gain=noise_gain(filter),
        cutoff=_half_power_frequency(filter),
        delay=float(group_delay(filter, np.zeros(1))[0]),
        settling_steps=_steps_until_it_stays(np.abs(response - 1) <= SETTLED),
        startup_steps=_steps_until_it_stays(np.abs(energy / response**2 / energy[-1] - 1) <= STARTED),
        largest_pole=float(max(np.abs(np.roots(filter.a)), default=0.0)),
        stability_limit=stability_limit(filter).x,
    )


def _half_power_frequency(filter: LowPassFilter) -> float:
    def excess(frequency: float) -> float:
        return float(np.abs(frequency_response(filter, np.array([frequency])))[0]) - HALF_POWER

    # The grid is dense near zero, where slow filters have their cutoff, and also near one, where the gain of others may
    # fall steeply.
    grid = np.union1d(np.geomspace(1e-8, 1, 4096), np.linspace(0, 1, 4097))
    below = np.abs(frequency_response(filter, grid)) <= HALF_POWER
    if not below.any():
        return 1.0
    first = int(np.argmax(below))
    found = scipy.optimize.brentq(excess, grid[first - 1], grid[first], xtol=1e-18)
    return float(f"{found:.12g}")


def _steps_until_it_stays(inside: NDArray[np.bool_]) -> int:
    """Return the number of steps until the condition holds at all later steps; 1 if it always holds."""
    outside = np.flatnonzero(~inside)
    return int(outside[-1]) + 2 if len(outside) else 1
