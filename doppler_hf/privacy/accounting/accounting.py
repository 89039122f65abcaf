"""The ε of a run: the Poisson-subsampled Gaussian mechanism, composed over T steps, add/remove neighbours.

Whatever happens to the private gradient afterwards (filter, Adam, projection) is post-processing and costs nothing, so
none of it appears here. Three accountants bound the same ε from above: *prv*, *rdp* and *pld* (see `upper_bounds`).
"""

import functools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from doppler_hf.privacy.accounting.upper_bounds import (
    SampledGaussian,
    pld_epsilon,
    prv_epsilon,
    prv_estimate,
    rdp_epsilon,
    rdp_estimate,
)

Accountant = Literal["prv", "rdp", "pld"]
Method = Accountant | Literal["prv estimate", "rdp estimate"]


class Releases(NamedTuple):
    """A number of steps run under the same mechanism.

    Attributes:
        noise_multiplier: σ, in units of the clip norm.
        sample_rate: q, the probability with which a unit is drawn at a step.
        steps: T.
    """

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
    mechanisms = composed(history, accountant=accountant)
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    if accountant not in get_args(Accountant):
        raise ValueError(f"accountant must be one of {', '.join(get_args(Accountant))}, got {accountant!r}.")
    if not mechanisms:
        return 0.0
    if any(noise_multiplier == 0.0 for noise_multiplier, _, _ in mechanisms):
        return math.inf
    return bound(mechanisms, delta=delta, by=accountant)


def composed(history: Iterable[Releases], *, accountant: Accountant) -> tuple[SampledGaussian, ...]:
    """Return every mechanism once, with all of its steps.

    Raises:
        ValueError: If a number is out of range, or a sample rate is 1 with "prv".
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
                "sample_rate, the expected batch size over the number of units, must be less than 1 with accountant='prv', "
                "got 1. Use accountant='pld' or 'rdp', or a smaller batch."
            )
        if steps > 0:
            counts[noise_multiplier, sample_rate] = counts.get((noise_multiplier, sample_rate), 0) + steps
    return tuple((*mechanism, steps) for mechanism, steps in sorted(counts.items()))


@functools.lru_cache(maxsize=256)  # The log, the ledger and the guard ask for the same ε, and PRV and PLD take a while.
def bound(mechanisms: tuple[SampledGaussian, ...], *, delta: float, by: Method) -> float:
    """Return ε by a bound, or by an estimate of one, of at least one mechanism with noise."""
    methods = {"prv": prv_epsilon, "rdp": rdp_epsilon, "pld": pld_epsilon}
    methods |= {"prv estimate": prv_estimate, "rdp estimate": rdp_estimate}
    return methods[by](mechanisms, delta=delta)
