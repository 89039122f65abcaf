"""Low-pass filters on the time axis of training: design, the paper's presets, and responses (NumPy and SciPy only)."""

from doppler_hf.filters.design import PAPER_FILTERS, LowPassFilter, butterworth, chebyshev1, momentum
from doppler_hf.filters.response import impulse_response, noise_gain, step_response

__all__ = [
    "PAPER_FILTERS",
    "LowPassFilter",
    "butterworth",
    "chebyshev1",
    "impulse_response",
    "momentum",
    "noise_gain",
    "step_response",
]
