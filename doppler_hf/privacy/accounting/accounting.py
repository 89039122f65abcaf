"""The ε of a run: the Poisson-subsampled Gaussian mechanism, composed over T steps, add/remove neighbours.

Whatever happens to the private gradient afterwards (filter, Adam, projection) is post-processing and costs nothing, so
none of it appears here. Three accountants bound the same ε from above: *prv*, *rdp* and *pld* (see `upper_bounds`). The
inverse functions return σ, or the number of steps, for a target ε.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from scipy.optimize import brentq

from doppler_hf.privacy.accounting.upper_bounds import (
    SampledGaussian,
    pld_epsilon,
    prv_epsilon,
    prv_estimate,
    rdp_epsilon,
    rdp_estimate,
)

Accountant = Literal["prv", "rdp", "pld"]
_Method = Accountant | Literal["prv estimate", "rdp estimate"]

# At most this share of the target is left unspent.
_CALIBRATION_TOLERANCE = 1e-3


class Releases(NamedTuple):
    """A number of steps run under the same mechanism."""

    noise_multiplier: float
    sample_rate: float
    steps: int

    @classmethod
    def in_turns(cls, noise_multiplier: float, sample_rate: float, steps: int, *, groups: int) -> "Releases":
        """Return what steps release in which b groups of units take turns, as if they were those of one group.

        A unit is drawn in its turns only, ⌈T/b⌉ at most, each time with probability b·q (Choquette-Choo et al. 2023,
        https://arxiv.org/abs/2306.08153, Theorem 4).

        Args:
            noise_multiplier: σ.
            sample_rate: q, the probability with which a unit is drawn at a step, over its groups.
            steps: T.
            groups: b; 1 for draws from all units at every step.
        """
        return cls(noise_multiplier, groups * sample_rate, math.ceil(steps / groups))


def default_delta(num_examples: int) -> float:
    """Return δ = N^−1.1, the paper's choice."""
    return float(num_examples**-1.1)


def joint_noise_multiplier(*noise_multipliers: float) -> float:
    """Return (Σ σᵢ⁻²)^(−1/2): the noise multiplier of several Gaussian releases from one Poisson draw, taken together.

    Release i adds noise of standard deviation σᵢ·Cᵢ to a sum of sensitivity Cᵢ over the same sample. In units of its own
    noise each output shifts by a vector of norm at most 1/σᵢ when an example joins the sample; the outputs side by side
    have standard normal noise and shift by at most √Σ σᵢ⁻². That is one Gaussian mechanism of this noise multiplier,
    drawn with the same probability. Taken for independent draws, the releases would seem to cost more.

    Args:
        noise_multipliers: At least one; 0 is a release without noise, infinity one without information.

    Returns:
        σ of the joint release: 0 if any of them is 0, infinity if all are infinite.

    Raises:
        ValueError: If there is no noise multiplier, or a negative one.

    Example:
        >>> joint_noise_multiplier(3.0, 4.0)
        2.4
    """
    if not noise_multipliers:
        raise ValueError("noise_multipliers must have at least one entry, got none.")
    for noise_multiplier in noise_multipliers:
        if not noise_multiplier >= 0.0:
            raise ValueError(f"noise_multipliers must be numbers ≥ 0, got {noise_multiplier}.")
    smallest = min(noise_multipliers)
    if smallest == 0.0 or smallest == math.inf:
        return smallest
    return smallest / math.sqrt(sum((smallest / noise_multiplier) ** 2 for noise_multiplier in noise_multipliers))


def get_epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: Accountant = "prv"
) -> float:
    """Return an upper bound on ε after `steps` steps.

    Args:
        noise_multiplier: σ, the noise's standard deviation in units of the clip norm.
        sample_rate: q, the probability with which an example is drawn at each step, in (0, 1].
        steps: T.
        delta: δ, in (0, 1).
        accountant: "prv", "rdp" or "pld".

    Returns:
        ε; infinity for a noise multiplier of 0, and 0 for no steps.

    Raises:
        ValueError: If an argument is out of range, or the sample rate is 1 with "prv".

    Example:
        >>> round(get_epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 1)
        1.8
    """
    return get_total_epsilon([Releases(noise_multiplier, sample_rate, steps)], delta=delta, accountant=accountant)


def get_total_epsilon(history: Iterable[Releases], *, delta: float, accountant: Accountant = "prv") -> float:
    """Return an upper bound on ε after several runs under possibly different mechanisms on the same data.

    Args:
        history: What was released, in any order.
        delta: δ, in (0, 1).
        accountant: "prv", "rdp" or "pld".

    Returns:
        ε, as `get_epsilon`. If the arithmetic of PRV or PLD fails, the bound of another accountant.

    Raises:
        ValueError: If `get_epsilon` would raise it.
    """
    mechanisms = _composed(history, accountant=accountant)
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    if accountant not in get_args(Accountant):
        raise ValueError(f"accountant must be one of {', '.join(get_args(Accountant))}, got {accountant!r}.")
    if not mechanisms:
        return 0.0
    if any(noise_multiplier == 0.0 for noise_multiplier, _, _ in mechanisms):
        return math.inf
    return _bound(mechanisms, delta=delta, by=accountant)


def _composed(history: Iterable[Releases], *, accountant: Accountant) -> tuple[SampledGaussian, ...]:
    """Return every mechanism once, with all of its steps."""
    counts: dict[tuple[float, float], int] = {}
    for noise_multiplier, sample_rate, steps in history:
        if not 0.0 <= noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number ≥ 0, got {noise_multiplier}.")
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}.")
        if steps < 0:
            raise ValueError(f"steps must be at least 0, got {steps}.")
        if sample_rate == 1.0 and accountant == "prv":
            raise ValueError(
                "sample_rate must be less than 1 with accountant='prv', got 1. Use accountant='pld' or 'rdp', or a smaller "
                "batch."
            )
        if steps > 0:
            counts[noise_multiplier, sample_rate] = counts.get((noise_multiplier, sample_rate), 0) + steps
    return tuple((*mechanism, steps) for mechanism, steps in sorted(counts.items()))


@functools.lru_cache(maxsize=256)  # The log, the ledger and the guard ask for the same ε, and PRV and PLD take a while.
def _bound(mechanisms: tuple[SampledGaussian, ...], *, delta: float, by: _Method) -> float:
    methods = {"prv": prv_epsilon, "rdp": rdp_epsilon, "pld": pld_epsilon}
    methods |= {"prv estimate": prv_estimate, "rdp estimate": rdp_estimate}
    return methods[by](mechanisms, delta=delta)


def get_epsilons(history: Iterable[Releases], *, delta: float) -> dict[Accountant, float]:
    """Return the upper bounds of all accountants on ε, in the order prv, rdp, pld.

    Returns:
        ε by accountant. Where a sample rate is 1, prv cannot bound it and is left out.

    Raises:
        ValueError: If an argument is out of range.
    """
    history = list(history)
    full_batch = any(entry.sample_rate == 1.0 for entry in history)
    accountants: list[Accountant] = ["rdp", "pld"] if full_batch else ["prv", "rdp", "pld"]
    return {name: get_total_epsilon(history, delta=delta, accountant=name) for name in accountants}


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
        unchecked: Take what PRV finds on a coarse grid, without asking it once more on the fine one, which nearly always
            confirms it: for tables, in half of the time. No run has such a σ.

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

    def excess(log_sigma: float, *, by: _Method, tolerance: float) -> float:
        mechanisms = _composed([*spent, Releases(math.exp(log_sigma), sample_rate, steps)], accountant=accountant)
        epsilon = _bound(mechanisms, delta=target_delta, by=by)
        difference = math.log(epsilon / aim) if epsilon > 0.0 else -math.inf  # ln ε against ln σ is nearly straight.
        return 0.0 if abs(difference) < tolerance else difference

    # From fast and rough to the accountant itself, which usually has to be evaluated only once.
    last: tuple[_Method, float] = (accountant, 0.49 * _CALIBRATION_TOLERANCE)
    stages: list[tuple[_Method, float]] = [("rdp estimate", 0.1), ("prv estimate", 2e-4), last]
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


def _least_noise(excess: Callable[[float], float], *, start: float) -> float | None:
    """Return the least σ, of those tried, at which a falling function of ln σ is not above 0.

    Zero ends the search. If the function jumps over zero, the σ returned is above the jump by at most a part in 10⁷. It is
    None if the function is above 0 up to σ = 10⁶.
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
    """Return how many further steps keep ε within `target_epsilon`.

    Args:
        target_epsilon: ε > 0, for everything together.
        noise_multiplier: σ of the further steps.
        sample_rate: q of the further steps.
        delta: δ, in (0, 1).
        accountant: "prv", "rdp" or "pld".
        spent: What was released earlier on the same data.
        at_most: The largest number of steps of interest, ≥ 0.

    Returns:
        The largest T ≤ `at_most` whose ε is within the target; 0 if there is none.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> get_steps(target_epsilon=1.0, noise_multiplier=2.0, sample_rate=0.1, delta=1e-5, accountant="rdp", at_most=9)
        9
    """
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
