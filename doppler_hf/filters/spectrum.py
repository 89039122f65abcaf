"""Measurements on a series of gradients: the autocorrelation, the power of the signal, and the best filter for it.

    φ_τ = E⟨g_t, g_{t-τ}⟩ / d,    P(ν) = Σ_τ φ_τ e^{-iπντ},    ∫_0^1 P(ν) dν = φ_0,    ν as a fraction of Nyquist

White noise of variance s² has P = s² everywhere, and a filter turns P into |H|² P. The mean is not removed, because a
low-pass filter is meant to keep it. The signal s_t in g_t = s_t + w_t is secret, but σ is public. So the mean of ‖s_t‖² is
estimated from private gradients as the mean of ‖g_t‖² - d σ², and behind a filter as the mean of ‖m̂_t‖² - d σ² Σκ².

The optimal filter without feedback follows from the private gradients alone (DOPPLER, Section 5.3, *Optimal FIR filter*).
White noise adds its power to φ_0 and nothing to other lags. So with σ² subtracted from φ_0,

    c_τ = ½ ρ_τ = ½ min(max(φ_τ / φ_0, 0), 1),    b_τ = c_τ / Σ c

estimate the autocorrelation in the paper's scale (c_0 = ½) and the filter that is best for its bound: with its learning rate
tuned, that depends on (ΣΣ c_τ κ_τ)² / ΣΣ κ_τ² alone, κ the impulse response, which κ ∝ c maximizes (Cauchy-Schwarz). The
paper's closed form instead takes ½ ‖g_{t-τ}‖² less noise off each product, leaves the noise in lag 0, and clamps at each
step. Lags with ρ_τ < ½ then get no weight, and noisier gradients bring the filter closer to none.

Source: DOPPLER, Section 3 (P_s is the Fourier transform of φ_s), Section 5.3 and Appendix A.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64

from doppler_hf.errors import Refusal
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.response import impulse_response, step_response


class PowerEstimate(NamedTuple):
    """The power of signal and noise in gradients."""

    signal: float  # mean squared norm minus that of the noise; unbiased and not clamped, so it may be below 0
    error: float  # standard error of `signal`
    noise: float  # mean squared norm of the noise, known exactly

    @property
    def snr(self) -> float:
        """The signal power divided by the noise power; infinite without noise."""
        return self.signal / self.noise if self.noise else math.inf


def autocorrelation(series: Float[np.ndarray, "steps dimension"]) -> Float64[np.ndarray, " lags"]:
    """Return the autocorrelation of a series, as a mean over its coordinates: φ_τ = Σ_{t≥τ} ⟨g_t, g_{t-τ}⟩ / (d T).

    Every lag is divided by T. This estimate is biased, but its spectrum P is never negative. `scipy.signal.welch` estimates
    P with less variance.

    Raises:
        ValueError: If the series is empty, has another number of dimensions, or is not finite.
    """
    series = _checked(series)
    steps = len(series)
    # The series is padded, so that no product wraps around the end.
    power = np.abs(np.fft.rfft(series, n=2 * steps, axis=0)) ** 2
    return np.fft.irfft(power.mean(axis=1), n=2 * steps)[:steps] / steps


def corrected_noise_gain(filter: LowPassFilter, steps: int) -> Float64[np.ndarray, " steps"]:
    """Return the share of white noise power in m̂_t: Σ_{τ≤t} κ_τ² / c_t², from 1 down to Σκ²."""
    return np.cumsum(impulse_response(filter, steps) ** 2) / step_response(filter, steps) ** 2


def estimate_power(series: Float[np.ndarray, "steps dimension"], *, noise_std: float) -> PowerEstimate:
    """Estimate the power of the signal in successive noisy gradients: their mean squared norm minus that of the noise.

    The standard error is taken over the noise: T Var = 2 d σ⁴ + 4 σ² S, with S the estimate, or 0 if that is negative.

    Args:
        series: The gradients before any filter.
        noise_std: Standard deviation σ of the white noise per coordinate.

    Raises:
        ValueError: If noise_std is negative or infinite, or the series is empty or not finite.
    """
    if not 0 <= noise_std < math.inf:
        raise Refusal(
            "out-of-range",
            f"The argument noise_std must be finite and at least 0; got {noise_std}. Pass 0 if there is no noise.",
        )
    steps, dimension = _checked(series).shape
    noise = dimension * noise_std**2
    signal = float(np.sum(series**2)) / steps - noise
    # A negative estimate comes from the noise alone, so it adds no variance.
    variance = 2 * dimension * noise_std**4 + 4 * noise_std**2 * max(signal, 0.0)
    return PowerEstimate(signal, math.sqrt(variance / steps), noise)


def optimal_fir(autocorrelation: Float64[np.ndarray, " taps"]) -> LowPassFilter:
    """Return the best filter of unit gain without feedback for a signal of the given autocorrelation, in closed form.

    Args:
        autocorrelation: c_0 ... c_{taps-1} of the signal in any scale, shape (taps,).

    Raises:
        ValueError: If the sum of the autocorrelation is not positive.

    Example:
        >>> optimal_fir(np.array([0.5, 0.3, 0.2]))
        LowPassFilter(b=(0.5, 0.3, 0.2), a=(1.0,))
    """
    if not autocorrelation.sum() > 0:  # This form refuses NaN too.
        raise Refusal(
            "sum-not-positive",
            f"The argument autocorrelation must have a positive sum, because the coefficients b are divided by it; got "
            f"{autocorrelation.sum():.6g}.",
        )
    return LowPassFilter(b=tuple(autocorrelation / autocorrelation.sum()))


def _checked(series: Float[np.ndarray, "steps dimension"]) -> Float64[np.ndarray, "steps dimension"]:
    """Return a series in float64, and refuse an empty one or one with NaN or infinity."""
    series = np.asarray(series, dtype=np.float64)
    if series.ndim != 2 or not series.size:
        raise Refusal(
            "wrong-shape", f"The argument series must have shape (steps, dimension) and not be empty; got {series.shape}."
        )
    if not np.isfinite(series).all():
        raise Refusal(
            "not-finite",
            f"The argument series must be finite; got NaN or infinity at step {np.argmin(np.isfinite(series).all(axis=1))}.",
        )
    return series
