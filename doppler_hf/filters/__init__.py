"""Low-pass filters on the time axis of training: design, analyse, estimate and choose them (NumPy and SciPy only).

- low_pass_filter: the filter and its validity
- design, grammar: presets and designs, and their names
- noise_shape: the noise over time, white or shaped
- response: impulse, step, frequency, delay, noise gain; and a summary in one row
- on_circle: polynomials at a frequency, in twice the precision of float64
- spectrum: measured autocorrelations and signal, and the filter that they call for
- closed_loop, auto: the loss that noise costs, and the choice with the least
- earlier_names: functions that are deprecated

A response of no steps is an empty array, as is what is asked at no frequency, and a sum over no steps is 0. A mean, a design
and a choice need one step at least, and refuse none with a ValueError. A negative number of steps is always refused.
"""

from typing import Any

from doppler_hf.deprecated import attribute_of
from doppler_hf.filters.auto import auto_filter, auto_noise_shape
from doppler_hf.filters.closed_loop import ClosedLoop
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
    "PAPER_FILTERS", "ClosedLoop", "FilterFigures", "LowPassFilter", "NoiseShape", "PowerEstimate", "auto_filter",
    "auto_noise_shape", "autocorrelation",
    "butterworth", "corrected_noise_gain",
    "estimate_power", "filter_figures", "frequency_response",
    "group_delay", "impulse_response", "momentum", "moving_average", "noise_gain", "optimal_fir", "step_response",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return what an earlier version had, with a warning."""
    return attribute_of(__name__, name)
