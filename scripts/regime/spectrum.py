"""What the theory asks of a run: the autocorrelation of the signal in its private gradients, and what filters make of it.

The recorded images g_t = s_t + w_t of `GradientRecorder` have white noise of known size. It adds its power to the mean of
‖g_t‖² and nothing to the means of ⟨g_t, g_{t−τ}⟩, so that those less the noise estimate the signal's autocorrelation, C_τ.
"""

from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from doppler_hf.filters import LowPassFilter, impulse_response

LAGS: Final = 64
PARTS: Final = 3  # of a run


def spectrum_of(series: Float64[np.ndarray, "steps dimensions"], *, noise_std: float) -> dict[str, Any]:
    """Return C_τ in units of the noise's power, of the whole run for all lags, and of its parts for lags 0, 1 and 10.

    Without noise the unit is the mean of ‖g_t‖².
    """
    noise = noise_std**2 * series.shape[1]
    unit = noise or float(np.mean(np.sum(series**2, axis=1)))
    whole = products(series, lags=min(LAGS, len(series)))
    whole[0] -= noise
    parts = [products(part, lags=min(11, len(part))) for part in np.array_split(series, PARTS)]
    return {
        "noise_power": float(f"{noise:.6g}"),
        "autocorrelation": [float(f"{value:.4g}") for value in whole / unit],
        "parts": [
            [float(f"{value:.4g}") for value in (part[[0, 1, -1]] - np.array([noise, 0, 0])) / unit] for part in parts
        ],
    }


def products(series: Float64[np.ndarray, "steps dimensions"], *, lags: int) -> Float64[np.ndarray, " lags"]:
    """Return the mean of ⟨g_t, g_{t−τ}⟩ over the pairs that there are, for every lag."""
    return np.array([np.mean(np.sum(series[lag:] * series[: len(series) - lag], axis=1)) for lag in range(lags)])


def power_after(filter: LowPassFilter, autocorrelation: Float64[np.ndarray, " lags"]) -> float:
    """Return the power of the filtered signal, ΣΣ κ_i κ_j C_{i−j}; lags beyond the last count as the last."""
    kappa = impulse_response(filter, 4 * LAGS)
    along = np.correlate(kappa, kappa, mode="full")[len(kappa) - 1 :]  # Σ_i κ_i κ_{i+τ}
    known = np.pad(autocorrelation, (0, len(along) - len(autocorrelation)), mode="edge")
    return float(along[0] * known[0] + 2 * np.sum(along[1:] * known[1:]))


def predicted_gain(filter: LowPassFilter, autocorrelation: Float64[np.ndarray, " lags"]) -> float:
    """Return what the paper's bound depends on, (Σ κ_τ ρ_τ)²/Σ κ_τ² with ρ = C/C_0: 1 without a filter."""
    kappa = impulse_response(filter, 4 * LAGS)
    rho = autocorrelation / autocorrelation[0]
    known = np.pad(rho, (0, len(kappa) - len(rho)), mode="edge")
    return float(max(np.sum(kappa * known), 0.0) ** 2 / np.sum(kappa**2))
