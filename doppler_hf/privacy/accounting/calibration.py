"""σ, or the number of steps, for a target ε: the inverse of `accounting`."""

import bisect
import functools
import math
from collections.abc import Callable
from typing import Any, Final

from scipy.optimize import brentq

from doppler_hf.errors import Refusal
from doppler_hf.privacy.accounting.accounting import Releases, Sampling, bound
from doppler_hf.privacy.accounting.selection import Selection, second_epsilon

LARGEST_EPSILON: Final = 1e12  # A larger one needs so little noise that the accountant's numbers overflow.
# The largest share of the target ε that may stay unspent, and the smallest spacing of ln σ between tried values.
_EXACT: Final = (1e-3, 1e-7)
_OF_GROUPS: Final = (4e-3, 1e-3)  # With groups, a simulation changes ε by some thousandths from one σ to the next.


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    strategy: tuple[float, ...] = (1.0,),
    sampling: Sampling = "allocation",
    rough: bool = False,
) -> float:
    """Return a noise multiplier σ with which `steps` steps cost `target_epsilon` or slightly less.

    Args:
        target_epsilon: ε, positive and up to 1e12. The ε reached is at most 0.1 % below it, with groups at most 0.4 %.
        target_delta: δ, from 1e-10 to below 1.
        sample_rate: q, in (0, 1].
        steps: T ≥ 1.
        strategy: The coefficients c of the noise shape. They make b = len(c) groups, and b·q must be at most 1.
        sampling: "allocation" or "poisson", as for `get_epsilon`; Poisson sampling needs more noise.
        rough: Whether to take a third of the time or less. σ may then differ by about a hundredth.

    Raises:
        ValueError: If an argument is out of range, or no noise multiplier up to 10⁶ reaches the target.

    Example:
        >>> sigma = get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.02, steps=165)
        >>> get_epsilon(noise_multiplier=sigma, sample_rate=0.02, steps=165, delta=1e-5) <= 3.0
        True
    """
    if not 0.0 < target_epsilon <= LARGEST_EPSILON:
        raise Refusal(
            "out-of-range",
            f"target_epsilon must be positive and at most {LARGEST_EPSILON:g}; got {target_epsilon}. A usual value is 8. To "
            "train without noise, set noise_multiplier=0 in its place.",
        )
    if steps < 1:
        raise Refusal("out-of-range", f"steps must be at least 1; got {steps}.")
    if len(strategy) * sample_rate > 1.0:
        raise Refusal(
            "strategy-too-long",
            f"A noise shape with {len(strategy)} bands needs a sample_rate (expected batch size divided by the number of "
            f"records) of at most {1 / len(strategy):.4g}; got {sample_rate}. Use a noise shape with fewer bands, or a "
            "smaller batch.",
        )
    unspent, spacing = _EXACT if len(strategy) == 1 else _OF_GROUPS
    # The aim is in the middle of the allowed range, so that the search may end a little above or below it.
    aim = target_epsilon * math.exp(-unspent / 2)

    def excess(log_sigma: float, *, is_rough: bool, aim: float = aim) -> float:
        releases = Releases(math.exp(log_sigma), sample_rate, steps, strategy, sampling)
        epsilon = bound((releases,), delta=target_delta, is_rough=is_rough)
        difference = math.log(epsilon / aim) if epsilon > 0.0 else -math.inf  # ln ε against ln σ is nearly straight.
        return 0.0 if abs(difference) < 0.49 * unspent else difference

    least = functools.partial(_least_noise, spacing=spacing)
    noise_multiplier = least(functools.partial(excess, is_rough=True), start=1.0)
    if not rough and noise_multiplier is not None:
        # The rough ε is too small by a factor that is measured here, so a second rough search aims below by that factor.
        above = excess(math.log(noise_multiplier), is_rough=False)
        if 0.0 < above < 0.3:
            near = functools.partial(excess, is_rough=True, aim=aim * math.exp(-above))
            noise_multiplier = least(near, start=noise_multiplier) or noise_multiplier
        noise_multiplier = least(functools.partial(excess, is_rough=False), start=noise_multiplier)
    if noise_multiplier is None:
        raise Refusal(
            "epsilon-out-of-reach",
            f"target_epsilon={target_epsilon} cannot be reached with any noise multiplier up to 1e6, at "
            f"target_delta={target_delta}, sample_rate={sample_rate} and {steps} steps. Raise target_epsilon "
            "or target_delta.",
        )
    return noise_multiplier


def noise_multiplier_of_trial(
    selection: Selection,
    *,
    sample_rate: float,
    steps: int,
    strategy: tuple[float, ...] = (1.0,),
    sampling: Sampling = "allocation",
    rough: bool = False,
) -> float:
    """Return a noise multiplier σ with which a trial of these steps satisfies both guarantees of a search.

    For the arguments see `get_noise_multiplier`.

    Raises:
        ValueError: If an argument is out of range, or no noise multiplier up to 10⁶ is enough.
    """
    epsilon, delta = selection.first
    noise_multiplier = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps, strategy=strategy,
        sampling=sampling, rough=rough,
    )  # fmt: skip

    def excess(log_sigma: float) -> float:
        releases = Releases(math.exp(log_sigma), sample_rate, steps, strategy, sampling)
        of_trial = second_epsilon([releases], selection)
        if selection.second.epsilon == 0.0 or of_trial == 0.0:
            return of_trial - selection.second.epsilon
        return math.log(of_trial / selection.second.epsilon)

    if excess(math.log(noise_multiplier)) <= 0.0:
        return noise_multiplier
    found = _least_noise(excess, start=noise_multiplier, spacing=_EXACT[1] if not rough else _OF_GROUPS[1])
    if found is None:
        raise Refusal(
            "trial-out-of-reach",
            f"This hyperparameter search cannot reach its privacy budget: its trials, of {steps} steps each with "
            f"sample_rate={sample_rate}, would need a noise multiplier above 1e6. Raise target_epsilon or target_delta, or "
            "expect fewer trials.",
        )
    return max(found, noise_multiplier)


def noise_multiplier_if_any(strategy: tuple[float, ...], **terms: Any) -> float:
    """Return a rough `get_noise_multiplier` for a strategy; infinity if no σ up to 10⁶ reaches ε."""
    try:
        return get_noise_multiplier(strategy=strategy, rough=True, **terms)
    except ValueError:
        return math.inf


def _least_noise(excess: Callable[[float], float], *, start: float, spacing: float) -> float | None:
    """Return the smallest tried σ at which a falling function of ln σ is at most 0; None if there is none up to 10⁶.

    The search ends at 0. If the function jumps over 0, ln σ is above the jump by at most the spacing.
    """
    tried: dict[float, float] = {}

    def at(log_sigma: float) -> float:
        if log_sigma not in tried:
            tried[log_sigma] = excess(log_sigma)
        return tried[log_sigma]

    low = high = math.log(start)
    largest = math.log(1e6)
    # ln ε falls by one to two units for each unit of ln σ, so one stride is usually enough.
    stride = min(max(abs(at(low)), 1e-3), 0.7)
    while at(high) > 0.0:
        if high >= largest:
            return None
        low, high, stride = high, min(high + stride, largest), min(2.0 * stride, 4.0)
    while at(low) < 0.0:
        low, high, stride = low - stride, low, min(2.0 * stride, 4.0)
    if at(low) > 0.0 > at(high):
        brentq(at, low, high, xtol=spacing)
    return math.exp(min(log_sigma for log_sigma, value in tried.items() if value <= 0.0))


def most_steps(epsilon_of: Callable[[int], float], *, target_epsilon: float, at_most: int) -> int:
    """Return the largest number of steps, up to `at_most`, with ε within the target; ε must not fall with the steps."""
    if epsilon_of(at_most) <= target_epsilon:  # Most runs end within their target, so this is checked first.
        return at_most
    return bisect.bisect_right(range(1, at_most), target_epsilon, key=epsilon_of)
