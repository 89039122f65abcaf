"""What banded-inverse strategies would buy, for which no amplification by sampling is counted: the noise of the sum.

    python -m scripts.experiments.banded_inverse

There the *inverse* of the strategy is banded: y_t = Σ_{k<p} g_k z_{t-k}, g the series of (1 - x)^(1/2) cut to p terms, so
that p draws that can be made again from their keys stand in the place of b - 1 buffers (Kalinin et al. 2025,
https://arxiv.org/abs/2505.12128). But C = G⁻¹ is not banded: what a unit contributed once is met by all later steps, and the
amplification that sampling in turns gives to banded strategies does not apply. Its privacy is that of one Gaussian mechanism
for all the run, whose sensitivity is ‖Σ_j C_{·, jN/B}‖ if batches take turns and a unit is in one of each epoch.

Compared at equal (ε, δ), relative to white noise: the noise of the sum of all gradients, and that of
the weights once the gradient pulls back behind `momentum` (`doppler_hf.filters.closed_loop`), each with its best strategy.
"""

import dataclasses
import math

import numpy as np
import scipy.optimize
import scipy.signal
from numpy.typing import NDArray
from scipy.stats import norm

from doppler_hf.filters import PAPER_FILTERS, ClosedLoop, NoiseShape
from doppler_hf.privacy import default_delta
from doppler_hf.privacy.accounting.calibration import noise_multiplier_if_any
from doppler_hf.reports.planned_runs import PlannedRun, PlanRequest

Array = NDArray[np.float64]

FILTER = PAPER_FILTERS["momentum"]
MOST_LAGS = 200
BANDS = (1, 2, 4, 8, 16)
TERMS = (1, 2, 4, 8, 16, 32, 64, 128)
EPSILONS = (1.0, 3.0, 8.0)


# Task → N, B and epochs.
REGIMES = {
    "SST-2": PlanRequest(num_examples=67_349, batch_size=1000, epochs=3, epsilon=1.0),
    "MNIST": PlanRequest(num_examples=60_000, batch_size=1000, epochs=5, epsilon=1.0),
    "MNLI": PlanRequest(num_examples=392_702, batch_size=6000, epochs=18, epsilon=1.0),
    "CIFAR-10": PlanRequest(num_examples=50_000, batch_size=2000, epochs=60, epsilon=1.0),
}


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Return σ of the Gaussian mechanism, without sampling (Balle & Wang 2018, https://arxiv.org/abs/1805.06530)."""

    def excess(sigma: float) -> float:
        tail = np.exp(epsilon + norm.logcdf(-0.5 / sigma - epsilon * sigma))
        return float(norm.cdf(0.5 / sigma - epsilon * sigma) - tail - delta)

    return float(scipy.optimize.brentq(excess, 0.05, 100.0))


def inverse_of(terms: int) -> Array:
    """Return g, shape (terms,)."""
    ratios = [(2 * k - 3) / (2 * k) for k in range(1, terms)]
    return np.cumprod(np.array([1.0, *ratios]))


def sensitivity(inverse: Array, *, steps: int, every: int) -> float:
    """Return the norm of what a unit contributes to CG that takes part every so many steps, each time with norm 1.

    Args:
        inverse: g, shape (terms,), whose C has coefficients that are not negative and do not rise.
        steps: T.
        every: N/B.
    """
    column = scipy.signal.lfilter([1.0], inverse, np.eye(1, steps)[0])
    return float(np.linalg.norm(sum(np.pad(column, (first, 0))[:steps] for first in range(0, steps, every))))


def noises(inverse: Array, run: PlannedRun, loop: ClosedLoop, *, epsilon: float, delta: float) -> tuple[float, float]:
    """Return the noise of the sum, and of the weights behind momentum, relative to the run's white noise."""
    every = run.num_examples // run.expected_batch_size
    more = gaussian_sigma(epsilon, delta) * sensitivity(inverse, steps=run.steps, every=every) / run.noise_multiplier
    response = np.pad(inverse, (0, run.steps))[: run.steps]
    of_sum = float(np.linalg.norm(np.cumsum(response))) / run.steps**0.5
    # As a strategy that is cut where it has long been flat, and without its norm, for which the sensitivity stands.
    column = scipy.signal.lfilter([1.0], inverse, np.eye(1, min(run.steps, MOST_LAGS))[0])
    strategy = NoiseShape(tuple(np.trim_zeros(column, "b")))
    in_loop = (loop.loss(FILTER, strategy) / loop.loss(FILTER)) ** 0.5 / strategy.norm
    return more * of_sum, more * in_loop


def noises_of_bands(bands: int, run: PlannedRun, loop: ClosedLoop, *, epsilon: float, delta: float) -> tuple[float, float]:
    """Return the noises of a banded strategy with the σ that reaches the same ε; infinite if there is none."""
    shape = NoiseShape.banded(bands)
    sigma = noise_multiplier_if_any(
        shape.c, target_epsilon=epsilon, target_delta=delta, sample_rate=run.sample_rate, steps=run.steps
    )
    more = sigma / run.noise_multiplier
    of_sum = more * shape.std_of_sum([1.0] * run.steps) / math.sqrt(run.steps)
    return of_sum, more * math.sqrt(loop.loss(FILTER, shape) / loop.loss(FILTER))


def main() -> None:
    """Print the table."""
    print("| regime | ε | banded, 1 to 16 bands: sum, loop | banded-inverse, 1 to 128 terms: sum, loop |\n|---|---|---|---|")
    for name, request in REGIMES.items():
        delta = default_delta(request.num_examples)
        for epsilon in EPSILONS:
            run = dataclasses.replace(request, epsilon=epsilon).solve()
            loop = ClosedLoop.of_run(run.steps, [1 - step / run.steps for step in range(run.steps)])
            banded = [noises_of_bands(bands, run, loop, epsilon=epsilon, delta=delta) for bands in BANDS]
            inverse = [noises(inverse_of(terms), run, loop, epsilon=epsilon, delta=delta) for terms in TERMS]
            least = (
                f"{min(sums):.2f}, {min(loops):.2f}"
                for sums, loops in (zip(*banded, strict=True), zip(*inverse, strict=True))
            )
            print(f"| {name} | {epsilon:g} | {' | '.join(least)} |", flush=True)


if __name__ == "__main__":
    main()
