"""σ, or the number of steps, for a target ε: the inverse of `accounting`."""

import functools
import math
from collections.abc import Callable, Sequence

from scipy.optimize import brentq

from doppler_hf.privacy.accounting.accounting import Accountant, Method, Releases, bound, composed, get_total_epsilon

_CALIBRATION_TOLERANCE = 1e-3  # at most this share of the target is left unspent


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: Accountant = "prv",
    spent: Sequence[Releases] = (),
    unchecked: bool = False,
) -> float:
    """Return a noise multiplier σ with which `steps` further steps bring ε to `target_epsilon` or slightly below.

    Args:
        target_epsilon: ε > 0, for everything together; met from below to one part in a thousand.
        target_delta: δ, in (0, 1).
        sample_rate: q, in (0, 1].
        steps: T ≥ 1.
        accountant: "prv", "rdp" or "pld".
        spent: What was released earlier on the same data.
        unchecked: Take PRV's result on a coarse grid, in half of the time, for tables. No run has such a σ.

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
    already = get_total_epsilon(spent, delta=target_delta, accountant=accountant)
    if already >= target_epsilon:
        raise ValueError(
            f"What was released earlier costs ε = {already:.6g}, which leaves nothing of target_epsilon={target_epsilon}. "
            "Raise target_epsilon."
        )
    aim = target_epsilon * math.exp(-_CALIBRATION_TOLERANCE / 2)

    def excess(log_sigma: float, *, by: Method, tolerance: float) -> float:
        mechanisms = composed([*spent, Releases(math.exp(log_sigma), sample_rate, steps)], accountant=accountant)
        epsilon = bound(mechanisms, delta=target_delta, by=by)
        difference = math.log(epsilon / aim) if epsilon > 0.0 else -math.inf  # ln ε against ln σ is nearly straight.
        return 0.0 if abs(difference) < tolerance else difference

    # From fast and rough to the accountant itself, which usually has to be evaluated only once.
    last: tuple[Method, float] = (accountant, 0.49 * _CALIBRATION_TOLERANCE)
    stages: list[tuple[Method, float]] = [("rdp estimate", 0.1), ("prv estimate", 2e-4), last]
    if accountant == "rdp" or sample_rate == 1.0 or any(entry.sample_rate == 1.0 for entry in spent):
        del stages[1]
    elif unchecked and accountant == "prv":
        stages.remove(last)
    noise_multiplier: float | None = None
    for by, tolerance in stages:
        start = noise_multiplier or 1.0
        noise_multiplier = _least_noise(functools.partial(excess, by=by, tolerance=tolerance), start=start)
    if noise_multiplier is None:
        raise ValueError(
            f"No noise multiplier up to 1e6 reaches target_epsilon={target_epsilon} at target_delta={target_delta}, "
            f"sample_rate={sample_rate} and {steps} steps. Raise target_epsilon or target_delta."
        )
    return noise_multiplier


def noise_multiplier_in_turns(
    groups: int,
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: Accountant,
    unchecked: bool = True,
) -> float:
    """Return σ of a run in which b groups take turns; infinite where q·b ≥ 1 or no σ up to 10⁶ reaches ε."""
    turns = Releases.in_turns(1.0, sample_rate, steps, groups=groups)
    if groups > 1 and turns.sample_rate >= 1.0:
        return math.inf
    try:
        return get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=turns.sample_rate,
            steps=turns.steps,
            accountant=accountant,
            unchecked=unchecked,
        )
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


def get_steps(
    *,
    target_epsilon: float,
    noise_multiplier: float,
    sample_rate: float,
    delta: float,
    accountant: Accountant = "prv",
    spent: Sequence[Releases] = (),
    at_most: int,
) -> int:
    """Return how many further steps, at most `at_most`, keep ε of everything together within `target_epsilon`."""
    _check_target(target_epsilon)
    if at_most < 0:
        raise ValueError(f"at_most must be at least 0, got {at_most}.")

    @functools.cache
    def total(steps: int) -> float:
        history = [*spent, Releases(noise_multiplier, sample_rate, steps)]
        return get_total_epsilon(history, delta=delta, accountant=accountant)

    if total(at_most) <= target_epsilon:
        return at_most
    if total(0) > target_epsilon:
        return 0
    tried = [0]

    def excess(root: float) -> float:
        tried.append(round(root**2))
        # 0 would end the search, and one more step may cost nothing.
        return min(total(tried[-1]), 1e3 * target_epsilon) - target_epsilon or -math.ulp(target_epsilon)

    # ε against √T is nearly straight. Between two roots this close there is at most one step.
    brentq(excess, 0.0, math.sqrt(at_most), xtol=0.25 / math.sqrt(at_most))
    return max(steps for steps in tried if total(steps) <= target_epsilon)


def _check_target(target_epsilon: float) -> None:
    if not 0.0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon}.")
