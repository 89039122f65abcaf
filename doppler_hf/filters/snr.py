"""The paper's normalized SNR of a filter, and the filters that maximize it.

    SNR = Σ_{t<T} Σ_{τ≤t} c_τ κ_τ / Σ_{t<T} Σ_{τ≤t} κ_τ²,

κ the impulse response, c the autocorrelation of the gradient's signal in the paper's scale: c_τ = ρ_τ/2 = c_{-τ}.

- Momentum, κ_τ = 0.1 · 0.9^τ, has SNR = 1.9 Σ_{τ≥0} 0.9^τ c_τ as T → ∞. The paper's 1.9 · (1/2 + Σ_{τ≥0}) counts c_0 twice.
- Under unit gain κ_τ ∝ c_τ + r maximizes the SNR (T → ∞), r the root mean square of c over n taps: n (mean + r) / 2.
- κ ∝ c maximizes SNR · S_T = (ΣΣ c_τ κ_τ)² / ΣΣ κ_τ² (Cauchy-Schwarz). The theorem's bound depends on that product once its
  learning rate is tuned: the minimum over η of F_0 / (η S_T) + η L N / (2 SNR) is √(2 F_0 L N / (S_T SNR)).
"""

import numpy as np
import scipy.signal
from jaxtyping import Float64

from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.filters.response import impulse_response, noise_gain


def signal_to_noise_ratio(
    filter: LowPassFilter,
    autocorrelation: Float64[np.ndarray, " lags"],
    steps: int | None = None,
    *,
    noise: NoiseShape = WHITE,
) -> float:
    """Return the paper's normalized SNR of a filter, for a gradient of the given autocorrelation.

    Args:
        filter: The filter.
        autocorrelation: c_0 ... c_{lags-1} of the signal, c_0 = 1/2, shape (lags,); 0 beyond.
        steps: Length of the run T, at least 1; None for the limit T → ∞.
        noise: The shape of the noise, whose power is counted for the same σ.
    """
    check_autocorrelation(autocorrelation)
    if steps is None:
        kappa = impulse_response(filter, len(autocorrelation))
        return float(kappa @ autocorrelation) / noise_gain(filter, noise)
    # Lag τ occurs in T - τ of the T outer sums.
    kappa = impulse_response(filter, steps)
    lags = min(steps, len(autocorrelation))
    occurrences = np.arange(steps, 0, -1)
    of_noise = noise.norm * np.asarray(scipy.signal.lfilter([1.0], noise.c, kappa))
    return float((occurrences * kappa)[:lags] @ autocorrelation[:lags]) / float(occurrences @ of_noise**2)


def check_autocorrelation(autocorrelation: Float64[np.ndarray, " lags"]) -> None:
    """Refuse anything but a row of finite numbers."""
    if autocorrelation.ndim != 1 or not len(autocorrelation):
        raise ValueError(f"autocorrelation must be c_0, c_1, ... in one row, got shape {autocorrelation.shape}.")
    if not np.isrealobj(autocorrelation) or not np.isfinite(autocorrelation).all():
        index = int(np.argmax(~np.isfinite(autocorrelation) | np.iscomplex(autocorrelation)))
        raise ValueError(f"autocorrelation must be finite and real, got {autocorrelation[index]} at lag {index}.")
