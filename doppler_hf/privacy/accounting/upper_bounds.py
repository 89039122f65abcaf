"""Upper bounds on ε of composed Poisson-subsampled Gaussian mechanisms, by three methods.

A step adds N(0, σ²) to a sum of sensitivity 1 over a Poisson sample of rate q. Removing one example turns the output
(1 − q) N(0, σ²) + q N(1, σ²) into N(0, σ²), adding one does the reverse; T steps sum T independent privacy losses. Each
bound takes the worse direction. For single steps and for Rényi divergences that is proven to be removal (Zhu et al. 2022,
https://arxiv.org/abs/2106.08567; Mironov et al. 2019), which *prv* and *rdp* compute. *pld* computes both.

- *rdp*: Rényi divergences (Mironov et al. 2019, https://arxiv.org/abs/1908.10530), turned into ε by Balle et al. 2020,
  https://arxiv.org/abs/1905.09982, Theorem 21, at the best of many orders. The bound holds at every one of them.
- *prv*: the loss on a grid (Gopi et al. 2021, https://arxiv.org/abs/2106.02848). Rounding errs to either side, so the
  paper's error bound is added.
- *pld*: the same, rounded upwards (Doroshenko et al. 2022, https://arxiv.org/abs/2207.04380): a bound at any spacing.

A sampled Gaussian is a triple (σ, q, T) with σ > 0, 0 < q ≤ 1 and T ≥ 1. Opacus, which brings torch, is imported when it
computes.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Sequence

import numpy as np
import scipy.fft
from dp_accounting.pld import privacy_loss_distribution
from scipy.special import binom, logsumexp

SampledGaussian = tuple[float, float, int]

# Opacus's own orders end at 63, which leaves ε ≥ ln(1/δ)/62 whatever the noise; small targets need larger ones.
# Apart, since an order's sum has as many terms as the largest order beside it.
_ORDERS_APART = (tuple(map(float, range(2, 64))), (80.0, 96.0, 128.0, 192.0, 256.0), (384.0, 512.0, 768.0, 1024.0))
_WHOLE_ORDERS = tuple(itertools.chain(*_ORDERS_APART))

# Opacus sums a series until its terms fall below e⁻³⁰ ≈ 10⁻¹³ of a sum of at least 1. Rounding errs by as much again, and so
# does the sum at whole orders.
_RDP_SERIES_ERROR = 1e-12
_PRV_POINTS, _PLD_POINTS = 2**20, 2**16  # largest grids: up to half a second a call
_FEWEST_PRV_POINTS = 2**13  # of a coarse grid, which errs most in runs of few steps, where it is short anyway
_LARGE_ERROR = 5e-3  # the part of ε above which PRV's error bound says that a coarse grid is too coarse
# Attacks: what an ε above ln 10⁴ bounds are rates of false positives below 10⁻⁴. Of more steps a curve takes seconds.
_CURVE_EPSILONS = np.linspace(0.0, math.log(1e4), 500)
_LOST_OF_A_CURVE, _MOST_STEPS_OF_A_CURVE = 1e-8, 2**17
# Below this δ the rounding of double-precision Fourier transforms (10⁻¹⁵ and more, composed) is no longer small beside δ.
_SMALLEST_FOURIER_DELTA = 1e-10


@functools.lru_cache(maxsize=2**12)  # The same mechanism is composed over many numbers of steps.
def _rdp_of_step(noise_multiplier: float, sample_rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Return the Rényi divergence of one step at whole orders, for which the sum of the paper's section 3.3 is finite.

    exp((α − 1)·rdp(α)) = Σ_k C(α, k)·(1 − q)^(α−k)·qᵏ·exp((k² − k)/(2σ²))
    """
    alpha, k = np.array(orders)[:, None], np.arange(max(orders) + 1)
    if sample_rate == 1.0:
        return alpha[:, 0] / (2.0 * noise_multiplier**2)
    with np.errstate(over="ignore"):
        log_terms = _log_binomials(orders) + k * math.log(sample_rate) + (alpha - k) * math.log1p(-sample_rate)
        log_terms += np.where(k <= alpha, (k**2 - k) / (2.0 * noise_multiplier**2), 0.0)
        return (logsumexp(log_terms, axis=1) + _RDP_SERIES_ERROR) / (alpha[:, 0] - 1.0)


@functools.lru_cache(maxsize=4)  # A third of the time of a divergence, and always the same.
def _log_binomials(orders: tuple[float, ...]) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return np.log(binom(np.array(orders)[:, None], np.arange(max(orders) + 1)))


@functools.lru_cache(maxsize=2**14)
def _rdp_at_fractional_order(noise_multiplier: float, sample_rate: float, order: float) -> float:
    from opacus.accountants.analysis import rdp as opacus_rdp

    rdp = opacus_rdp.compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=order)
    return float(rdp) + _RDP_SERIES_ERROR / (order - 1.0)


def _epsilon_at_best_order(rdp: np.ndarray, orders: Sequence[float], *, delta: float) -> tuple[float, float]:
    from opacus.accountants.analysis import rdp as opacus_rdp

    with warnings.catch_warnings():
        # Opacus asks for more orders when the best one is the first or the last. The bound holds there as well.
        warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
        epsilon, order = opacus_rdp.get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
    return max(float(epsilon), 0.0), float(order)


def _epsilon_at_best_whole_order(mechanisms: Sequence[SampledGaussian], *, delta: float) -> tuple[float, float]:
    rdp = [sum(steps * _rdp_of_step(sigma, rate, orders) for sigma, rate, steps in mechanisms) for orders in _ORDERS_APART]
    return _epsilon_at_best_order(np.concatenate(rdp), _WHOLE_ORDERS, delta=delta)


def rdp_epsilon(mechanisms: Sequence[SampledGaussian], *, delta: float) -> float:
    """Return Rényi differential privacy's bound on ε at `delta`."""
    epsilon, order = _epsilon_at_best_whole_order(mechanisms, delta=delta)
    if order <= 11.0:
        # Fractional orders matter near small whole ones only, and take long: the series is slow for q near 1/2. So in
        # tenths, to either side, as long as the bound falls.
        for sign in (1, -1):
            for tenth in range(1, 10):
                other = order + sign * tenth / 10
                rdp = sum(steps * _rdp_at_fractional_order(sigma, rate, other) for sigma, rate, steps in mechanisms)
                found, _ = _epsilon_at_best_order(np.array([rdp]), [other], delta=delta)
                if found >= epsilon:
                    break
                epsilon = found
    return epsilon


def rdp_estimate(mechanisms: Sequence[SampledGaussian], *, delta: float) -> float:
    """Return a somewhat larger bound than `rdp_epsilon` in a fraction of the time, as a start for a search."""
    return _epsilon_at_best_whole_order(mechanisms, delta=delta)[0]


def prv_epsilon(mechanisms: Sequence[SampledGaussian], *, delta: float) -> float:
    """Return the bound of privacy random variables on ε at `delta`, for q < 1, or that of *rdp* where it is smaller.

    *rdp* replaces it below δ = 10⁻¹⁰, and the smaller one of *rdp* and *pld* where this arithmetic overflows.
    """
    return _prv(mechanisms, delta=delta, coarsening=1)


def prv_estimate(mechanisms: Sequence[SampledGaussian], *, delta: float) -> float:
    """Return an estimate of `prv_epsilon` in a fraction of the time, as a start for a search. It is no bound.

    The coarse grid errs by up to 2e-4 of ε in what was tried, in one step with q = 0.001 by 2e-3.
    """
    return _prv(mechanisms, delta=delta, coarsening=16)


def _prv(mechanisms: Sequence[SampledGaussian], *, delta: float, coarsening: int) -> float:
    from opacus.accountants.analysis.prv import Domain, compose_heterogeneous, discretize

    from doppler_hf.privacy.accounting.step_loss import StepLoss

    if delta < _SMALLEST_FOURIER_DELTA:
        return rdp_epsilon(mechanisms, delta=delta)
    rdp = (rdp_epsilon if coarsening == 1 else rdp_estimate)(mechanisms, delta=delta)
    steps = [count for _, _, count in mechanisms]
    delta_error = delta / 1000
    # The grid's half width follows the paper's Remark 5.6: neither the whole nor any single step may lie beyond it. Opacus
    # sets the number of points by an error of 0.01 in ε: too coarse for ε = 0.1, needlessly fine for ε = 20. Here it grows
    # as √T up to a limit, and the error, which follows, is smooth in σ and q for one T, as calibration needs.
    reach, _ = _epsilon_at_best_whole_order(mechanisms, delta=delta_error / 4)
    for sigma, rate, _ in mechanisms:
        alone, _ = _epsilon_at_best_whole_order([(sigma, rate, 1)], delta=delta_error / (8 * sum(steps)))
        reach = max(reach, alone)
    points = min(int(scipy.fft.next_fast_len(math.ceil(2**15 * math.sqrt(sum(steps))), real=True)) * 2, _PRV_POINTS)
    error_in_spacings = math.sqrt(sum(steps) * math.log(12 / delta_error) / 2)
    spacing = (reach + 3.0) / (points / 2 - 1 - error_in_spacings)
    if spacing <= 0.0:
        return rdp  # 10¹⁰ steps
    epsilon_error = spacing * error_in_spacings
    half_width = spacing * (points // 2 - 1)
    if coarsening > 1:
        points = int(scipy.fft.next_fast_len(max(points // coarsening, _FEWEST_PRV_POINTS) // 2, real=True)) * 2
        spacing = half_width / (points // 2 - 1)
    domain = Domain(-half_width, half_width + spacing, points)
    try:
        with np.errstate(over="raise", invalid="raise"):
            grids = [
                discretize(StepLoss(rate, sigma, t_min=domain.t_min, t_max=domain.t_max), domain)
                for sigma, rate, _ in mechanisms
            ]
            composed = compose_heterogeneous(dprvs=grids, num_self_compositions=steps)
            # Lower bound, estimate, upper bound: the last is δ's and ε's error bound away from the estimate.
            _, _, upper = composed.compute_epsilon(delta, delta_error, epsilon_error)
    except (FloatingPointError, RuntimeError):
        # Overflow with almost no noise, or a mean outside the grid. RDP's bound alone may be a third larger: a jump in σ.
        return min(rdp, pld_epsilon(mechanisms, delta=delta))
    if coarsening > 1 and epsilon_error > _LARGE_ERROR * upper:
        return prv_epsilon(mechanisms, delta=delta)
    return min(max(float(upper), 0.0), rdp)


@functools.lru_cache(maxsize=8)  # The same mechanism is composed over many numbers of steps.
def _pld_of_step(
    noise_multiplier: float, sample_rate: float, spacing: float, log_tail: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=spacing,
        log_mass_truncation_bound=log_tail,
    )


def _loss_scales(noise_multiplier: float, sample_rate: float, log_tail: float) -> tuple[float, float]:
    """Return the standard deviation (from the χ² divergence) of a step's privacy loss, and the largest loss on the grid."""
    spread = sample_rate * math.sqrt(math.expm1(min(noise_multiplier**-2, 100.0)))
    farthest = math.sqrt(-2.0 * log_tail) / noise_multiplier + 0.5 / noise_multiplier**2
    if sample_rate < 1.0:
        farthest = float(np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + farthest))
    return spread, farthest


def pld_epsilon(mechanisms: Sequence[SampledGaussian], *, delta: float) -> float:
    """Return the bound of pessimistic privacy loss distributions on ε at `delta`.

    *rdp* replaces it below δ = 10⁻¹⁰, and where this arithmetic overflows.
    """
    if delta < _SMALLEST_FOURIER_DELTA:
        return rdp_epsilon(mechanisms, delta=delta)
    try:
        with np.errstate(over="raise", invalid="raise"):
            return float(_composed_pld(mechanisms, lost=1e-4 * delta, coarsening=1).get_epsilon_for_delta(delta))
    except (OverflowError, FloatingPointError):
        return rdp_epsilon(mechanisms, delta=delta)


def delta_curve(mechanisms: Sequence[SampledGaussian]) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of ε ≥ 0 and a bound on δ there, by *pld*, or by *rdp* where that is too slow or overflows."""
    if sum(steps for _, _, steps in mechanisms) <= _MOST_STEPS_OF_A_CURVE:
        try:
            with np.errstate(over="raise", invalid="raise"):
                composed = _composed_pld(mechanisms, lost=_LOST_OF_A_CURVE, coarsening=4)
                return _CURVE_EPSILONS, np.clip(composed.get_delta_for_epsilon(_CURVE_EPSILONS), 0.0, 1.0)
        except (OverflowError, FloatingPointError):
            pass
    deltas = np.geomspace(_LOST_OF_A_CURVE, 0.9, 50)
    return np.array([rdp_estimate(mechanisms, delta=delta) for delta in deltas]), deltas


def _composed_pld(
    mechanisms: Sequence[SampledGaussian], *, lost: float, coarsening: int
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the distribution of all steps, on a grid whose spacing is `coarsening` times that of the accountant.

    The mass beyond the grid, at most `lost` in all, is an infinite loss.
    """
    # T full-batch steps are one with σ/√T.
    parts = [
        (sigma / math.sqrt(steps), rate, 1) if rate == 1.0 else (sigma, rate, steps) for sigma, rate, steps in mechanisms
    ]
    log_tail = float(math.floor(math.log(lost / sum(steps for _, _, steps in parts))))  # e's power: cached for several T
    scales = [_loss_scales(sigma, rate, log_tail) for sigma, rate, _ in parts]
    # A grid of spacing h adds about h²/6 to the variance of a step's loss: with h a 25th of the root of the mean variance, ε
    # is about 1e-4 too large. For losses rarely large the length is capped, and the spread at a 40th of the largest loss.
    variance = sum(
        min(spread, farthest / 40.0) ** 2 * steps for (spread, farthest), (_, _, steps) in zip(scales, parts, strict=True)
    )
    spacing = coarsening * max(
        math.sqrt(variance / sum(steps for _, _, steps in parts)) / 25.0,
        max(farthest for _, farthest in scales) / _PLD_POINTS,
    )
    total = privacy_loss_distribution.identity(spacing)
    for sigma, rate, steps in parts:
        total = total.compose(_pld_of_step(sigma, rate, spacing, log_tail).self_compose(steps))
    return total
