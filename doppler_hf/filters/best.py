"""The paper's equation "snr_opt", solved numerically: the filter of a given order with the greatest SNR.

For fixed poles with response h, κ = b * h and the SNR is (u·b) / (bᵀ R b), u_j = Σ_τ c_τ h_{τ-j}, R_ij the autocorrelation
of h at lag i - j. With κ = Hb and H = QU (Q orthonormal, U triangular), x = Ub and e = U⁻ᵀ1, this reads

    maximize (Qᵀc · x) / (x · x)    subject to    e · x = Σa.

The maximum lies in the plane of Qᵀc and e, in closed form. Shaped noise goes through h too: H = QU is then the response to
it, and U⁻ᵀu replaces Qᵀc. So only poles are searched, as reflection coefficients, which are free in (-1, 1) for exactly the
stable polynomials (Levinson-Durbin recursion).
"""

import math
from numbers import Integral
from typing import Final, Literal

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.signal
from jaxtyping import Float64
from numpy.typing import NDArray

from doppler_hf.filters.design import from_coefficients
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.filters.snr import check_autocorrelation

Objective = Literal["snr", "bound"]
Array = NDArray[np.float64]

LAST_LAG: Final = 0.01  # what is left of a pole's response at the last lag
SEARCH_RANGE: Final = 8.0  # reflection coefficients are tanh of what is searched, up to 1 - 2e-7
# On seven autocorrelations, orders 1 to 3 and both objectives, 8 starts missed what 64 find once, and 24 never.
RANDOM_STARTS: Final = 24


def best_filter(
    autocorrelation: Float64[np.ndarray, " lags"],
    order: int,
    *,
    objective: Objective = "snr",
    noise: NoiseShape = WHITE,
) -> LowPassFilter:
    """Find the valid filter of an order with the greatest SNR as T → ∞, from a fixed set of starting points.

    Unit gain alone does not bound the SNR: a pole close to 1 spreads the weight over ever more lags. So poles have a modulus
    of at most 0.01^(1/lags), and the filter no more taps than there are lags.

    Args:
        autocorrelation: c_0 ... c_{lags-1} of the signal (c_0 = 1/2 in the paper's scale), c_0 > 0, shape (lags,).
        order: n_a = n_b of the filter, from 0 to lags - 1.
        objective: ``"snr"`` as in the paper; ``"bound"`` for SNR · S_T, which the convergence bound depends on (see `snr`).
        noise: The shape of the noise that the filter is to remove.
    """
    check_autocorrelation(autocorrelation)
    lags = len(autocorrelation)
    if autocorrelation[0] <= 0:
        raise ValueError(f"autocorrelation must be positive at lag 0, the power of the signal, got {autocorrelation[0]}.")
    if not isinstance(order, Integral) or not 0 <= order < lags:
        raise ValueError(f"order must be an integer from 0 to {lags - 1}, one less than the lags known, got {order}.")
    starts = [np.zeros(order), *np.random.default_rng(0).normal(size=(RANDOM_STARTS, order))] if order else [np.zeros(0)]
    # Among poles alone; then, if the best of these has a step response that is not positive, among poles and zeros.
    found = [_search_poles(start, autocorrelation, objective, noise) for start in starts]
    b, a = max(found, key=lambda each: _value(*each, autocorrelation, objective, noise))
    if _lowest_step(b, a, lags) <= 0:
        found = [_search_both(start, autocorrelation, objective, noise) for start in starts]
        found = [each for each in found if _lowest_step(*each, lags) > 0]
        if not found:
            raise ValueError(
                f"No filter of order {order} with a positive step response suits this autocorrelation. Try another order."
            )
        b, a = max(found, key=lambda each: _value(*each, autocorrelation, objective, noise))
    return from_coefficients(tuple(b), tuple(a))


def _search_poles(start: Array, autocorrelation: Array, objective: Objective, noise: NoiseShape) -> tuple[Array, Array]:
    def loss(search: Array) -> float:
        a = _feedback(search, len(autocorrelation))
        return -_value(_best_feed_forward(a, autocorrelation, objective, noise), a, autocorrelation, objective, noise)

    if len(start):
        bounds = [(-SEARCH_RANGE, SEARCH_RANGE)] * len(start)
        start = scipy.optimize.minimize(loss, start, method="L-BFGS-B", bounds=bounds).x
    a = _feedback(start, len(autocorrelation))
    return _best_feed_forward(a, autocorrelation, objective, noise), a


def _search_both(start: Array, autocorrelation: Array, objective: Objective, noise: NoiseShape) -> tuple[Array, Array]:
    lags, order = len(autocorrelation), len(start)

    def coefficients(search: Array) -> tuple[Array, Array]:
        a = _feedback(search[:order], lags)
        # The last coefficient is what unit gain leaves for it.
        return np.append(search[order:], a.sum() - search[order:].sum()), a

    def loss(search: Array) -> float:
        return -_value(*coefficients(search), autocorrelation, objective, noise)

    def margin(search: Array) -> Array:
        b, a = coefficients(search)
        return np.cumsum(_kappa(b, a, lags)) - 2e-3 / lags

    a = _feedback(start, lags)
    search = np.concatenate([start, np.full(order, a.sum() / (order + 1))])
    bounds = [(-SEARCH_RANGE, SEARCH_RANGE)] * order + [(None, None)] * order
    found = scipy.optimize.minimize(
        loss, search, method="SLSQP", bounds=bounds, constraints={"type": "ineq", "fun": margin}, options={"maxiter": 300}
    )
    return coefficients(found.x)


def _feedback(search: Array, lags: int) -> Array:
    """Return the polynomial a whose reflection coefficients are tanh(search), shrunk to the largest modulus allowed."""
    a = np.ones(1)
    for reflection in np.tanh(search):
        a = np.append(a, 0.0)
        a = a + reflection * a[::-1]
    return a * (LAST_LAG ** (1 / lags)) ** np.arange(len(a))


def _best_feed_forward(a: Array, autocorrelation: Array, objective: Objective, noise: NoiseShape) -> Array:
    response = _kappa(np.ones(1), a, len(autocorrelation))
    columns = scipy.linalg.toeplitz(response, np.zeros(len(a)))
    u = np.linalg.qr(scipy.signal.lfilter([1.0], noise.c, columns, axis=0), mode="r")
    passed = columns[: len(autocorrelation)].T @ autocorrelation
    signal = scipy.linalg.solve_triangular(u, passed, trans="T")
    gain = scipy.linalg.solve_triangular(u, np.ones(len(a)), trans="T")
    along, norm = float(signal @ gain) / float(np.linalg.norm(gain)), float(np.linalg.norm(signal))
    # A filter matched to the signal may have no positive gain at frequency zero; what is best for the SNR always has.
    proportional = objective == "bound" and along > 1e-9 * norm
    x = signal if proportional else gain * (norm / np.linalg.norm(gain)) + signal
    b = scipy.linalg.solve_triangular(u, x)
    return np.asarray(b * (a.sum() / b.sum()))


def _kappa(b: Array, a: Array, lags: int) -> Array:
    """Return κ until the slowest pole allowed has fallen to 1e-8."""
    return np.asarray(scipy.signal.lfilter(b, a, np.eye(1, 4 * lags + len(b))[0]))


def _value(b: Array, a: Array, autocorrelation: Array, objective: Objective, noise: NoiseShape) -> float:
    kappa = _kappa(b, a, len(autocorrelation))
    signal = float(kappa[: len(autocorrelation)] @ autocorrelation)
    power = float(np.sum(np.square(scipy.signal.lfilter([1.0], noise.c, kappa))))
    return signal / power if objective == "snr" else math.copysign(signal**2, signal) / power


def _lowest_step(b: Array, a: Array, lags: int) -> float:
    return float(np.cumsum(_kappa(b, a, lags)).min())
