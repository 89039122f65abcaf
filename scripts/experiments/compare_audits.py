"""The bounds of an audit beside those of jax_privacy, on the same scores.

    python -m scripts.experiments.compare_audits ours --scores out/scores.npz
    ANOTHER_ENVIRONMENT/bin/python -m scripts.experiments.compare_audits jax_privacy --scores out/scores.npz

jax_privacy (2.0.0 was compared) has an environment of its own, with `pip install jax-privacy`. The first line makes the
scores and our bounds, the second prints both. The scores are those of mechanisms whose ε is known: the Gaussian mechanism
with μ = sensitivity / deviation, and randomized response.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import norm

DELTA, ERROR, SEEDS, CANARIES = 1e-5, 0.05, 3, (1000, 10000)
CASES = (("Gaussian, μ", 0.5), ("Gaussian, μ", 1.0), ("Gaussian, μ", 2.0), ("response, ε", 1.0), ("response, ε", 3.0))


def epsilon_of(kind: str, parameter: float) -> float:
    """Return the true ε at δ: of the Gaussian mechanism, Balle and Wang 2018, Theorem 8."""
    if kind == "response, ε":
        return parameter
    mu = parameter
    return float(brentq(lambda e: norm.cdf(mu / 2 - e / mu) - np.exp(e + norm.logcdf(-mu / 2 - e / mu)) - DELTA, 0.0, 50.0))


def scores() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield a key, the scores, and which canaries were included."""
    for kind, parameter in CASES:
        for canaries in CANARIES:
            for seed in range(SEEDS):
                generator = np.random.default_rng([seed, canaries, int(10 * parameter), kind == "response, ε"])
                included = generator.random(canaries) < 0.5
                if kind == "response, ε":
                    told_truth = generator.random(canaries) < expit(parameter)
                    values = np.where(told_truth, included, ~included).astype(float)
                else:
                    values = generator.normal(size=canaries) + parameter * included
                yield f"{kind} = {parameter:g}|{canaries}|{seed}|{epsilon_of(kind, parameter):.2f}", values, included


def save_ours(path: Path) -> None:
    """Write the scores and our bounds."""
    from doppler_hf.audit.lower_bounds import clopper_pearson_epsilon, one_run_epsilon

    saved = {}
    for key, values, included in scores():
        bounds = [
            bound(values, included, delta=DELTA, confidence=1 - ERROR)
            for bound in (one_run_epsilon, clopper_pearson_epsilon)
        ]
        saved |= {f"scores|{key}": values, f"included|{key}": included, f"bounds|{key}": np.array(bounds)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **saved)


def print_both(path: Path) -> None:
    """Print our bounds beside jax_privacy's, as a table."""
    from jax_privacy.auditing import Bonferroni, CanaryScoreAuditor, Split

    saved, rows = np.load(path), {}
    for key in (name.removeprefix("bounds|") for name in saved if name.startswith("bounds|")):
        values, included = saved[f"scores|{key}"], saved[f"included|{key}"]
        auditor = CanaryScoreAuditor(values[included], values[~included])
        one_run, clopper_pearson = saved[f"bounds|{key}"]
        strategies = (Bonferroni(), Split(seed=0))
        kind, canaries, _, truth = key.split("|")
        rows.setdefault((kind, canaries, truth), []).append(
            [
                one_run,
                *(auditor.epsilon_one_run(ERROR, DELTA, threshold_strategy=strategy) for strategy in strategies),
                clopper_pearson,
                *(
                    auditor.epsilon_clopper_pearson(ERROR, DELTA, one_sided=False, threshold_strategy=strategy)
                    for strategy in strategies
                ),
            ]
        )
    print("| scores | m | true ε | one run: ours | Bonferroni | Split | Clopper–Pearson: ours | Bonferroni | Split |")
    print("|" + "---|" * 9)
    for (kind, canaries, truth), bounds in rows.items():
        cells = (", ".join(f"{bound:.2f}" for bound in column) for column in zip(*bounds, strict=True))
        print(f"| {kind} | {canaries} | {truth} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whose", choices=["ours", "jax_privacy"])
    parser.add_argument("--scores", type=Path, required=True, help="File that the first call writes and the second reads.")
    arguments = parser.parse_args()
    (save_ours if arguments.whose == "ours" else print_both)(arguments.scores)
