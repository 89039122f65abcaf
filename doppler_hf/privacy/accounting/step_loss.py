"""The privacy loss of one step, as PRV composes it: Opacus's distribution, in a fraction of the time.

Removing an example turns x ~ (1 − q)·N(0, σ²) + q·N(1, σ²) into N(0, σ²), with L(x) = ln(1 − q + q·exp((2x − 1)/(2σ²))).
Opacus computes its distribution function on the whole grid, though it is 0 or 1 on most of it, and its mean by adaptive
quadrature. For the mean the trapezoidal rule is exact to rounding (Trefethen and Weideman 2014,
https://doi.org/10.1137/130932132). This module imports Opacus, which brings torch.
"""

import math
from typing import Final, final

import numpy as np
from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV

# Standard deviations on either side, and points of the rule: twice as many change the mean by 1e-17.
_REACH: Final = 9.0
_POINTS: Final = 512
_ERFC_IS_LOST: Final = 6.0  # erfc(6) = 2·10⁻¹⁷


@final
class StepLoss:
    """The loss L of one step, given that it lies in [t_min, t_max]: what `discretize` of Opacus asks for; q < 1, σ > 0."""

    def __init__(self, sample_rate: float, noise_multiplier: float, *, t_min: float, t_max: float) -> None:
        self._q, self._sigma, self._t_min, self._t_max = sample_rate, noise_multiplier, t_min, t_max
        self._opacus = PoissonSubsampledGaussianPRV(sample_rate, noise_multiplier)
        self._least = math.log1p(-sample_rate)
        # Where Opacus's distribution function reaches 1 in float64.
        self._largest = float(self._loss(np.array(1.0 + _ERFC_IS_LOST * math.sqrt(2.0) * noise_multiplier)))
        self._below, up_to = self._cdf(np.array([t_min, t_max]))
        self._mass = up_to - self._below

    def _loss(self, x: np.ndarray) -> np.ndarray:
        return np.logaddexp(math.log1p(-self._q), math.log(self._q) + (2.0 * x - 1.0) / (2.0 * self._sigma**2))

    def _cdf(self, t: np.ndarray) -> np.ndarray:
        inside = (t > self._least) & (t < self._largest)
        probabilities = np.where(t < self._largest, 0.0, 1.0)
        probabilities[inside] = self._opacus.cdf(t[inside])
        return probabilities

    def cdf(self, t: np.ndarray) -> np.ndarray:
        """Return the probability that the loss is at most t."""
        return np.where(t < self._t_min, 0.0, np.where(t < self._t_max, (self._cdf(t) - self._below) / self._mass, 1.0))

    def mean(self) -> float:
        """Return the mean loss; what lies beyond the grid is too little to change it."""
        x = np.linspace(-_REACH * self._sigma, 1.0 + _REACH * self._sigma, _POINTS)
        density = (1.0 - self._q) * np.exp(-0.5 * (x / self._sigma) ** 2)
        density += self._q * np.exp(-0.5 * ((x - 1.0) / self._sigma) ** 2)
        return float(density @ self._loss(x) / density.sum())
