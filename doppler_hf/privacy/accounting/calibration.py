"""σ, or the number of steps, for a target ε: the inverse of `accounting`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from scipy.optimize import brentq

from doppler_hf.privacy.accounting.accounting import Releases, bound, get_total_epsilon, merged_rounds

_CALIBRATION_TOLERANCE = 1e-3  # at most this share of the target is left unspent


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    strategy: tuple[float, ...] = (1.0,),
    spent: Sequence[Releases] = (),
    rough: bool = False,
) -> float:
    """Return a noise multiplier σ with which `steps` further steps bring ε to `target_epsilon` or slightly below.

    It holds for random allocation, as of `AllocationSampler`. Poisson sampling, as of other libraries, needs more noise.

    Args:
        target_epsilon: ε > 0, for everything together; met from below to one part in a thousand.
        target_delta: δ, from 1e-10 to below 1.
        sample_rate: q, in (0, 1].
        steps: T ≥ 1.
        strategy: c of the noise, for whose b = len(c) groups b·q must be at most 1.
        spent: What was released earlier on the same data.
        rough: Take a coarse grid, in a third of the time. σ is then larger, by a thousandth or so.

    Raises:
        ValueError: If an argument is out of range, `spent` alone costs the target or more, or no noise multiplier up to
            10⁶ reaches the target.

    Example:
        >>> sigma = get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.02, steps=165)
        >>> get_epsilon(noise_multiplier=sigma, sample_rate=0.02, steps=165, delta=1e-5) <= 3.0
        True
    """
    _check_target(target_epsilon)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if len(strategy) * sample_rate > 1.0:
        raise ValueError(
            f"A strategy of {len(strategy)} coefficients needs a sample_rate of at most {1 / len(strategy):.4g}, got "
            f"{sample_rate}. Take a shorter one, or a smaller batch."
        )
    already = get_total_epsilon(spent, delta=target_delta)
    if already >= target_epsilon:
        raise ValueError(
            f"What was released earlier costs ε = {already:.6g}, which leaves nothing of target_epsilon={target_epsilon}. "
            "Raise target_epsilon."
        )
    aim = target_epsilon * math.exp(-_CALIBRATION_TOLERANCE / 2)

    def excess(log_sigma: float, *, coarsening: int, tolerance: float) -> float:
        rounds = merged_rounds([*spent, Releases(math.exp(log_sigma), sample_rate, steps, strategy)])
        epsilon = bound(rounds, delta=target_delta, coarsening=coarsening)
        difference = math.log(epsilon / aim) if epsilon > 0.0 else -math.inf  # ln ε against ln σ is nearly straight.
        return 0.0 if abs(difference) < tolerance else difference

    # From fast and rough to the grid of the accountant itself.
    noise_multiplier: float | None = None
    for coarsening in (4,) if rough else (4, 1):
        search = functools.partial(excess, coarsening=coarsening, tolerance=0.49 * _CALIBRATION_TOLERANCE)
        noise_multiplier = _least_noise(search, start=noise_multiplier or 1.0)
    if noise_multiplier is None:
        raise ValueError(
            f"No noise multiplier up to 1e6 reaches target_epsilon={target_epsilon} at target_delta={target_delta}, "
            f"sample_rate={sample_rate} and {steps} steps. Raise target_epsilon or target_delta."
        )
    return noise_multiplier


def noise_multiplier_if_any(strategy: tuple[float, ...], **terms: Any) -> float:
    """Return `get_noise_multiplier` of a strategy on a rough grid; infinite where no σ up to 10⁶ reaches ε."""
    try:
        return get_noise_multiplier(strategy=strategy, rough=True, **terms)
    except ValueError:
        return math.inf


def _least_noise(excess: Callable[[float], float], *, start: float) -> float | None:
    """Return the least σ tried at which a falling function of ln σ is not above 0; None if there is none up to 10⁶.

    Zero ends the search. If the function jumps over zero, σ is above the jump by at most a part in 10⁷.
    """
    tried: dict[float, float] = {}

    def at(log_sigma: float) -> float:
        if log_sigma not in tried:
            tried[log_sigma] = excess(log_sigma)
        return tried[log_sigma]

    low = high = math.log(start)
    largest = math.log(1e6)
    # ln ε falls by one to two for each unit of ln σ, so one stride is usually enough.
    stride = min(max(abs(at(low)), 1e-3), 0.7)
    while at(high) > 0.0:
        if high >= largest:
            return None
        low, high, stride = high, min(high + stride, largest), min(2.0 * stride, 4.0)
    while at(low) < 0.0:
        low, high, stride = low - stride, low, min(2.0 * stride, 4.0)
    if at(low) > 0.0 > at(high):
        brentq(at, low, high, xtol=1e-7)
    return math.exp(min(log_sigma for log_sigma, value in tried.items() if value <= 0.0))


def most_steps(epsilon_of: Callable[[int], float], *, target_epsilon: float, at_most: int) -> int:
    """Return the most steps, up to `at_most`, whose ε is within the target; ε must not fall with the steps."""
    _check_target(target_epsilon)
    if at_most < 0:
        raise ValueError(f"at_most must be at least 0, got {at_most}.")
    if epsilon_of(at_most) <= target_epsilon:
        return at_most
    fits, exceeds = 0, at_most
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if epsilon_of(middle) <= target_epsilon else (fits, middle)
    return fits


def _check_target(target_epsilon: float) -> None:
    if not 0.0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon}.")
