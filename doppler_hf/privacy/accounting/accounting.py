"""What a run costs: the Poisson-subsampled Gaussian mechanism, composed over T steps, add/remove neighbours.

Whatever happens to the private gradient afterwards (filter, Adam, projection) is post-processing and costs nothing, so
nothing of it appears here. Three accountants bound the same ε, from above all of them: *prv*, *rdp* and *pld* (see
`upper_bounds`). The other two functions turn the question round: which σ, and how many steps, ε affords.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from doppler_hf.privacy.accounting.search import largest_count, solve_falling
from doppler_hf.privacy.accounting.upper_bounds import pld_epsilon, prv_epsilon, rdp_epsilon

Accountant = Literal["prv", "rdp", "pld"]

# Share of the target left unspent at most: one part in a thousand, from below.
_CALIBRATION_TOLERANCE = 1e-3


class Releases(NamedTuple):
    """A number of steps run under the same mechanism."""

    noise_multiplier: float
    sample_rate: float
    steps: int


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
        noise_multipliers: At least one; 0 is a release without noise, infinity one that says nothing.

    Returns:
        σ of the joint release: 0 if any of them is 0, infinity if all are infinite.

    Raises:
        ValueError: No noise multiplier, or a negative one.

    Example:
        >>> joint_noise_multiplier(3.0, 4.0)
        2.4
    """
    if not noise_multipliers:
        raise ValueError("joint_noise_multiplier needs at least one noise multiplier.")
    for noise_multiplier in noise_multipliers:
        if not noise_multiplier >= 0.0:
            raise ValueError(f"A noise multiplier must be a number ≥ 0, got {noise_multiplier}.")
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
        ValueError: An argument outside its range, or a sample rate of 1 with "prv".

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
        ε, as `get_epsilon`. Where the arithmetic of PRV or PLD fails, another one's bound.

    Raises:
        ValueError: As `get_epsilon`.
    """
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
                "The prv accountant cannot handle a sample rate of 1 (every example in every step); use accountant='pld' or "
                "'rdp', or a smaller batch."
            )
        if steps > 0:
            counts[noise_multiplier, sample_rate] = counts.get((noise_multiplier, sample_rate), 0) + steps
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    if accountant not in get_args(Accountant):
        raise ValueError(f"accountant must be one of {', '.join(get_args(Accountant))}, got {accountant!r}.")
    if not counts:
        return 0.0
    if any(noise_multiplier == 0.0 for noise_multiplier, _ in counts):
        return math.inf
    return _bound(
        tuple((*mechanism, steps) for mechanism, steps in sorted(counts.items())), delta=delta, accountant=accountant
    )


@functools.lru_cache(maxsize=256)  # The log, the ledger and the guard ask for the same ε, and PRV and PLD take a while.
def _bound(mechanisms: tuple[tuple[float, float, int], ...], *, delta: float, accountant: Accountant) -> float:
    bound = {"prv": prv_epsilon, "rdp": rdp_epsilon, "pld": pld_epsilon}[accountant]
    return bound(mechanisms, delta=delta)


def get_epsilons(history: Iterable[Releases], *, delta: float) -> dict[Accountant, float]:
    """Return the upper bounds of all accountants on ε, in the order prv, rdp, pld.

    Args:
        history: What was released, in any order.
        delta: δ, in (0, 1).

    Returns:
        ε by accountant. Where a sample rate is 1, prv cannot bound it and is left out.

    Raises:
        ValueError: An argument outside its range.
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
) -> float:
    """Return a noise multiplier with which `steps` further steps bring ε to at most `target_epsilon`, and hardly less.

    Args:
        target_epsilon: ε > 0, for everything together; met from below to one part in a thousand.
        target_delta: δ, in (0, 1).
        sample_rate: q, in (0, 1].
        steps: T ≥ 1.
        accountant: "prv", "rdp" or "pld".
        spent: What was released earlier on the same data.

    Returns:
        σ.

    Raises:
        ValueError: An argument outside its range, `spent` alone costs the target or more, or no noise multiplier up to
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
            f"What was released earlier costs ε = {already:.6g}, which leaves nothing of target_epsilon={target_epsilon}; "
            "raise target_epsilon."
        )
    aim = target_epsilon * (1.0 - _CALIBRATION_TOLERANCE / 2)
    tolerated = (math.log(target_epsilon * (1.0 - _CALIBRATION_TOLERANCE) / aim), math.log(target_epsilon / aim))

    def excess(noise_multiplier: float, *, by: Accountant) -> float:
        history = [*spent, Releases(noise_multiplier, sample_rate, steps)]
        epsilon = get_total_epsilon(history, delta=target_delta, accountant=by)
        return math.log(epsilon / aim) if epsilon > 0.0 else -math.inf

    # RDP takes a tenth of the time of the others, and its answer is close to theirs.
    noise_multiplier = solve_falling(functools.partial(excess, by="rdp"), start=1.0, tolerated=tolerated)
    if accountant != "rdp":
        start = 1.0 if noise_multiplier is None else noise_multiplier
        noise_multiplier = solve_falling(functools.partial(excess, by=accountant), start=start, tolerated=tolerated)
    if noise_multiplier is None:
        raise ValueError(
            f"No noise multiplier up to 1e6 reaches target_epsilon={target_epsilon} at target_delta={target_delta}, "
            f"sample_rate={sample_rate} and {steps} steps; raise target_epsilon or target_delta."
        )
    return noise_multiplier


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
        at_most: The largest answer that is of interest, ≥ 0.

    Returns:
        The largest T ≤ `at_most` whose ε is within the target; 0 if there is none.

    Raises:
        ValueError: An argument outside its range.

    Example:
        >>> get_steps(target_epsilon=1.0, noise_multiplier=2.0, sample_rate=0.1, delta=1e-5, accountant="rdp", at_most=9)
        9
    """
    _check_target(target_epsilon)
    if at_most < 0:
        raise ValueError(f"at_most must be at least 0, got {at_most}.")

    def total(steps: int) -> float:
        history = [*spent, Releases(noise_multiplier, sample_rate, steps)]
        return get_total_epsilon(history, delta=delta, accountant=accountant)

    return largest_count(total, budget=target_epsilon, at_most=at_most)


def _check_target(target_epsilon: float) -> None:
    if not 0.0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon}.")
