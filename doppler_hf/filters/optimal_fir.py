"""The optimal filter without feedback, from the private gradients alone (DOPPLER, Section 5.3, *Optimal FIR filter*).

Let g_t = s_t + w_t with white noise w of standard deviation σ in each of d coordinates. It adds d σ² to the mean C_0 of
‖g_t‖² and nothing to the means C_τ of ⟨g_t, g_{t-τ}⟩ at other lags. So with d σ² taken off C_0,

    c_τ = ½ ρ_τ = ½ min(max(C_τ / C_0, 0), 1),    b_τ = c_τ / Σ c

estimate the autocorrelation in the paper's scale (c_0 = ½) and the filter that is best for its bound: with its learning rate
tuned, that depends on (ΣΣ c_τ κ_τ)² / ΣΣ κ_τ² alone, κ the impulse response, which κ ∝ c maximizes (Cauchy-Schwarz). The
paper's closed form instead takes ½ ‖g_{t-τ}‖² less noise off each product, leaves the noise in lag 0, and clamps at each
step. Lags with ρ_τ < ½ then get no weight, and noisier gradients bring the filter closer to none.
"""

import numpy as np
from jaxtyping import Float64

from doppler_hf.filters.low_pass_filter import LowPassFilter


def optimal_fir(autocorrelation: Float64[np.ndarray, " taps"]) -> LowPassFilter:
    """Return the best filter of unit gain without feedback for a signal of the given autocorrelation, in closed form.

    Args:
        autocorrelation: c_0 ... c_{taps-1} of the signal in any scale, shape (taps,).

    Example:
        >>> optimal_fir(np.array([0.5, 0.3, 0.2]))
        LowPassFilter(b=(0.5, 0.3, 0.2), a=(1.0,))
    """
    if not autocorrelation.sum() > 0:  # NaN neither
        raise ValueError(
            f"autocorrelation must have a positive sum, by which b is divided, got {autocorrelation.sum():.6g}."
        )
    return LowPassFilter(b=tuple(autocorrelation / autocorrelation.sum()))
