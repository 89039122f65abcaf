"""The page of the results: tables of what there is, what the theory says of it, and what is missing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from doppler_hf.filters import PAPER_FILTERS, noise_gain, stability_limit
from scripts.regime.cells import METHODS, Cell
from scripts.regime.results import Results
from scripts.regime.search import SGD_LINES, Line, Search, family_of, further_cells, lines_of, reported_cells, search_of
from scripts.regime.spectrum import Released, Signal, peak_period, power_after, predicted_gain
from scripts.regime.tasks import TASKS
from scripts.studies.tuning import difference, interval

TITLE: Final = "# Does the paper's filter gain in the paper's own regime?"
TERMS: Final = {
    "epsilon": lambda value: f"ε = {value:g}",
    "batch_size": lambda value: f"B = {value:,}",
    "schedule": lambda value: f"{value} schedule",
    "clipping": lambda value: f"{value} clipping",
    "epochs": lambda value: f"{value} epochs",
    "sampling": lambda value: f"sampling by {value}",
}
USUAL: Final = "ε = 8, B = 1,000, constant rate, vanilla clipping, Poisson sampling"
# The filters that are compared with what the theory predicts, by their names in `METHODS`.
FILTERS: Final = ("none", "momentum", "first-order-v1", "first-order-v2", "second-order")
FIRST_PART: Final = """
- **Command:** `python -m scripts.reproduce paper-regime --data-dir DATA`; this page is written from
  [paper-regime.jsonl](paper-regime.jsonl), which has a line for each training
- **Seeds, hardware, date:** 100 chooses the rates, 0, 1 and 2 are reported; one thread of a busy CPU; {date}

De et al.'s CNN of five layers with a quarter of its channels on CIFAR-10 (`cifar10`), the same on images of 16 × 16 pixels
(`cifar10-half`), and that CNN with all its channels (`cifar10-full`); on MNIST the CNN of Papernot et al. (`mnist`) and a
tanh perceptron (`mnist-perceptron`). 50 epochs, δ = N^−1.1, no augmentation. 5,000 training images are held out to choose
rate and clip norm. The test set (5,000 images) is evaluated only at the end of the reported runs.

SGD's rates are a factor of 2 apart, Adam's a factor of √10. The search goes on until the best rate has been tried on both
sides. A rate above a better one is stopped after 40 % of the run if it is 5 points behind it at the same point; this is done
at a constant rate only, and no deciding figure comes from a stopped run.

*Average* is an exponential average of the weights (De et al. 2022), which costs no privacy. Its accuracy is that on the
held-out images, at its own best rate.
""".strip()


LOW_PASS: Final = """
The theorem of the paper compares signal and noise of a single step. It lets a filter gain where the signal's autocorrelation
is positive, that is where gradients change slowly. At the best rate of DPSGD that was tried, successive gradients point in
opposite directions (ρ₁ < 0) in {turning} of {tasks} tasks. The theorem then predicts a loss, which is a gain below 1. At
smaller rates it predicts a gain.

The table has all rates at which DPSGD was trained, and the accuracies of the filters at the same rate. They are those of one
seed, on the held-out images: first of the last weights, then of their average.
""".strip()
AT_EQUAL_RATES: Final = """
The filter that the theorem predicts to be the best of those that were trained is the best in {right} of {settings} settings
by the last weights, and in {right_of_average} by their average. Where it predicts that `first-order-v1` gains, its accuracy
at the same rate is {gained} points from that without a filter; where it predicts a loss, {lost} points (mean and range).

One reason is that the weights add up all steps. A filter spreads the noise of one step over the next ones, but does not
change its sum ([more](../../docs/method/filters.md#shaping-the-noise)). `first-order-v1` remembers some 10 steps, and these
runs have 2,250 or 2,750: noise, or signal, that a single step has less of is almost all there some steps later.
""".strip()
ANSWERS: Final = f"""
Each difference is of test accuracies in points, paired by the seed, with a 95 % interval. The averages are of the same runs,
whose rates were chosen by the last weights. The usual conditions are {USUAL}.

| task | conditions | difference | seeds | of the last weights | of their averages |
|---|---|---|---|---|---|
""".strip()
EDGE: Final = """
## At the edge of stability

In a direction in which the loss has curvature λ, SGD with learning rate η is stable up to a limit of ηλ. At this limit the
weights oscillate. Limit and period follow from the filter's coefficients alone (`doppler_hf.filters.stability_limit`).
Without privacy and with all examples in each step, networks are known to train at this limit
([Cohen et al. 2021](https://arxiv.org/abs/2103.00065)). The last columns have the period at which the signal has most power,
in the run with the best rate.
""".strip()
AFTER_EDGE: Final = """
Where the limit is low, the predicted period was seen: without a filter, with `first-order-v1` and with `second-order`. With
`momentum` and `first-order-v2`, which bear several times as large rates, there is no such oscillation.

Without a filter the gradient turns around at every step, and a low-pass filter would remove this. But with such a filter
training has an oscillation of its own, which is slow enough to pass. It raises the signal per noise behind the filter,
though it brings the weights no further. On the perceptron, `second-order` has the most signal per noise and the lowest
accuracy.
""".strip()
FURTHER: Final = """
## What else raises accuracy

All runs have 50 epochs at ε = 8 without public data. The first lines are of the table of methods, with Poisson sampling and
a constant rate that was searched. *ours* has the package's defaults: random allocation, automatic clipping, the noise's
shape and the filter by `auto`, and no learning rate given. The schedule is a cosine. *4 views* are four moved and mirrored
versions of each image ([how](../../docs/guides/images.md#several-views-of-an-image)). *Average* is that of the weights.
Test accuracy is in %, ± the standard error over seeds.
""".strip()
SPECTRUM: Final = Signal.name
AVERAGE: Final = "test_of_average"
SIGNAL: Final = """
## How to read the tables

A task has two kinds of tables. The first kind compares methods. The second kind, *what the gradient says*, describes runs of
DPSGD, to compare the theory with what was found:

- *signal* is the power of the mean clipped gradient over all training images, in units of the power of the added noise.
  *draws* is the power of the noise that comes from the random choice of a batch.
- *ρ₁, ρ₁₀* are the signal's autocorrelation at lags of 1 and 10 steps. *Released* is the signal's power and autocovariance
  at lag 1, as estimated from the private gradients alone.
- The last columns have the gain that the theorem predicts for each filter, (Σ κ_τ ρ_τ)²/Σ κ_τ². It is 1 without a filter.
- The last table of a task has the signal of the runs with each filter. A filter changes the path of the weights, and with it
  the signal, so what DPSGD's signal predicts need not hold.
- ε = ∞ is a run without noise, in units of the mean square of its own gradients.
""".strip()


def write_page(results: Results, path: Path) -> None:
    """Write the page of the results that there are."""
    parts = [TITLE, FIRST_PART.format(date=results.date), *_answers(results), *_where_it_is_low_pass(results)]
    parts += [*_at_the_edge(results), *_what_else(results), *_missing(results), SIGNAL]
    for task in TASKS:
        parts += [*_tables(task, results), *_theory(task, results)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _answers(results: Results) -> Iterator[str]:
    """Yield what the filters gained on the test set, for each comparison that is whole."""
    rows: list[str] = []
    beyond = 0
    for task in TASKS:
        for terms, searches in _searches_by_terms(task, results).items():
            last, average = (
                {search.line.method: tests_of(search, results, of=of) for search in searches} for of in ("test", AVERAGE)
            )
            for name in last:
                none, _, momentum = family_of(name)
                for base in (none, momentum) if name.startswith("LP-") else (none,):
                    found = [paired for each in (last, average) if (paired := _paired(each, name, base)) is not None]
                    if not found:
                        continue
                    beyond += any(low > 0 or high < 0 for low, high in map(interval, found))
                    rows.append(
                        f"| {task} | {_conditions(terms) if terms else 'usual'} | {name} − {base} | {len(found[0])} | "
                        f"{' | '.join(map(difference, found))} |"
                    )
    yield "## What was found\n\n" + ("\n".join([ANSWERS, *rows]) if rows else "No comparison is finished.")
    if rows:
        yield f"Of these {len(rows)} differences, {beyond or 'none'} {'is' if beyond <= 1 else 'are'} beyond the error."


def _what_else(results: Results) -> Iterator[str]:
    """Yield test accuracies of what may raise them beside a filter, for the tasks that have such runs."""
    for task in TASKS:
        groups: dict[str, list[Cell]] = {}
        for cell in further_cells(task):
            views = f", {cell.views} views" if cell.views > 1 else ""
            groups.setdefault(f"{cell.method}, B = {cell.batch_size:,}{views}", []).append(cell)
        ours = {name: _reported(cells, results) for name, cells in groups.items()}
        if not any(ours.values()):
            continue
        searches = {method: search_of(Line(task, method, is_reported=True), results) for method in METHODS}
        rows = {
            name: _reported(reported_cells(search), results) for name, search in searches.items() if search.best is not None
        }
        lines = ["| method | seeds | last weights | average |", "|---|---|---|---|"]
        for name, found in (rows | ours).items():
            if found:
                last, average = ({row["seed"]: 100 * row[of] for row in found} for of in ("test", AVERAGE))
                lines.append(f"| {name} | {len(found)} | {_mean(last)} | {_mean(average)} |")
        yield FURTHER
        yield f"**{task}**\n\n" + "\n".join(lines)


def _reported(cells: Sequence[Cell], results: Results) -> list[dict[str, Any]]:
    return [row for cell in cells if (row := results.get(cell)) is not None]


def _where_it_is_low_pass(results: Results) -> Iterator[str]:
    """Yield the signal's autocorrelation at every rate of DPSGD, and what the filters did at the same rate."""
    filters = {terms.low_pass_filter: name for name, terms in METHODS.items() if terms.base == "sgd"}
    tables = {task: _at_equal_rates(task, results, filters) for task in TASKS}
    best = [max(runs, key=lambda run: run["none"]["held_out"])["none"] for runs in tables.values() if runs]
    if not best:
        return
    turning = sum(signal_of(row)[1] < 0 for row in best)
    yield "## Where is the gradient low-pass?\n\n" + LOW_PASS.format(turning=turning, tasks=len(best))
    rows = [
        "| task | C, rate | ρ₁ | predicted gain of first-order-v1 | " + " | ".join(FILTERS) + " |",
        "|---" * (4 + len(FILTERS)) + "|",
    ]
    for task, runs in tables.items():
        for run in runs:
            signal, none = signal_of(run["none"]), run["none"]
            accuracies = (f"{_percent(run[name])}, {_of_average(run[name])}" if name in run else "–" for name in FILTERS)
            rows.append(
                f"| {task} | {none['clip_norm']:g}, {none['learning_rate']:g} | {signal[1] / signal[0]:.2f} | "
                f"{predicted_gain(PAPER_FILTERS['first-order-v1'], signal):.2f} | {' | '.join(accuracies)} |"
            )
    yield "\n".join(rows)
    compared = [run for runs in tables.values() for run in runs if len(run) > 1]
    if compared:
        yield AT_EQUAL_RATES.format(settings=len(compared), **_found_at_equal_rates(compared))


def _at_equal_rates(task: str, results: Results, filters: Mapping[str, str]) -> list[dict[str, dict[str, Any]]]:
    """Return filter → row of the runs at the rates of DPSGD under the usual conditions, sorted by C times the rate."""
    usual = Line(task, SGD_LINES[0]).cell(None, clip_norm=1.0)
    found: dict[tuple[float, float], dict[str, dict[str, Any]]] = {}
    for row in results.rows(task):
        if row["held_out"] is None or any(row[name] != getattr(usual, name) for name in (*TERMS, "seed")):
            continue
        for name, method in filters.items():
            if row["method"] == method:
                found.setdefault((row["clip_norm"], row["learning_rate"]), {})[name] = row
    with_theory = [runs for runs in found.values() if SPECTRUM in runs.get("none", {})]
    return sorted(with_theory, key=lambda runs: (_step_length(runs["none"]), runs["none"]["clip_norm"]))


def _found_at_equal_rates(compared: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, str | int]:
    """Return in how many settings the predicted filter is the best, and what it does where it should gain or lose."""
    right = right_of_average = 0
    differences: dict[bool, list[float]] = {True: [], False: []}
    for run in compared:
        signal = signal_of(run["none"])
        gains = {name: predicted_gain(PAPER_FILTERS[name], signal) for name in run}
        predicted = max(gains, key=gains.__getitem__)
        right += run[predicted]["held_out"] == max(row["held_out"] for row in run.values())
        right_of_average += run[predicted]["held_out_of_average"] == max(row["held_out_of_average"] for row in run.values())
        if (filtered := run.get("first-order-v1")) is not None:
            gain = 100 * (filtered["held_out"] - run["none"]["held_out"])
            differences[gains["first-order-v1"] > 1].append(gain)
    said = {
        gains: f"{np.mean(values):+.1f} ({min(values):+.1f} to {max(values):+.1f})" if values else "–"
        for gains, values in differences.items()
    }
    return {"right": right, "right_of_average": right_of_average, "gained": said[True], "lost": said[False]}


def _at_the_edge(results: Results) -> Iterator[str]:
    """Yield the largest stable rate of each filter, and the period of the signal at its best rate, by task."""
    found = {task: _best_runs(task, results) for task in TASKS}
    tasks = [task for task, rows in found.items() if rows]
    if not tasks:
        return
    lines = [f"| filter | largest ηλ | period there, steps | {' | '.join(tasks)} |", "|---" * (3 + len(tasks)) + "|"]
    for name, low_pass_filter in PAPER_FILTERS.items():
        limit = stability_limit(low_pass_filter)
        periods = (_period(found[task][name]) if name in found[task] else "–" for task in tasks)
        lines.append(f"| {name} | {limit.x:.3g} | {limit.period:.1f} | {' | '.join(periods)} |")
    yield EDGE
    yield "\n".join(lines)
    if any("first-order-v1" in rows for rows in found.values()):
        yield AFTER_EDGE


def _period(row: dict[str, Any]) -> str:
    period = peak_period(signal_of(row))
    return f"{period:.1f}" if math.isfinite(period) else "slow"


def _best_runs(task: str, results: Results) -> dict[str, dict[str, Any]]:
    """Return filter → run of SGD at its best rate under the usual conditions, of those that recorded their signal."""
    runs = {}
    for method, terms in METHODS.items():
        search = search_of(Line(task, method), results)
        if terms.base == "sgd" and search.best is not None and SPECTRUM in search.rows[search.best]:
            runs[terms.low_pass_filter] = search.rows[search.best]
    return runs


def _step_length(row: dict[str, Any]) -> float:
    """Return C times the learning rate, the length of the step that one record makes, but for B."""
    return float(row["clip_norm"] * row["learning_rate"])


def _missing(results: Results) -> Iterator[str]:
    """Yield a table of how much of the study there is."""
    rows = [
        "| task | trainings | hours | methods whose best rate is known | methods that were run on the test set |",
        "|---|---|---|---|---|",
    ]
    for task in TASKS:
        searches = [search_of(line, results) for lines in lines_of(task) for line in lines]
        reported = [search for search in searches if search.line.is_reported]
        whole = [search for search in reported if (cells := reported_cells(search)) and all(map(results.get, cells))]
        found = sum(search.best is not None for search in searches)
        number = sum(cell.task == task for cell in results)
        rows.append(
            f"| {task} | {number} | {results.seconds(task) / 3600:.1f} | {found} of {len(searches)} | "
            f"{len(whole)} of {len(reported)} |"
        )
    yield "## How much there is\n\n" + "\n".join(rows)


def _searches_by_terms(task: str, results: Results) -> dict[tuple[tuple[str, Any], ...], list[Search]]:
    """Return the searches of a task that were begun, by what they differ in from the usual conditions."""
    by_terms: dict[tuple[tuple[str, Any], ...], list[Search]] = {}
    for lines in lines_of(task):
        for line in lines:
            if (search := search_of(line, results)).rows:
                by_terms.setdefault(line.terms, []).append(search)
    return by_terms


def _conditions(terms: tuple[tuple[str, Any], ...]) -> str:
    return ", ".join(TERMS[name](value) for name, value in terms) if terms else USUAL


def _tables(task: str, results: Results) -> Iterator[str]:
    for terms, searches in _searches_by_terms(task, results).items():
        yield f"## {task}: {_conditions(terms)}, C = {searches[0].clip_norm:g}"
        yield _table(searches, results)


def _table(searches: Sequence[Search], results: Results) -> str:
    rows = [
        "| method | rates tried: held-out accuracy, % | best rate | average | test, % | minus no filter | minus momentum |",
        "|---|---|---|---|---|---|---|",
    ]
    reported = {search.line.method: tests_of(search, results, of="test") for search in searches}
    for search in searches:
        name, found = search.line.method, search.rows
        tried = "; ".join(f"{row['learning_rate']:g}: {_percent(row)}" for _, row in sorted(found.items()))
        best = found.get(search.best) if search.best is not None else None
        averages = [row["held_out_of_average"] for row in found.values() if row["held_out"] is not None]
        base, _, momentum = family_of(name)
        rows.append(
            f"| {name} | {tried} | {'still searched' if best is None else format(best['learning_rate'], 'g')} | "
            f"{100 * max(averages):.1f} | {_mean(reported[name])} | {_minus(reported, name, base)} | "
            f"{_minus(reported, name, momentum)} |"
            if averages
            else f"| {name} | {tried} | still searched | – | – | – | – |"
        )
    return "\n".join(rows)


def _percent(row: dict[str, Any]) -> str:
    return "stopped" if row["held_out"] is None else f"{100 * row['held_out']:.1f}"


def _of_average(row: dict[str, Any]) -> str:
    return f"{100 * row['held_out_of_average']:.1f}"


def tests_of(search: Search, results: Results, *, of: str) -> dict[int, float]:
    """Return the test accuracy in % by seed, of those seeds that were run."""
    return {row["seed"]: 100 * row[of] for row in _reported(reported_cells(search), results)}


def _mean(tests: dict[int, float]) -> str:
    if not tests:
        return "–"
    values = np.array([*tests.values()])
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{error}"


def _minus(reported: dict[str, dict[int, float]], name: str, other: str) -> str:
    """Write the paired difference from another method."""
    paired = _paired(reported, name, other)
    return "–" if paired is None else difference(paired)


def _paired(reported: dict[str, dict[int, float]], name: str, other: str) -> np.ndarray | None:
    """Return the difference from another method by seed; None if fewer than two seeds have both."""
    mine, theirs = reported[name], reported.get(other, {})
    seeds = sorted(mine.keys() & theirs.keys())
    return None if name == other or len(seeds) < 2 else np.array([mine[seed] - theirs[seed] for seed in seeds])


def signal_of(row: dict[str, Any]) -> np.ndarray:
    """Return the autocorrelation of a run's signal in units of the noise, without the noise of the draws."""
    found = np.array(row[SPECTRUM]["autocorrelation"])
    # Where all of lag 0 is the noise of draws, by the error of the estimate, the next lag takes its place.
    found[0] = max(found[0] - np.mean(row[SPECTRUM]["of_draws"]), abs(found[1]))
    return found


def _theory(task: str, results: Results) -> Iterator[str]:
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
            f"{_percent(row)} | {signal[0]:.4f}, {np.mean(row[SPECTRUM]['of_draws']):.4f} | {rho[1]:.2f}, {rho[10]:.2f} | "
            f"{'–' if released is None else f'{released[0]:.4f}, {released[1]:.4f}'} | {gains} |"
        )
    yield f"### {task}: what the gradient says"
    yield "\n".join(rows)
    yield from _prediction(task, results)


def _place(row: dict[str, Any]) -> tuple[float, int, str, float, float]:
    """Return −ε, B, schedule, C and rate, in whose order the runs stand."""
    epsilon = math.inf if row["epsilon"] is None else row["epsilon"]
    return -epsilon, row["batch_size"], row["schedule"], row["clip_norm"], row["learning_rate"]


def _prediction(task: str, results: Results) -> Iterator[str]:
    """Yield the signal per noise with each filter at its own best rate, and whether the predicted best is the best."""
    found: dict[str, tuple[float, str]] = {}
    predicted: dict[str, float] = {}
    for name, row in _best_runs(task, results).items():
        if name not in FILTERS:
            continue
        signal, used = signal_of(row), PAPER_FILTERS[name]
        after = power_after(used, signal) / noise_gain(used)
        rho = ", ".join(f"{signal[lag] / signal[0]:.2f}" for lag in (1, 5, 10))
        found[name] = row["held_out"], f"{signal[0]:.4f} → {after:.4f} | {rho}"
        if name == "none":
            predicted = {name: predicted_gain(PAPER_FILTERS[name], signal) for name in FILTERS}
    if not predicted:
        return
    lines = ["| filter | signal per noise at its best rate, before → after the filter | ρ₁, ρ₅, ρ₁₀ | held out, % |"]
    lines += ["|---|---|---|---|", *(f"| {name} | {said} | {100 * score:.1f} |" for name, (score, said) in found.items())]
    yield "\n".join(lines)
    best = _named(max(predicted, key=lambda name: predicted[name]))
    yield f"From DPSGD's run at its best rate, the theorem predicts that {best} is best. " + (
        f"On the held-out images {_named(max(found, key=lambda name: found[name][0]))} is best."
        if len(found) == len(FILTERS)
        else "The runs with the other filters are not finished."
    )


def _named(low_pass_filter: str) -> str:
    return "training without a filter" if low_pass_filter == "none" else f"the filter {low_pass_filter}"
