"""Functions of version 0.2 that are a line or two of NumPy or SciPy. See `doppler_hf.deprecated`."""

from collections.abc import Sequence

import numpy as np
import scipy.signal
from jaxtyping import Float, Float64

from doppler_hf.errors import Refusal
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.response import step_response


def from_coefficients(b: Sequence[float], a: Sequence[float] = (1.0,)) -> LowPassFilter:
    """Divide b by its sum, multiply it by that of a, and divide both by a[0]: LowPassFilter(b, a)."""
    scaled = np.asarray(b, dtype=float) * (np.sum(a) / np.sum(b)) / a[0]
    return LowPassFilter(b=tuple(scaled), a=tuple(np.asarray(a, dtype=float) / a[0]))


def write_coefficients(low_pass_filter: LowPassFilter) -> str:
    """Write "b=…;a=…" with the attributes b and a, or take str(low_pass_filter), which a LowPassFilter parses too."""
    b, a = (",".join(map(repr, map(float, values))) for values in (low_pass_filter.b, low_pass_filter.a))
    return f"b={b};a={a}"


def corrected_output(
    filter: LowPassFilter, series: Float[np.ndarray, "steps dimension"]
) -> Float64[np.ndarray, "steps dimension"]:
    """Divide the output of scipy.signal.lfilter(filter.b, filter.a, series, axis=0) by step_response(filter, steps)."""
    filtered = scipy.signal.lfilter(filter.b, filter.a, np.asarray(series, dtype=np.float64), axis=0)
    corrected: Float64[np.ndarray, "steps dimension"] = filtered / step_response(filter, len(series))[:, None]
    return corrected


def power_spectral_density(
    series: Float[np.ndarray, "steps dimension"], method: str = "welch", *, segment: int | None = None
) -> tuple[Float64[np.ndarray, " frequencies"], Float64[np.ndarray, " frequencies"]]:
    """Use scipy.signal.welch(series, fs=2, detrend=False, return_onesided=False, axis=0), and the mean over coordinates."""
    if method != "welch":
        raise Refusal(
            "earlier-value",
            f"power_spectral_density no longer has method={method!r}; 'welch' is left. For the earlier result, take the "
            "Fourier transform of doppler_hf.filters.autocorrelation(series).",
        )
    segment = max(2, 2 * len(series) // 9) if segment is None else segment
    _, density = scipy.signal.welch(series, nperseg=segment, detrend=False, return_onesided=False, axis=0)
    frequencies = np.arange(segment // 2 + 1) * 2 / segment
    return frequencies, density[: len(frequencies)].mean(axis=1)
