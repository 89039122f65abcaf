"""A filter in numbers: where it cuts, how late it is, how long it takes to settle."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from doppler_hf.filters.low_pass_filter import LowPassFilter, impulse_blocks
from doppler_hf.filters.response import frequency_response, group_delay, noise_gain

SETTLED: Final = 0.02
STARTED: Final = 0.1

HALF_POWER: Final = 0.5**0.5


@dataclass(frozen=True)
class FilterFigures:
    """What one compares filters by."""

    order: int  # buffers that an optimizer keeps per parameter
    noise_gain: float  # share of white noise power that passes, Σκ²
    cutoff: float  # lowest frequency at which the gain is 1/√2 (-3 dB), as a fraction of Nyquist; 1 if there is none
    delay: float  # group delay at frequency 0, in steps: how far the output lags behind a slow change
    settling_steps: int  # steps until the step response stays within 2 % of 1
    startup_steps: int  # steps until Σ_{τ≤t} κ_τ² / c_t², the noise of m_t / c_t, stays within 10 % of the noise gain
    largest_pole: float  # largest modulus of a pole, 0 without feedback


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
    )


def _half_power_frequency(filter: LowPassFilter) -> float:
    def excess(frequency: float) -> float:
        return float(np.abs(frequency_response(filter, np.array([frequency])))[0]) - HALF_POWER

    # Dense near zero, where slow filters cut, and near one, where the others may fall steeply.
    grid = np.union1d(np.geomspace(1e-8, 1, 4096), np.linspace(0, 1, 4097))
    below = np.abs(frequency_response(filter, grid)) <= HALF_POWER
    if not below.any():
        return 1.0
    first = int(np.argmax(below))
    return round(float(scipy.optimize.brentq(excess, grid[first - 1], grid[first], xtol=1e-14)), 12)


def _steps_until_it_stays(inside: NDArray[np.bool_]) -> int:
    """Return how many steps it takes, the first counting as one, until the condition holds for good."""
    outside = np.flatnonzero(~inside)
    return int(outside[-1]) + 2 if len(outside) else 1
