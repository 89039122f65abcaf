"""Low-pass filters on the time axis of training: design, analyse, estimate and choose them (NumPy and SciPy only).

- low_pass_filter: the filter, and the conditions for a valid one
- design, grammar: presets and designs, and their names
- noise_shape: the noise over time, white or shaped
- response: impulse, step and frequency response, delay, noise gain, and a summary of them
- on_circle: polynomials at a frequency, in twice the precision of float64
- spectrum: measured autocorrelations and signal power, and the best filter for them
- closed_loop: the largest stable rate, and the loss that noise costs
- auto: the filter and noise shape with the smallest loss
- earlier_names: deprecated functions

A response of no steps, or at no frequency, is an empty array, and a sum over no steps is 0. A mean, a design and a choice
need at least one step, and raise ValueError without one. A negative number of steps always raises ValueError.
"""

from typing import Any

from doppler_hf.deprecated import attribute_of
from doppler_hf.filters.auto import auto_filter, auto_noise_shape
from doppler_hf.filters.closed_loop import ClosedLoop, StabilityLimit, stability_limit
from doppler_hf.filters.design import (
    PAPER_FILTERS,
    butterworth,
    momentum,
    moving_average,
)
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.noise_shape import NoiseShape
from doppler_hf.filters.response import (
    FilterFigures,
    filter_figures,
    frequency_response,
    group_delay,
    impulse_response,
    noise_gain,
    step_response,
)
from doppler_hf.filters.spectrum import (
    PowerEstimate,
    autocorrelation,
    corrected_noise_gain,
    estimate_power,
    optimal_fir,
)

__all__ = [
    "PAPER_FILTERS", "ClosedLoop", "FilterFigures", "LowPassFilter", "NoiseShape", "PowerEstimate", "StabilityLimit",
    "auto_filter", "auto_noise_shape", "autocorrelation",
    "butterworth", "corrected_noise_gain",
    "estimate_power", "filter_figures", "frequency_response",
    "group_delay", "impulse_response", "momentum", "moving_average", "noise_gain", "optimal_fir",
    "stability_limit", "step_response",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return an attribute of an earlier version, with a deprecation warning."""
    return attribute_of(__name__, name)
