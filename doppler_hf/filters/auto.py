r"""A filter for people who do not want to choose: order and cut-off from the length of the run, its noise and its schedule.

The trade. The filtered gradient misses the gradient of now, s_t, by being late and by its noise. For a filter with κ ≥ 0,
Σκ = 1 and mean age D = Σ τ κ_τ (its group delay at frequency 0), and a signal that changes by at most ‖s‖/τ_s a step,

    ‖Σ κ_τ (s_{t-τ} - s_t)‖ ≤ D ‖s‖ / τ_s,    E‖m̂_t - s_t‖² / ‖s‖² ≤ (D / τ_s)² + R Σκ²,    R = d σ_DP² / ‖s‖²:

the lower the cut-off, the later and the quieter. The bound on the change is the one that smoothness gives,
‖∇F(x) - ∇F(y)‖ ≤ L ‖x - y‖, when the weights move by about the same distance each step.

The order. Momentum, the moving average and Butterworth's filter of order 1 all have Σκ² = 1 / (2D + 1), exactly. One of
order 2 has the same product D Σκ² → 1/2 at low cut-offs and keeps twice the memory; from order 3 on the product grows
(2/3 at order 3). So the order is 1: nothing above it improves this trade. The filter is `butterworth(1, cutoff)`, which has
D = 1 / (2 tan(π cutoff / 2)) and blocks the highest frequency altogether.

The cut-off. (D / τ_s)² + R / (2D + 1) is least where D (2D + 1)² = R τ_s²: for much noise D ≈ (R τ_s² / 4)^(1/3).

What is assumed, because nobody knows it before the run: ‖s‖ = C, the most that clipping leaves (a smaller gradient would ask
for more filtering: this errs on the side of less); and that the gradient turns by its own length once in a
tenth of the way that the weights go. A step with learning rate η_t goes η_t / Σ η of that way, so that at the fastest
τ_s = 0.1 Σ η / max η, which is T/10 at a constant rate and about T/20 with a decay to zero. Both numbers
are conventions. D enters with their power of 2/3, and is never more than T/50.
"""

import math
from collections.abc import Sequence
from typing import Final

import scipy.optimize

from doppler_hf.filters.design import PAPER_FILTERS, butterworth, positive_integer
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.spectrum import check_noise

# The share of the way of the weights after which the gradient is taken to have turned by its own length.
TURN_SHARE: Final = 0.1

# The most that a filter may be late, as a share of the run.
MAX_DELAY_SHARE: Final = 0.02

# Below this delay a filter of first order, Σκ² > 1/2, is not worth its buffer.
MIN_DELAY: Final = 0.5


def auto_filter(
    *, steps: int, noise_std: float, max_grad_norm: float, dimension: int, learning_rates: Sequence[float] | None = None
) -> LowPassFilter:
    r"""Pick a filter from what is known before a run: the delay D that minimizes (D/τ_s)² + R/(2D+1), at most steps/50.

    Args:
        steps: Length of the run T.
        noise_std: Standard deviation of the noise per coordinate of the mean gradient, σC/B.
        max_grad_norm: Clip norm C, in the same unit.
        dimension: Number of trained coordinates d, each with that noise.
        learning_rates: The learning rate of each step, in any unit, shape (steps,); constant by default. A rate that
            decays leaves more of the way to fewer steps, so the signal is faster there and the filter wider.

    Returns:
        `butterworth(1, cutoff)`, the cutoff rounded to three digits; or no filter where its delay would be below half
        a step: with little noise, or fewer than 25 steps.

    Raises:
        ValueError: If steps or dimension is not a positive integer, noise_std is negative, max_grad_norm is not positive,
            or the learning rates are not one for each step, negative, not finite, or all zero.

    Example:
        >>> print(auto_filter(steps=1000, noise_std=1e-3, max_grad_norm=1.0, dimension=1_000_000))
        butterworth:order=1,cutoff=0.0241
        >>> print(auto_filter(steps=1000, noise_std=0.0, max_grad_norm=1.0, dimension=1_000_000))
        none
    """
    steps, dimension = positive_integer("steps", steps), positive_integer("dimension", dimension)
    check_noise(noise_std)
    if not 0 < max_grad_norm < math.inf:
        raise ValueError(f"max_grad_norm must be positive and finite, got {max_grad_norm}.")
    noise_to_signal = dimension * (noise_std / max_grad_norm) ** 2
    turn_steps = TURN_SHARE * _steps_at_full_speed(steps, learning_rates)
    delay = min(_best_delay(noise_to_signal * turn_steps**2), MAX_DELAY_SHARE * steps)
    if delay < MIN_DELAY:
        return PAPER_FILTERS["none"]
    return butterworth(1, _three_digits_up(2 / math.pi * math.atan(1 / (2 * delay))))


def _steps_at_full_speed(steps: int, learning_rates: Sequence[float] | None) -> float:
    """Return how many steps at the greatest learning rate go as far as the run does."""
    if learning_rates is None:
        return float(steps)
    if len(learning_rates) != steps:
        raise ValueError(f"learning_rates must have one rate for each of the {steps} steps, got {len(learning_rates)}.")
    for step, rate in enumerate(learning_rates):
        if not 0 <= rate < math.inf:
            raise ValueError(f"learning_rates must be finite and at least 0, got {rate} at step {step}.")
    if not max(learning_rates):
        raise ValueError(
            "learning_rates must not all be 0, for the weights would not move. Give at least one that is positive."
        )
    return math.fsum(learning_rates) / max(learning_rates)


def _best_delay(target: float) -> float:
    """Return the root D ≥ 0 of D (2D + 1)² = target, between 0 and where 4 D³ alone exceeds it."""
    return float(scipy.optimize.brentq(lambda delay: delay * (2 * delay + 1) ** 2 - target, 0.0, (target / 4) ** (1 / 3)))


def _three_digits_up(value: float) -> float:
    """Round up, so that the delay stays below its limit."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.3g}")
