"""What a run costs: the Poisson-subsampled Gaussian mechanism, composed over T steps, add/remove neighbours.

Whatever happens to the private gradient afterwards (filter, Adam, projection) is post-processing and costs nothing, so
nothing of it appears here. Both functions report upper bounds, from Opacus's accountants: *prv* (Gopi et al. 2021,
https://arxiv.org/abs/2106.02848) or *rdp* (Mironov et al. 2019, https://arxiv.org/abs/1908.10530).
"""

import functools
import math
import warnings
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import numpy as np
from opacus.accountants import create_accountant
from scipy.optimize import brentq

Accountant = Literal["prv", "rdp"]

# Opacus's own orders end at 63, which leaves ε ≥ ln(1/δ)/62 whatever the noise; small targets need larger ones.
_RDP_ORDERS = [1 + tenth / 10 for tenth in range(1, 100)] + [
    *range(11, 64),
    80,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
]

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


def get_epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: Accountant = "prv"
) -> float:
    """Return an upper bound on ε after `steps` steps.

    Args:
        noise_multiplier: σ, the noise's standard deviation in units of the clip norm.
        sample_rate: q, the probability with which an example is drawn at each step, in (0, 1].
        steps: T.
        delta: δ, in (0, 1).
        accountant: "prv" or "rdp".

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
        accountant: "prv" or "rdp".

    Returns:
        ε, as `get_epsilon`. Where PRV's arithmetic overflows, RDP's larger bound.

    Raises:
        ValueError: As `get_epsilon`.
    """
    spent = tuple(entry for entry in history if entry.steps > 0)
    for noise_multiplier, sample_rate, _ in spent:
        if not 0.0 <= noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number ≥ 0, got {noise_multiplier}.")
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}.")
        if sample_rate == 1.0 and accountant == "prv":
            raise ValueError(
                "The prv accountant cannot handle a sample rate of 1 (every example in every step); use "
                "accountant='rdp' or a smaller batch."
            )
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    if accountant not in get_args(Accountant):
        raise ValueError(f"accountant must be one of {', '.join(get_args(Accountant))}, got {accountant!r}.")
    if not spent:
        return 0.0
    if any(entry.noise_multiplier == 0.0 for entry in spent):
        return math.inf
    try:
        with np.errstate(over="raise", invalid="raise"):
            return _bound(spent, delta=delta, accountant=accountant)
    except FloatingPointError:
        # With next to no noise, ε in the hundreds, PRV's discretization overflows. RDP's bound holds as well.
        return _bound(spent, delta=delta, accountant="rdp")


@functools.lru_cache(maxsize=64)  # The log, the ledger and the guard ask for the same ε, and PRV takes a while.
def _bound(spent: tuple[Releases, ...], *, delta: float, accountant: Accountant) -> float:
    composed = create_accountant(mechanism=accountant)
    composed.history = [tuple(entry) for entry in spent]
    with warnings.catch_warnings():
        # RDP, which PRV uses to size its grid, warns when the best order is the last one that it tries; the bound holds
        # for every order.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        return float(composed.get_epsilon(delta=delta, **({"alphas": _RDP_ORDERS} if accountant == "rdp" else {})))


def get_noise_multiplier(
    *, target_epsilon: float, target_delta: float, sample_rate: float, steps: int, accountant: Accountant = "prv"
) -> float:
    """Return a noise multiplier with which `steps` steps cost at most `target_epsilon`, and hardly less.

    Args:
        target_epsilon: ε > 0; met from below to one part in a thousand.
        target_delta: δ, in (0, 1).
        sample_rate: q, in (0, 1].
        steps: T ≥ 1.
        accountant: "prv" or "rdp".

    Returns:
        σ.

    Raises:
        ValueError: An argument outside its range, or a target that no noise multiplier up to 10⁶ reaches.

    Example:
        >>> sigma = get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.02, steps=165)
        >>> get_epsilon(noise_multiplier=sigma, sample_rate=0.02, steps=165, delta=1e-5) <= 3.0
        True
    """
    if not 0.0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon}.")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")

    def spent(noise_multiplier: float) -> float:
        return get_epsilon(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            steps=steps,
            delta=target_delta,
            accountant=accountant,
        )

    def excess(log_noise_multiplier: float) -> float:
        # Aim at the middle of what is tolerated.
        return math.log(spent(math.exp(log_noise_multiplier)) / (target_epsilon * (1.0 - _CALIBRATION_TOLERANCE / 2)))

    # ε falls as σ grows, nearly as a power of it. Bracket the target in small steps, because far below the answer the
    # PRV accountant is slow; then solve on logarithmic scales.
    high = 1.0
    while excess(math.log(high)) > 0.0:
        high *= 1.5
        if high > 1e6:
            raise ValueError(
                f"No noise multiplier up to 1e6 reaches target_epsilon={target_epsilon} at target_delta={target_delta}, "
                f"sample_rate={sample_rate} and {steps} steps; raise target_epsilon or target_delta."
            )
    low = high / 1.5
    while excess(math.log(low)) <= 0.0:
        high, low = low, low / 1.5
    solution = brentq(excess, math.log(low), math.log(high), xtol=_CALIBRATION_TOLERANCE / 10)
    # The solver stops on either side of the root; what is returned is known to be within the target.
    noise_multiplier = math.exp(float(solution))
    while spent(noise_multiplier) > target_epsilon:
        noise_multiplier *= 1.0 + _CALIBRATION_TOLERANCE / 10
    return noise_multiplier
