"""The ε of a run: the Poisson-subsampled Gaussian mechanism, composed over T steps, add/remove neighbours.

Filter, Adam and projection are post-processing and cost nothing. Three accountants bound the same ε from above: *prv*,
*rdp* and *pld* (see `upper_bounds`).
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
    """A number of steps run under the same mechanism."""

    noise_multiplier: float  # σ, in units of the clip norm
    sample_rate: float  # q, the probability with which a unit is drawn at a step
    steps: int  # T

    @classmethod
    def in_turns(cls, noise_multiplier: float, sample_rate: float, steps: int, *, groups: int) -> "Releases":
        """Return the releases of steps in which b groups of units take turns, as those of one group.

        A unit is drawn in its turns only, ⌈T/b⌉ at most, each time with probability b·q (Choquette-Choo et al. 2023,
        https://arxiv.org/abs/2306.08153, Theorem 4).
        """
        return cls(noise_multiplier, groups * sample_rate, math.ceil(steps / groups))


def default_delta(num_examples: int) -> float:
    """Return δ = N^−1.1, the paper's choice."""
    return float(num_examples**-1.1)


def joint_noise_multiplier(*noise_multipliers: float) -> float:
    """Return (Σ σᵢ⁻²)^(−1/2): the noise multiplier of several Gaussian releases from one Poisson draw, taken together.

    Release i adds noise of standard deviation σᵢ·Cᵢ to a sum of sensitivity Cᵢ over the same sample. In units of its own
    noise each output shifts by a vector of norm at most 1/σᵢ when an example joins, so all together by at most √Σ σᵢ⁻².
    That is one Gaussian mechanism, drawn with the same probability.
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
    """Return an upper bound on ε after `steps` steps: infinity without noise, and 0 for no steps.

    Args:
        noise_multiplier: σ, the noise's standard deviation in units of the clip norm.
        sample_rate: q, the probability with which an example is drawn at each step, in (0, 1].
        steps: T.
        delta: δ, in (0, 1).
        accountant: "prv", "rdp" or "pld".

    Raises:
        ValueError: If an argument is out of range, or the sample rate is 1 with "prv".

    Example:
        >>> round(get_epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 1)
        1.8
    """
    return get_total_epsilon([Releases(noise_multiplier, sample_rate, steps)], delta=delta, accountant=accountant)


def get_total_epsilon(history: Iterable[Releases], *, delta: float, accountant: Accountant = "prv") -> float:
    """Return `get_epsilon` of several runs on the same data; where PRV or PLD fails, another accountant's bound."""
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
    """Return every mechanism once, with all of its steps; refuse numbers out of range."""
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
def bound(mechanisms: tuple[SampledGaussian, ...], *, delta: float, by: Method) -> float:
    """Return ε by a bound, or by an estimate of one, of at least one mechanism with noise."""
    methods = {"prv": prv_epsilon, "rdp": rdp_epsilon, "pld": pld_epsilon}
    methods |= {"prv estimate": prv_estimate, "rdp estimate": rdp_estimate}
    return methods[by](mechanisms, delta=delta)
