"""What theory says of the runs: does the gradient change slowly, and what is left of the noise on a quadratic?"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from scipy.stats import spearmanr

from doppler_hf.filters import PAPER_FILTERS, ClosedLoop, noise_gain, stability_limit
from scripts.regime.cells import METHODS
from scripts.regime.results import Results
from scripts.regime.search import ADAM_LINES, GALORE_LINES, SGD_LINES, Line, runs_of_sgd, search_of, tests_of
from scripts.regime.spectrum import Released, Signal, peak_period, power_after, predicted_gain
from scripts.regime.tasks import TASKS

# The filters that are compared, by their names in `METHODS`.
FILTERS: Final = ("none", "momentum", "first-order-v1", "first-order-v2", "second-order")
# ηλ for which the loss from noise is shown.
CURVATURES: Final = (0.01, 0.1, 0.5, 1.0, 1.5, 1.9)
SPECTRUM: Final = Signal.name
_EQUAL: Final = 2e-3  # The error of `ClosedLoop`, relative.
LOW_PASS: Final = """
## Does the gradient change slowly?

**Mostly not at the best learning rate, and how slowly it changes did not say whether a filter helps.** The paper's theorem
needs a small learning rate (ηλ ≤ 1 for the largest curvature λ, without a filter), and gradients that change slowly. Its
bound for a filter, at the best rate, then depends on (Σ κ_τ ρ_τ)²/Σ κ_τ², where κ_τ is the filter's coefficient for the
gradient of τ steps ago. ρ_τ is the correlation of the *signal*, which is the gradient before noise is added, with itself τ
steps before: 1 means the same direction, −1 the opposite one. This *ratio* is 1 without a filter, and the larger the better.
On a quadratic, ρ₁ is 1 − ηλ. So a negative ρ₁ can mean that the learning rate is larger than the theorem allows, which then
says nothing.

At the best rate of DPSGD, successive gradients tend to point in opposite directions (ρ₁ < 0) in {turning} of the {tasks}
tasks whose best rate is known. The table has the runs of DPSGD whose signal was recorded, with ρ₁ over the whole run and in
each third of it. The first third has most of the signal. In the later thirds of the two tasks of MNIST the signal is so weak
that a negative ρ₁ may come from the noise alone: noise moves the weights, and the next gradient pulls them back. The random
choice of a batch does the same. The number in brackets takes the effect of this choice away, under the assumption ηλ = 1.
Where ηλ is smaller it takes too much away, and may be above 1. On `mnist` at η = 3.2 it decides the sign.

The last columns have the accuracies of the filters at the same rate, on the held-out images: of the last weights, and of
their average. These are single runs, and between two evaluations of a run accuracy changes on CIFAR-10 by 0.8 points in the
median, and by up to 4. So the order of the filters in one row says little.
""".strip()
AT_EQUAL_RATES: Final = """
`first-order-v1` was trained at {gaining} rates at which its ratio is above 1: the accuracy of the last weights changes by
{gained} points. At {losing} rates the ratio is below 1, and the accuracy changes by {lost} points (mean, and range).
{verdict}
""".strip()
PREDICTED: Final = """
## Is the predicted filter the best one?

Each filter has its own best rate. The accuracies are means over seeds on the test images, if three filters have them, and
else those of one run on the held-out images. The theorem predicts the filter with the largest ratio for the signal
of the run without a filter. The quadratic predicts the one with the smallest L. A prediction is right if no other filter has
a higher accuracy, before rounding.

| task | optimizer | accuracy, % | images | by the theorem | by the quadratic |
|---|---|---|---|---|---|
""".strip()
AFTER_PREDICTED: Final = """
The theorem names the best of the compared filters in {theorem} settings, and the quadratic in {quadratic}. A guess would be
right in {guessed:.1f} of {settings}. The best one is ahead of the next one by {least:.1f} to {most:.1f} points, and where it
is less than a point the order may be chance. {orders} {correlations}
""".strip()
ORDERED: Final = (
    "For {rows} the whole order of the accuracies is that of the quadratic. This may be chance, too: there, no filter and "
    "`first-order-v1` train beyond the rates at which a quadratic is stable."
)
CORRELATED: Final = (
    "Where more than five are compared, the order of the accuracies and that of the quadratic have a rank correlation "
    "(Spearman's) of {values}."
)
QUADRATIC: Final = """
## What a quadratic says

On a quadratic loss, the gradient pulls the weights back, and noise moves them. In a direction of curvature λ this costs a
loss of ½ η L times the noise's variance. L depends on ηλ and on the filter alone, and can be computed
(`doppler_hf.filters.ClosedLoop`). Above a largest ηλ, training is unstable, and there it oscillates with a period that
follows from the filter as well (`stability_limit`):
""".strip()
AFTER_QUADRATIC: Final = """
- **`first-order-v1`, f3 and f4 leave the loss from noise exactly as it is without a filter,** L = 1/(2 − ηλ), at every
  stable rate and in every direction. This holds for all filters of first order with two equal coefficients b. So on a
  quadratic such a filter gains nothing by removing noise. Our runs on CIFAR-10 are beyond the stable rates
  ([below](#at-which-period-does-training-oscillate)), so that this is a hint there, and no proof.
- `momentum`, `first-order-v2` and f1 remove noise in sharp directions, and are stable at larger rates. `second-order`, f2,
  f5 and f6 add noise.
- In flat directions, where ηλ is near 0, all filters are almost alike. The weights add up the steps, and a filter spreads
  the noise of one step over the next ones without changing its sum.

Ranked by this loss, the order is `first-order-v2`, `momentum`, f1, then none together with `first-order-v1`, f3 and f4, and
then f2, f5, `second-order` and f6 ([was it so?](#is-the-predicted-filter-the-best-one)). The paper's proof treats earlier
noise as independent of the present weights. But earlier noise has moved them.
""".strip()
PERIODS: Final = """
## At which period does training oscillate?

The *signal* is the mean clipped gradient of a step, before noise is added. The table has the period in steps at which it has
most power, by C·η. *Slow* is a period beyond 64 steps. The first column has the period that a quadratic has at the largest
stable ηλ.
""".strip()
CURVATURE: Final = """
How sharp is the loss where the runs are? λ is the largest eigenvalue of the Jacobian of the mean clipped gradient of 2,000
held-out images, at the weights after a share of the run. The runs have the settings and seed of those with the best rates,
but a later version of the package. They end up to 2.2 points away from them, by chance or by the version. So smaller
differences between single runs mean little, also those by which C was chosen on CIFAR-10.
""".strip()
AFTER_CURVATURE: Final = """
On `cifar10-half` ηλ is 24 to 46 % above its limit of 2 without a filter, and 22 to 64 % with `first-order-v1` at twice the
rate: the loss there is half as sharp. A quadratic would be unstable. The oscillation stays small probably because the length
of a clipped gradient is at most C. With `momentum`, ηλ is far below its limit. A quadratic of this curvature has periods of
4.8 to 6.3 steps, and 5.2 was seen at this rate.
""".strip()
AFTER_PERIODS: Final = """
Seven filters of the paper have a largest ηλ of at most 2. At C·η = 1.6 on the perceptron, each of them oscillates with the
period of its limit, to within 6 %. `momentum`, `first-order-v2` and f1 are stable at larger ηλ, and have other periods. With
`first-order-v1` on the perceptron, the period is the same at the higher rate, and the oscillation is missing at the lower
one. Without a filter, a period of 2 says only that ηλ is above 1.

`first-order-v1` passes 9 % of the power of its oscillation, and 9 % of the power of the noise. So for the part of the signal
that oscillates, the filter improves nothing. The slow part is improved, but an oscillation need not harm: `second-order`
oscillates at its best rate on the perceptron, too.
""".strip()


def whether_it_is_low_pass(results: Results) -> Iterator[str]:
    """Yield the signal's autocorrelation at every rate of DPSGD, and what the filters did at the same rate."""
    tables = {task: _at_equal_rates(task, results) for task in TASKS}
    best = [runs["none"] for task in TASKS if "none" in (runs := best_runs(task, results))]
    if not any(tables.values()):
        return
    yield LOW_PASS.format(turning=sum(signal_of(row)[1] < 0 for row in best), tasks=len(best))
    rows = [
        "| task | C, η | ρ₁ | ρ₁ in thirds | ratio of first-order-v1 | " + " | ".join(FILTERS) + " |",
        "|---" * (5 + len(FILTERS)) + "|",
    ]
    for task, runs in tables.items():
        for run in runs:
            signal, none = signal_of(run["none"]), run["none"]
            accuracies = (f"{percent(run[name])}, {_of_average(run[name])}" if name in run else "–" for name in FILTERS)
            rows.append(
                f"| {task} | {none['clip_norm']:g}, {none['learning_rate']:g} | {signal[1] / signal[0]:.2f} "
                f"({(signal[1] + np.mean(none[SPECTRUM]['of_draws'])) / signal[0]:.2f}) | "
                f"{_in_thirds(none)} | {predicted_gain(PAPER_FILTERS['first-order-v1'], signal):.2f} | "
                f"{' | '.join(accuracies)} |"
            )
    yield "\n".join(rows)
    both = [run for runs in tables.values() for run in runs if "first-order-v1" in run]
    if both:
        yield AT_EQUAL_RATES.format(**_found_at_equal_rates(both))


def whether_the_best_was_predicted(results: Results) -> Iterator[str]:
    """Yield which filter was best at its own best rate, and which one each theory predicts."""
    rows, leads, compared, ordered_alike, correlated = [], [], [], [], []
    right: dict[str, list[bool]] = {"theorem": [], "quadratic": []}
    for task in TASKS:
        for unfiltered in (SGD_LINES[0], ADAM_LINES[0], GALORE_LINES[0]):
            runs = best_runs(task, results, unfiltered=unfiltered)
            if len(runs) < 2 or "none" not in runs:
                continue
            signal = signal_of(runs["none"])
            # The order of the losses is the same at every curvature of their table.
            curve = ClosedLoop(np.array([CURVATURES[1]]))
            scores, images = _accuracies(task, runs, results)
            losses = {name: float(curve.loss(PAPER_FILTERS[name])) for name in scores}
            predicted = {
                "theorem": _largest({name: predicted_gain(PAPER_FILTERS[name], signal) for name in scores}),
                "quadratic": _largest({name: -loss for name, loss in losses.items()}),
            }
            ordered = sorted(scores, key=lambda name: -scores[name])
            first, second = (scores[name] for name in ordered[:2])
            leads.append(first - second)
            compared.append(len(scores))
            for theory, names in predicted.items():
                if len(names) < len(scores):
                    right[theory].append(any(scores[name] == first for name in names))
            rising = [losses[name] for name in ordered]
            if len(scores) > 3 and all(one <= other * (1 + _EQUAL) for one, other in itertools.pairwise(rising)):
                ordered_alike.append(f"`{task}` with {unfiltered.split(',')[0]}")
            if len(scores) > 5:
                # Losses that differ by the error of `ClosedLoop` alone are equal.
                rank = spearmanr([round(losses[name], 3) for name in scores], [-scores[name] for name in scores]).statistic
                correlated.append(f"{rank:.2f} (`{task}` with {unfiltered.split(',')[0]}, {len(scores)} filters)")
            found = ", ".join(f"{name} {scores[name]:.1f}" for name in ordered)
            written = (" or ".join(names) if len(names) < len(scores) else "all alike" for names in predicted.values())
            rows.append(f"| {task} | {unfiltered.split(',')[0]} | {found} | {images} | {' | '.join(written)} |")
    if rows:
        yield "\n".join([PREDICTED, *rows])
        counts = {theory: f"{sum(found)} of {len(found)}" for theory, found in right.items()}
        yield AFTER_PREDICTED.format(
            **counts,
            guessed=sum(1 / number for number in compared),
            settings=len(compared),
            least=min(leads),
            most=max(leads),
            orders=ORDERED.format(rows=" and ".join(ordered_alike)) if ordered_alike else "",
            correlations=CORRELATED.format(values=" and ".join(correlated)) if correlated else "",
        ).rstrip()


def _accuracies(task: str, runs: Mapping[str, dict[str, Any]], results: Results) -> tuple[dict[str, float], str]:
    """Return filter → accuracy in %, and of which images: those of the test where all filters have several seeds."""
    tests = {
        name: tests_of(search_of(Line(task, row["method"], is_reported=True), results), results, of="test")
        for name, row in runs.items()
    }
    tested = {name: float(np.mean([*found.values()])) for name, found in tests.items() if len(found) > 1}
    if "none" in tested and len(tested) >= min(3, len(runs)):
        return tested, "test"
    return {name: 100 * row["held_out"] for name, row in runs.items()}, "held out"


def _largest(values: Mapping[str, float]) -> list[str]:
    """Return the names of the largest value, all of them where several are equal but for the error of `ClosedLoop`."""
    largest = max(values.values())
    return [name for name, value in values.items() if math.isclose(value, largest, rel_tol=_EQUAL)]


def _in_thirds(row: dict[str, Any]) -> str:
    """Write ρ₁ in each third of a run."""
    pairs = zip(row[SPECTRUM]["parts"], row[SPECTRUM]["of_draws"], strict=True)
    return ", ".join(f"{part[1] / max(part[0] - draws, abs(part[1])):.2f}" for part, draws in pairs)


def _at_equal_rates(task: str, results: Results) -> list[dict[str, dict[str, Any]]]:
    """Return filter → row of the runs at the rates of DPSGD under the usual conditions, sorted by C times the rate."""
    found: dict[tuple[float, float], dict[str, dict[str, Any]]] = {}
    for name, row in runs_of_sgd(task, results):
        if row["held_out"] is not None:
            found.setdefault((row["clip_norm"], row["learning_rate"]), {})[name] = row
    with_theory = [runs for runs in found.values() if SPECTRUM in runs.get("none", {})]
    return sorted(with_theory, key=lambda runs: (step_length(runs["none"]), runs["none"]["clip_norm"]))


def _found_at_equal_rates(both: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, str | int]:
    """Return how the accuracy differs with the paper's filter where its ratio is above 1, and where it is below."""
    differences: dict[bool, list[float]] = {True: [], False: []}
    for run in both:
        ratio = predicted_gain(PAPER_FILTERS["first-order-v1"], signal_of(run["none"]))
        differences[ratio > 1].append(100 * (run["first-order-v1"]["held_out"] - run["none"]["held_out"]))
    said = {
        gains: f"{points(np.mean(values))} ({points(min(values))} to {points(max(values))})" if values else "–"
        for gains, values in differences.items()
    }
    means = [np.mean(differences[gains]) for gains in (True, False) if differences[gains]]
    return {
        "gaining": len(differences[True]), "gained": said[True], "losing": len(differences[False]), "lost": said[False],
        "verdict": "So the ratio did not predict the sign." if len(means) == 2 and means[0] <= means[1] else "",
    }  # fmt: skip


def what_a_quadratic_says(results: Results, curvatures: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the loss from noise with each filter by curvature, the largest stable rate, and which periods were seen."""
    shown = " | ".join(f"L at ηλ = {x:g}" for x in CURVATURES)
    lines = [f"| filter | {shown} | largest ηλ | period there |", "|---" * (3 + len(CURVATURES)) + "|"]
    for name, low_pass_filter in PAPER_FILTERS.items():
        limit = stability_limit(low_pass_filter)
        losses = (ClosedLoop(np.array([x])).loss(low_pass_filter) for x in CURVATURES)
        written = " | ".join(f"{loss:.3f}" if math.isfinite(loss) else "unstable" for loss in losses)
        lines.append(f"| {name} | {written} | {limit.x:.3g} | {limit.period:.1f} |")
    yield QUADRATIC
    yield "\n".join(lines)
    yield AFTER_QUADRATIC
    yield from _periods(results)
    yield from _curvatures(curvatures)


def _curvatures(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the largest eigenvalues that were measured, in units in which 2 is the limit without a filter."""
    if not rows:
        return
    shares = list(rows[0]["largest_eigenvalue"])
    after = " | ".join(f"ηλ after {100 * float(share):.0f} %" for share in shares)
    lines = [f"| task | filter | C·η | held out, % | {after} | largest stable ηλ |", "|---" * (5 + len(shares)) + "|"]
    for row in sorted(
        rows, key=lambda row: (list(TASKS).index(row["task"]), list(PAPER_FILTERS).index(row["low_pass_filter"]))
    ):
        found = " | ".join(f"{row['learning_rate'] * row['largest_eigenvalue'][share]:.2f}" for share in shares)
        limit = stability_limit(PAPER_FILTERS[row["low_pass_filter"]]).x
        begin = f"| {row['task']} | {row['low_pass_filter']} | {step_length(row):g} | {percent(row)}"
        lines.append(f"{begin} | {found} | {limit:.3g} |")
    yield CURVATURE
    yield "\n".join(lines)
    yield AFTER_CURVATURE


def _periods(results: Results) -> Iterator[str]:
    runs = {task: _by_filter(task, results) for task in TASKS}
    tasks = [task for task, found in runs.items() if found]
    names = [name for name in PAPER_FILTERS if any(name in runs[task] for task in tasks)]
    if not names:
        return
    lines = [f"| filter | at the limit | {' | '.join(tasks)} |", "|---" * (2 + len(tasks)) + "|"]
    for name in names:
        cells = []
        for task in tasks:
            rows = sorted(runs[task].get(name, []), key=step_length)
            by_step = {f"{step_length(row):g}": _period(row) for row in rows}
            cells.append("; ".join(f"{step}: {period}" for step, period in by_step.items()) or "–")
        lines.append(f"| {name} | {stability_limit(PAPER_FILTERS[name]).period:.1f} | {' | '.join(cells)} |")
    yield PERIODS
    yield "\n".join(lines)
    yield AFTER_PERIODS


def _by_filter(task: str, results: Results) -> dict[str, list[dict[str, Any]]]:
    """Return filter → runs of SGD that recorded their signal, under the usual conditions."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in runs_of_sgd(task, results):
        if SPECTRUM in row:
            found.setdefault(name, []).append(row)
    return found


def _period(row: dict[str, Any]) -> str:
    period = peak_period(signal_of(row))
    return f"{period:.1f}" if math.isfinite(period) else "slow"


def best_runs(task: str, results: Results, *, unfiltered: str = SGD_LINES[0]) -> dict[str, dict[str, Any]]:
    """Return filter → run at its best rate under the usual conditions, of those that recorded their signal.

    Args:
        task: The task.
        results: What was run.
        unfiltered: The method without a filter; the runs are those of its optimizer.
    """
    runs, like = {}, METHODS[unfiltered]
    for method, terms in METHODS.items():
        if dataclasses.replace(terms, low_pass_filter="none") != like or terms.low_pass_filter not in PAPER_FILTERS:
            continue
        search = search_of(Line(task, method), results)
        if search.best is not None and SPECTRUM in search.rows[search.best]:
            runs[terms.low_pass_filter] = search.rows[search.best]
    return runs


def step_length(row: dict[str, Any]) -> float:
    """Return C times the learning rate, the length of the step that one record makes, but for B."""
    return float(row["clip_norm"] * row["learning_rate"])


def signal_of(row: dict[str, Any]) -> np.ndarray:
    """Return the autocorrelation of a run's signal in units of the noise, without the noise of the draws."""
    found = np.array(row[SPECTRUM]["autocorrelation"])
    # Where all of lag 0 is the noise of draws, by the error of the estimate, the next lag takes its place.
    found[0] = max(found[0] - np.mean(row[SPECTRUM]["of_draws"]), abs(found[1]))
    return found


def what_the_gradient_says(task: str, results: Results) -> Iterator[str]:
    """Yield what the autocorrelation of DPSGD's signal predicts at every rate, and what was found at the best ones."""
    of_sgd = [row for row in results.rows(task) if row["method"] == SGD_LINES[0] and SPECTRUM in row]
    if not of_sgd:
        return
    rows = [
        "| ε, B, schedule, C | rate | held out, % | signal, draws | ρ₁, ρ₁₀ | released | " + " | ".join(FILTERS[1:]) + " |"
    ]
    rows.append("|---" * (6 + len(FILTERS) - 1) + "|")
    for row in sorted(of_sgd, key=_place):
        signal = signal_of(row)
        gains = " | ".join(f"{predicted_gain(PAPER_FILTERS[name], signal):.2f}" for name in FILTERS[1:])
        rho, released = signal / signal[0], row.get(Released.name, {}).get("autocorrelation")
        epsilon, batch_size, schedule, clip_norm, rate = _place(row)
        rows.append(
            f"| {'∞' if epsilon == -math.inf else f'{-epsilon:g}'}, {batch_size:,}, {schedule}, {clip_norm:g} | {rate:g} | "
            f"{percent(row)} | {signal[0]:.4f}, {np.mean(row[SPECTRUM]['of_draws']):.4f} | {rho[1]:.2f}, {rho[10]:.2f} | "
            f"{'–' if released is None else f'{released[0]:.4f}, {released[1]:.4f}'} | {gains} |"
        )
    yield f"### {task}: what the gradient says"
    yield "\n".join(rows)
    yield from _with_each_filter(task, results)


def _place(row: dict[str, Any]) -> tuple[float, int, str, float, float]:
    """Return −ε, B, schedule, C and rate, in whose order the runs stand."""
    epsilon = math.inf if row["epsilon"] is None else row["epsilon"]
    return -epsilon, row["batch_size"], row["schedule"], row["clip_norm"], row["learning_rate"]


def _with_each_filter(task: str, results: Results) -> Iterator[str]:
    """Yield the signal per noise with each filter at its own best rate."""
    lines = ["| filter | signal per noise at its best rate, before → behind the filter | ρ₁, ρ₅, ρ₁₀ | held out, % |"]
    lines.append("|---|---|---|---|")
    for name, row in best_runs(task, results).items():
        signal, used = signal_of(row), PAPER_FILTERS[name]
        after = power_after(used, signal) / noise_gain(used)
        rho = ", ".join(f"{signal[lag] / signal[0]:.2f}" for lag in (1, 5, 10))
        lines.append(f"| {name} | {signal[0]:.4f} → {after:.4f} | {rho} | {percent(row)} |")
    if len(lines) > 2:
        yield "\n".join(lines)


def points(change: float) -> str:
    """Write a change of an accuracy in points, without the sign of what is rounded to 0."""
    return f"{change:+.1f}" if abs(change) >= 0.05 else "0.0"


def percent(row: dict[str, Any]) -> str:
    """Write a run's held-out accuracy in %."""
    return "stopped" if row["held_out"] is None else f"{100 * row['held_out']:.1f}"


def _of_average(row: dict[str, Any]) -> str:
    return f"{100 * row['held_out_of_average']:.1f}"
