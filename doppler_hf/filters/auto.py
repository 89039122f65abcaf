r"""A filter and a shape of the noise for people who do not want to choose: those of least error on the path of the weights.

The error is that of `doppler_hf.filters.trajectory`, D² Σ (η_t/η̂)² + R V: it follows from the length of the run, its noise,
the number of trained parameters and the schedule, all of them public.

The filter. What counts is the noise that adds up in the weights over τ_s steps, and most of that has a frequency which a
filter passes too. So a filter pays only where R is large, as in training all of a large model. Momentum, the moving average
and Butterworth's filter of order 1 all have Σκ² = 1 / (2D + 1), exactly. One of order 2 has the same product D Σκ² → 1/2
at low cut-offs and keeps twice the memory; from order 3 on the product grows (2/3 at order 3). So the order is 1. The filter
is `butterworth(1, cutoff)`, which has D = 1 / (2 tan(π cutoff / 2)) and blocks the highest frequency altogether, with the D
of least error, at most T/50.

The shape. Each number of bands has a σ of its own, since a unit is drawn in its turn with b times the probability. Bands are
doubled while the error falls, with the strategy that is best for this schedule and this filter.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import scipy.optimize

from doppler_hf.filters.design import PAPER_FILTERS, butterworth, positive_integer
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.filters.spectrum import check_noise
from doppler_hf.filters.trajectory import SIGNAL_SHARE, Trajectory

# The most that a filter may be late, as a share of the run.
MAX_DELAY_SHARE: Final = 0.02

# Below this delay a filter of first order, Σκ² > 1/2, is not worth its buffer.
MIN_DELAY: Final = 0.5

# Of the noise in the path, the least share that more bands must take away to be worth their buffers.
WORTH_A_DOUBLING: Final = 0.01


def auto_filter(
    *,
    steps: int,
    noise_std: float,
    max_grad_norm: float,
    dimension: int,
    learning_rates: Sequence[float] | None = None,
    noise: NoiseShape = WHITE,
) -> LowPassFilter:
    r"""Pick a filter from what is known before a run: of the delay D, at most steps/50, with the least error on the path.

    Args:
        steps: Length of the run T.
        noise_std: Standard deviation of the noise per coordinate of the mean gradient before it is shaped, σC/B.
        max_grad_norm: Clip norm C, in the same unit.
        dimension: Number of trained coordinates d, each with that noise.
        learning_rates: The learning rate of each step, in any unit, shape (steps,); constant by default.
        noise: The shape of the noise.

    Returns:
        `butterworth(1, cutoff)`, the cutoff rounded to three digits; or no filter where none with a delay of half a step or
        more is better: with little noise, or fewer than 25 steps.

    Raises:
        ValueError: If steps or dimension is not a positive integer, noise_std is negative, max_grad_norm is not positive,
            or the learning rates are not one for each step, negative, not finite, or all zero.

    Example:
        >>> print(auto_filter(steps=1000, noise_std=1e-3, max_grad_norm=1.0, dimension=1_000_000))
        butterworth:order=1,cutoff=0.0174
        >>> print(auto_filter(steps=1000, noise_std=1e-3, max_grad_norm=1.0, dimension=1_000))
        none
    """
    trajectory = Trajectory(steps, learning_rates)
    noise_to_signal = _noise_to_signal(noise_std, max_grad_norm=max_grad_norm, dimension=dimension)
    return _best_filter(trajectory, noise, noise_to_signal=noise_to_signal, steps=steps)


def auto_noise_shape(
    noise_std_of: Callable[[int], float],
    *,
    steps: int,
    max_grad_norm: float,
    dimension: int,
    learning_rates: Sequence[float] | None = None,
    low_pass_filter: LowPassFilter | None = None,
) -> NoiseShape:
    r"""Pick the shape of the noise with the least error on the path of the weights, among runs of equal ε.

    Args:
        noise_std_of: σC/B of the run with so many bands, at equal ε; infinite where there is none. It is asked for 1, 2, 4,
            ... bands, until the error does not fall any more.
        steps: As for `auto_filter`.
        max_grad_norm: As for `auto_filter`.
        dimension: As for `auto_filter`.
        learning_rates: As for `auto_filter`.
        low_pass_filter: The filter of the run; None for the one of `auto_filter`, chosen anew for each number of bands.

    Returns:
        White noise where no other shape is better by a hundredth.

    Raises:
        ValueError: If an argument is out of range, as in `auto_filter`.

    Example:
        >>> noise_std = {1: 0.83e-3, 2: 0.98e-3, 4: 1.21e-3, 8: 1.54e-3}  # MNIST, ε = 3, B = 1000, T = 300
        >>> filtered = LowPassFilter(b=(1.0,))
        >>> print(
        ...     auto_noise_shape(noise_std.get, steps=300, max_grad_norm=1.0, dimension=269_322, low_pass_filter=filtered)
        ... )
        banded:c=1.0,0.5877,0.4627,0.3821
    """
    trajectory = Trajectory(steps, learning_rates)
    best, least, bands = WHITE, math.inf, 1
    while bands <= steps and math.isfinite(noise_std := noise_std_of(bands)):
        noise_to_signal = _noise_to_signal(noise_std, max_grad_norm=max_grad_norm, dimension=dimension)
        chosen = low_pass_filter
        if chosen is None:
            chosen = _best_filter(trajectory, NoiseShape.banded(bands), noise_to_signal=noise_to_signal, steps=steps)
        shape = trajectory.best_shape(bands, chosen)
        if low_pass_filter is None:
            error = trajectory.error(chosen, shape, noise_to_signal=noise_to_signal)
        else:  # Its delay is the same for all, and no reason to find the noise small beside it.
            error = noise_to_signal * trajectory.noise(chosen, shape)
        if error >= (1 - WORTH_A_DOUBLING) * least:
            break
        best, least, bands = shape, error, 2 * bands
    return best


def _noise_to_signal(noise_std: float, *, max_grad_norm: float, dimension: int) -> float:
    """Return R, for a mean gradient of the norm that is assumed."""
    check_noise(noise_std)
    if not 0 < max_grad_norm < math.inf:
        raise ValueError(f"max_grad_norm must be positive and finite, got {max_grad_norm}.")
    return positive_integer("dimension", dimension) * (noise_std / (SIGNAL_SHARE * max_grad_norm)) ** 2


def _best_filter(trajectory: Trajectory, noise: NoiseShape, *, noise_to_signal: float, steps: int) -> LowPassFilter:
    none, latest = PAPER_FILTERS["none"], MAX_DELAY_SHARE * steps
    if latest < MIN_DELAY:
        return none

    def error(low_pass_filter: LowPassFilter) -> float:
        return trajectory.error(low_pass_filter, noise, noise_to_signal=noise_to_signal)

    found = scipy.optimize.minimize_scalar(
        lambda log_delay: error(_of_delay(math.exp(log_delay))),
        bounds=(math.log(MIN_DELAY), math.log(latest)),
        method="bounded",
        options={"xatol": 0.01},
    )
    # The search leaves out the ends of its interval.
    return min(none, _of_delay(math.exp(found.x)), _of_delay(latest), key=error)


def _of_delay(delay: float) -> LowPassFilter:
    """Return Butterworth's filter of order 1, its cutoff rounded up to three digits, so that it is not later than this."""
    cutoff = 2 / math.pi * math.atan(1 / (2 * delay))
    unit = 10.0 ** (math.floor(math.log10(cutoff)) - 2)
    return butterworth(1, float(f"{math.ceil(cutoff / unit - 1e-9) * unit:.3g}"))
