"""The filter and the noise shape with the smallest loss in `closed_loop`, chosen from public numbers alone.

The filter is momentum, m_t = β m_{t-1} + (1 - β) g_t, with delay D = β / (1 - β). Its real pole keeps the loop of filter and
weights stable wherever SGD is stable; the paper's filters of second order do not. Each number of bands b has its own σ,
since a record joins the batch of its turn with b times the probability. The number of bands doubles while the loss falls.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from doppler_hf.filters.closed_loop import WORTHWHILE, ClosedLoop
from doppler_hf.filters.design import PAPER_FILTERS, momentum
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.noise_shape import WHITE, NoiseShape

MAX_DELAY_SHARE: Final = 0.02  # The longest delay, as a share of the run.
MIN_DELAY: Final = 0.5  # A shorter delay (Σκ² > 1/2) is not worth its buffer.
_LONGEST_DELAY: Final = 999.0  # Of β = 0.999, the largest β of three decimals.


def auto_filter(steps: int, *, learning_rates: Sequence[float] | None = None, noise: NoiseShape = WHITE) -> LowPassFilter:
    """Pick momentum with the shortest delay that still removes nearly all removable noise.

    Args:
        steps: Length of the run T.
        learning_rates: The learning rate of each step, in any unit, shape (steps,); constant by default.
        noise: The shape of the noise.

    Returns:
        `momentum(beta)`, beta to three decimals; no filter in runs of fewer than 25 steps.
    """
    return _best_filter(ClosedLoop.of_run(steps, learning_rates), noise, steps=steps)


def auto_noise_shape(
    noise_multiplier_of: Callable[[int], float],
    steps: int,
    *,
    learning_rates: Sequence[float] | None = None,
    low_pass_filter: LowPassFilter | None = None,
    most_bands: int | None = None,
) -> NoiseShape:
    """Pick the noise shape with the least loss among runs of equal ε; white where none is better by `WORTHWHILE`.

    Args:
        noise_multiplier_of: Function from a number of bands to σ at equal ε; infinite if no σ reaches this ε. It is called
            with 1, 2, 4, ... bands until the loss stops falling.
        steps: Length of the run T.
        learning_rates: The learning rate of each step, in any unit, shape (steps,); constant by default.
        low_pass_filter: The filter of the run; None for `auto_filter` with each number of bands.
        most_bands: The largest number of bands that fits into memory; None for no limit.

    Example:
        >>> sigmas = {1: 0.83, 2: 0.98, 4: 1.21, 8: 1.54, 16: 2.02}  # MNIST, ε = 3, B = 1000, T = 300
        >>> print(auto_noise_shape(sigmas.__getitem__, 300))
        banded:c=1.0,0.8785,0.7511,0.625
    """
    loop = ClosedLoop.of_run(steps, learning_rates)
    best, least, bands = WHITE, math.inf, 1
    while bands <= min(steps, most_bands or steps) and math.isfinite(sigma := noise_multiplier_of(bands)):
        chosen = low_pass_filter or _best_filter(loop, NoiseShape.banded(bands), steps=steps)
        shape = loop.best_shape(bands, chosen)
        loss = sigma**2 * loop.loss(chosen, shape)
        if not loss < (1 - WORTHWHILE) * least:
            break
        best, least, bands = shape, loss, 2 * bands
    return best


def _best_filter(loop: ClosedLoop, noise: NoiseShape, *, steps: int) -> LowPassFilter:
    longest, delays = min(MAX_DELAY_SHARE * steps, _LONGEST_DELAY), [MIN_DELAY]
    if longest < MIN_DELAY:
        return PAPER_FILTERS["none"]
    while delays[-1] < longest:
        delays.append(min(2 * delays[-1], longest))
    filters = [PAPER_FILTERS["none"], *(momentum(round(delay / (1 + delay), 3)) for delay in delays)]
    losses = [loop.loss(each, noise) for each in filters]
    return next(each for each, loss in zip(filters, losses, strict=True) if loss <= (1 + WORTHWHILE) * min(losses))
