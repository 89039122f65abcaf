"""The noise that reaches ε under Poisson sampling and under ours, for six runs of practice.

  python -m scripts.experiments.sampling_schemes

δ is N^-1.1 and T = E⌈N/B⌉. With b bands b groups take turns. Poisson sampling is rounds of one turn of a known group.
"""

import math
from collections.abc import Callable

from scipy.optimize import brentq

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy.accounting import Releases, default_delta, get_noise_multiplier
from doppler_hf.privacy.accounting.composition import Rounds, epsilons_of

RUNS = {  # N, B, epochs
    "SST-2, 3 epochs": (67_349, 1000, 3),
    "SST-2, 6 epochs": (67_349, 1000, 6),
    "MNIST": (60_000, 500, 2),
    "CIFAR-10": (50_000, 2000, 30),
    "MNLI": (392_702, 6000, 18),
    "5,000 rows": (5000, 128, 10),
}
EPSILONS = (1.0, 3.0, 8.0)
BANDS = (1, 2, 4, 8)


def least_noise(rounds_of: Callable[[float], list[Rounds]], *, epsilon: float, delta: float) -> float:
    """Return the σ whose rounds of known groups cost ε, to some parts in 10⁵."""

    def excess(log_sigma: float) -> float:
        return math.log(max(epsilons_of(rounds_of(math.exp(log_sigma)), delta=delta)) / epsilon)

    return math.exp(brentq(excess, math.log(0.3), math.log(100.0), xtol=1e-5))


def compared(num_examples: int, batch_size: int, epochs: int, *, epsilon: float, bands: int) -> tuple[float, float, float]:
    """Return σ under Poisson sampling, under random allocation in known groups, and in secret ones."""
    steps, rate = epochs * math.ceil(num_examples / batch_size), batch_size / num_examples
    strategy, delta = NoiseShape.banded(bands).c, default_delta(num_examples)
    ours = get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, strategy=strategy)
    return (
        least_noise(lambda sigma: [Rounds(sigma, bands * rate, 1, math.ceil(steps / bands))], epsilon=epsilon, delta=delta),
        least_noise(lambda sigma: [*Releases(sigma, rate, steps, strategy).rounds()], epsilon=epsilon, delta=delta),
        ours,
    )


def main() -> None:
    """Print a table of our σ by bands, and of its ratio to those of known groups and of Poisson sampling."""
    print("| run | ε |", *(f"b = {bands} |" for bands in BANDS))
    print("|---|---|" + "---|" * len(BANDS))
    for name, run in RUNS.items():
        for epsilon in EPSILONS:
            cells = []
            for bands in BANDS:
                poisson, known, ours = compared(*run, epsilon=epsilon, bands=bands)
                cells.append(f"{ours:.4f} ({ours / known:.3f}, {ours / poisson:.3f}) |")
            print(f"| {name} | {epsilon:g} |", *cells, flush=True)


if __name__ == "__main__":
    main()
