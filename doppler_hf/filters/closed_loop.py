"""The loss that privacy noise costs when the gradient pulls the weights back; it decides the filter and the noise shape.

In a direction of curvature λ, the weights are w_{t+1} = w_t - η m_t, with m = κ * (λw + n) and n the noise of the gradient.
With x = ηλ and H the filter's response this is a closed loop:

    w = -η H / (e^{iω} - 1 + xH) · n,    ½ λ E w² = ½ η noise_std² L(x),    L(x) = x ∫ |H|² S / |e^{iω} - 1 + xH|² dω/2π,

with S = ‖c‖²/|c(e^{-iω})|² the power density of the noise of strategy c. White noise without a filter has L(x) = 1/(2 - x).
The model assumes that learning rates change slowly, and that curvatures spread evenly on a logarithmic scale up to x = 1.
The scale begins at x = 10 η̂ / Σ η, where the gradient changes by its own length in a tenth of the path of the weights.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

import numpy as np
import scipy.optimize
from jaxtyping import Complex128, Float64, Inexact
from numpy.typing import NDArray

from doppler_hf.errors import Refusal
from doppler_hf.filters.design import positive_integer
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.filters.on_circle import values_on_circle

# In the flattest direction, the gradient changes by its own length within this share of the path of the weights.
TURN_SHARE: Final = 0.1
SHARPEST: Final = 1.0  # x = ηλ of the sharpest direction, at the full learning rate
WORTHWHILE: Final = 0.02  # A smaller gain in loss is not worth a delay, a buffer, or larger noise in single steps.
# The largest modulus of a strategy's root → the share by which the loss must fall to allow it. With moduli up to 0.9, the
# noise of a step is at most five times white noise. With 0.99 it may be fifteen times white noise, but behind the momentum
# of long runs this saves a quarter of the loss.
LARGEST_ROOTS: Final[Mapping[float, float]] = {0.9: 0.0, 0.99: WORTHWHILE}
_DIRECTIONS, _RATES, _FREQUENCIES = 16, 10, 2048  # Sizes of the grid.
_MOST_RESONANT: Final = 64  # The most coefficients of a filter whose resonances are looked for.


class StabilityLimit(NamedTuple):
    """Up to where SGD with a filter is stable, and how it oscillates there.

    Attributes:
        x: x = ηλ, learning rate times curvature, below which SGD is stable. Just above it, the weights oscillate more and
            more.
        period: The period of the oscillation at x, in steps.
    """

    x: float
    period: float


def stability_limit(filter: LowPassFilter) -> StabilityLimit:
    """Return the product of learning rate and curvature up to which SGD with a filter is stable.

    A root of (1 - z⁻¹) A + x z⁻¹ B is at z = e^{iω} where x = -(z - 1) A/B is real and positive. For a small x, all roots
    are inside the unit circle, so the limit is the smallest such x.

    Example:
        >>> tuple(round(each, 2) for each in stability_limit(LowPassFilter(b=(1.0,), a=(1.0,))))
        (2.0, 2.0)
        >>> tuple(round(each, 2) for each in stability_limit(LowPassFilter(b=(0.1,), a=(1.0, -0.9))))
        (38.0, 2.0)
    """

    def x_at(frequencies: NDArray[np.float64]) -> Complex128[np.ndarray, " frequencies"]:
        b, a = (values_on_circle(each, frequencies) for each in (filter.b, filter.a))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.conj(values_on_circle((1.0, -1.0), frequencies)) * a / b)

    def imaginary(frequency: float) -> float:
        return float(x_at(np.array([frequency])).imag[0])

    grid = _grid_of(filter)
    x = x_at(grid)
    is_real = np.isfinite(x.real) & (x.real > 0) & (np.abs(x.imag) <= 1e-15 * x.real)
    candidates = dict(zip(grid[is_real], x.real[is_real], strict=True))
    # The sign of the imaginary part changes where x is real, and where B is nearly 0 and x is large.
    is_finite = np.isfinite(x.real)
    changes = np.flatnonzero(is_finite[:-1] & is_finite[1:] & (x.imag[:-1] * x.imag[1:] < 0))
    smaller = np.minimum(x.real[changes], x.real[changes + 1])
    for at in changes[np.argsort(np.maximum(smaller, 0.0), kind="stable")]:
        if candidates and min(x.real[at], x.real[at + 1]) > 1.5 * min(candidates.values()):
            break
        frequency = scipy.optimize.brentq(imaginary, grid[at], grid[at + 1], xtol=1e-18)
        found = x_at(np.array([frequency]))[0]
        if np.isfinite(found.real) and found.real > 0 and abs(found.imag) < 1e-3 * found.real:
            candidates[frequency] = float(found.real)
    first = min(candidates, key=candidates.__getitem__)
    return StabilityLimit(float(candidates[first]), float(2 / first))


def _grid_of(filter: LowPassFilter) -> Float64[np.ndarray, " frequencies"]:
    """Return frequencies above 0 and up to 1, close together near 0, for slow filters, and near resonances."""
    grid = np.union1d(np.geomspace(1e-8, 1, _FREQUENCIES), np.linspace(0, 1, _FREQUENCIES + 1)[1:])
    if filter.order > _MOST_RESONANT:
        return grid
    near = np.geomspace(1e-3, 1e3, 64)
    offsets = np.concatenate([-near[::-1], [0.0], near])
    for root in np.concatenate([np.roots(filter.a), np.roots(filter.b)]):
        if root.imag >= 0 and 0.98 < abs(root) < 1.02:
            around = (abs(np.angle(root)) + max(abs(1 - abs(root)), 1e-9) * offsets) / np.pi
            grid = np.union1d(grid, around[(around > 1e-8) & (around <= 1)])
    return grid


@final
class ClosedLoop:
    """Gradient, filter and weights in directions of several curvatures.

    Args:
        x: ηλ of every direction, above 0, shape (directions,).
        weights: Weight of each direction, shape (directions,), with sum 1; equal weights by default.

    Raises:
        ValueError: If there is no direction, or some x is not positive.

    Example:
        >>> loop, momentum = ClosedLoop.of_run(300), LowPassFilter(b=(0.1,), a=(1.0, -0.9))
        >>> round(loop.loss(momentum, NoiseShape.banded(4)) / loop.loss(momentum), 2)
        0.32
    """

    def __init__(
        self, x: Float64[np.ndarray, " directions"], weights: Float64[np.ndarray, " directions"] | None = None
    ) -> None:
        if not len(x) or not x.min() > 0:
            raise Refusal(
                "out-of-range",
                f"Each x of ClosedLoop (learning rate times curvature of a direction) must be above 0; got {x}. Leave "
                "flat directions out.",
            )
        self._x = x
        self._weights = np.full(len(x), 1 / len(x)) if weights is None else weights
        # The measure of ∫ dω/2π over both signs of ω, on a logarithmic scale that starts where nothing changes any more.
        log_omega = np.linspace(math.log(1e-3 * x.min()), math.log(math.pi), _FREQUENCIES)
        self._omega = np.exp(log_omega)
        self._measure = self._omega * (log_omega[1] - log_omega[0]) / math.pi
        self._measure[-1] /= 2
        self._passed = functools.cache(self._power_behind_loop)  # Each filter is tried with several noise shapes.

    @classmethod
    def of_run(cls, steps: int, learning_rates: Sequence[float] | None = None) -> "ClosedLoop":
        """Return the directions of a run at each level of its learning rate, weighted by the path that level covers.

        Raises:
            ValueError: If `steps` is not positive, `learning_rates` has another length, or all of them are 0.
        """
        rates = _relative_rates(positive_integer("steps", steps), learning_rates)
        flattest = min(1 / (TURN_SHARE * math.fsum(rates)), SHARPEST)
        middles = (np.arange(_DIRECTIONS) + 0.5) / _DIRECTIONS
        curvatures = flattest ** (1 - middles) * SHARPEST**middles
        shares = np.quantile(rates, (np.arange(_RATES) + 0.5) / _RATES)
        # Zeros are left out. If the learning rate is zero nearly all the time, all its positive values are used.
        shares = shares[shares > 0] if shares.any() else rates[rates > 0]
        return cls(np.outer(shares, curvatures).ravel(), np.repeat(shares / shares.sum() / _DIRECTIONS, _DIRECTIONS))

    def loss(self, low_pass_filter: LowPassFilter, shape: NoiseShape = WHITE) -> float:
        """Return the mean of L(x) over the directions, which scales with σ²; infinite if the loop is unstable in one.

        The error is at most 0.2 % for filters that delay by up to 10,000 steps. Slower filters may have a resonance with the
        weights between two frequencies of the grid: at a delay of 100,000 steps the loss of the sharpest direction is 9 %
        too small.
        """
        passed = self._passed(low_pass_filter)
        if passed is None:
            return math.inf
        return shape.norm**2 * float(np.sum(passed / np.abs(self._response(np.array(shape.c))) ** 2))

    def best_shape(self, bands: int, low_pass_filter: LowPassFilter) -> NoiseShape:
        """Return the strategy of b bands with the smallest loss behind a filter, with coefficients to four decimals.

        L depends on |c|² alone and is convex in it at fixed ‖c‖², so it has one minimum. Several strategies attain it; the
        returned strategy has all roots inside the unit circle.
        """
        start, passed = NoiseShape.banded(bands), self._passed(low_pass_filter)
        if start.is_white or passed is None:
            return start
        turns = np.exp(1j * np.outer(np.arange(1, bands), self._omega))

        def log_loss(tail: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            c = np.array([1.0, *tail])
            response = self._response(c)
            power = np.abs(response) ** 2
            left = float(np.sum(passed / power))
            slope = -2 * ((turns * response).real @ (passed / power**2))
            return math.log(c @ c) + math.log(left), 2 * tail / (c @ c) + slope / left

        found = scipy.optimize.minimize(log_loss, np.array(start.c[1:]), jac=True, method="L-BFGS-B").x
        roots = np.roots([1.0, *found])
        inside = np.where(np.abs(roots) > 1, 1 / np.conj(roots), roots)
        # Behind a filter that blocks the highest frequency, noise at this frequency could otherwise grow without bound.
        moduli = np.maximum(np.abs(inside), 1e-12)
        best, least = start, self.loss(low_pass_filter, start)
        for most, worthwhile in LARGEST_ROOTS.items():
            shape = _with_roots(inside * np.minimum(1.0, most / moduli))
            if (loss := self.loss(low_pass_filter, shape)) < (1 - worthwhile) * least:
                best, least = shape, loss
        return best

    def _power_behind_loop(self, low_pass_filter: LowPassFilter) -> Float64[np.ndarray, " frequencies"] | None:
        """Return the power of white noise behind the loop, by frequency; None if the loop is unstable."""
        # The loop is stable if (1 - z⁻¹) A + x z⁻¹ B has its roots inside the unit circle.
        order = max(len(low_pass_filter.b), len(low_pass_filter.a))
        b, a = (np.pad(each, (0, order - len(each))) for each in (low_pass_filter.b, low_pass_filter.a))
        open_loop, feedback = np.convolve([1.0, -1.0], a), np.concatenate([[0.0], b])
        if (_largest_roots(open_loop + np.multiply.outer(np.unique(self._x), feedback)) >= 1.0).any():
            return None
        response = self._response(b) / self._response(a)
        lag = np.expm1(1j * self._omega)
        gains = np.abs(response / (lag + np.multiply.outer(self._x, response))) ** 2
        return np.asarray(self._measure * ((self._weights * self._x) @ gains))

    def _response(self, coefficients: NDArray[np.float64]) -> Complex128[np.ndarray, " frequencies"]:
        return np.asarray(np.polyval(coefficients[::-1], np.exp(-1j * self._omega)))


def _largest_roots(
    polynomials: Float64[np.ndarray, "polynomials coefficients"],
) -> Float64[np.ndarray, " polynomials"]:
    """Return the largest modulus of the roots of each polynomial, whose first coefficient is not zero."""
    number, order = len(polynomials), polynomials.shape[1] - 1
    companions = np.zeros((number, order, order))
    companions[:, 1:, :-1] = np.eye(order - 1)
    companions[:, 0] = -polynomials[:, 1:] / polynomials[:, :1]
    return np.abs(np.linalg.eigvals(companions)).max(axis=1)


def _with_roots(roots: Inexact[np.ndarray, " roots"]) -> NoiseShape:
    """Return the strategy with these roots, with coefficients to four decimals."""
    return NoiseShape(tuple(np.trim_zeros(np.round(np.real(np.poly(_in_leja_order(roots))), 4), "b")))


def _in_leja_order(roots: Inexact[np.ndarray, " roots"]) -> Inexact[np.ndarray, " roots"]:
    """Return the roots in Leja order, in which `np.poly` loses no digits.

    Each root is the one whose product of distances to all earlier roots is largest.
    """
    ordered, left = [], roots
    distances = np.log(np.maximum(np.abs(left), 1e-300))
    while len(left):
        farthest = int(np.argmax(distances))
        ordered.append(left[farthest])
        left, distances = np.delete(left, farthest), np.delete(distances, farthest)
        distances = distances + np.log(np.maximum(np.abs(left - ordered[-1]), 1e-300))
    return np.array(ordered)


def _relative_rates(steps: int, learning_rates: Sequence[float] | None) -> Float64[np.ndarray, " steps"]:
    """Return the learning rates in units of the largest."""
    if learning_rates is None:
        return np.ones(steps)
    if len(learning_rates) != steps:
        raise Refusal(
            "other-lengths",
            f"The argument learning_rates must have one entry for each of the {steps} steps; got {len(learning_rates)} "
            "entries.",
        )
    if not max(learning_rates):
        raise Refusal(
            "all-rates-zero",
            "All entries of the argument learning_rates are 0, so the weights would not move. Pass at least one above 0.",
        )
    return np.array(learning_rates) / max(learning_rates)
