"""The optimal filter without feedback, from the private gradients alone (DOPPLER, Section 5.3, *Optimal FIR filter*).

Let g_t = s_t + w_t with white noise w of standard deviation σ in each of d coordinates. It adds d σ² to the mean C_0 of
‖g_t‖² and nothing to the means C_τ of ⟨g_t, g_{t-τ}⟩ at other lags. So with d σ² taken off C_0,

    c_τ = ½ ρ_τ = ½ min(max(C_τ / C_0, 0), 1),    b_τ = c_τ / Σ c

estimate the autocorrelation in the paper's scale (c_0 = ½) and the filter that is best for the bound (see `snr`). The
paper's closed form instead takes ½ ‖g_{t-τ}‖² less noise off each product, leaves the noise in lag 0, and clamps at each
step. Lags with ρ_τ < ½ then get no weight, and noisier gradients bring the filter closer to none.
"""

import math

import numpy as np
from jaxtyping import Float, Float64

from doppler_hf.filters.design import from_coefficients
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.snr import check_autocorrelation
from doppler_hf.filters.spectrum import check_noise, checked


def optimal_fir(autocorrelation: Float64[np.ndarray, " taps"]) -> LowPassFilter:
    """Return the best filter of unit gain without feedback for a signal of the given autocorrelation, in closed form.

    Args:
        autocorrelation: c_0 ... c_{taps-1} of the signal in any scale, shape (taps,).

    Example:
        >>> optimal_fir(np.array([0.5, 0.3, 0.2]))
        LowPassFilter(b=(0.5, 0.3, 0.2), a=(1.0,))
    """
    check_autocorrelation(autocorrelation)
    if autocorrelation.sum() <= 0:
        raise ValueError(
            f"autocorrelation must have a positive sum, by which b is divided, got {autocorrelation.sum():.6g}."
        )
    return from_coefficients(tuple(autocorrelation))


def estimate_autocorrelation(
    gradients: Float[np.ndarray, "steps dimension"],
    noise_std: float,
    *,
    taps: int | None = None,
) -> Float64[np.ndarray, " taps"]:
    """Estimate the autocorrelation of the signal in noisy gradients.

    Args:
        gradients: Successive private gradients, flattened, shape (steps, dimension).
        noise_std: Standard deviation σ of the white noise per coordinate (σ_DP).
        taps: Number of lags, from 1 to steps; by default all.

    Returns:
        c_0 ... c_{taps-1}, shape (taps,), c_0 = ½.
    """
    gradients = checked(gradients, name="gradients")
    steps, dimension = gradients.shape
    taps = steps if taps is None else taps
    if not isinstance(taps, int | np.integer) or not 1 <= taps <= steps:
        raise ValueError(f"taps must be an integer from 1 to the {steps} gradients, got {taps}.")
    check_noise(noise_std)
    products = [np.einsum("td,td->t", gradients[lag:], gradients[: steps - lag]) for lag in range(taps)]
    means = np.array([product.mean() for product in products])
    return autocorrelation_from_products(means, noise_std, dimension=dimension, steps=steps)


def autocorrelation_from_products(
    products: Float64[np.ndarray, " taps"], noise_std: float, *, dimension: int, steps: int
) -> Float64[np.ndarray, " taps"]:
    """Make the same estimate from mean products, when not all gradients can be kept.

    A power C_0 below its standard error under noise alone, σ² √(2d/steps), is replaced by that error.

    Args:
        products: Means over the steps of ⟨g_t, g_{t-τ}⟩ for τ = 0 ... taps-1, shape (taps,).
        noise_std: Standard deviation of the white noise per coordinate.
        dimension: Number of coordinates d.
        steps: Number of steps in the mean at lag 0.
    """
    check_autocorrelation(products)
    check_noise(noise_std)
    if dimension < 1 or steps < 1:
        raise ValueError(f"dimension and steps must be at least 1, got {dimension} and {steps}.")
    power = max(float(products[0]) - dimension * noise_std**2, noise_std**2 * math.sqrt(2 * dimension / steps))
    correlation = np.zeros(len(products))
    if power > 0:
        correlation = np.clip(products / power, 0, 1)
    correlation[0] = 1.0
    return correlation / 2
