"""The page of all runs: every search and its tests, what the gradient says in them, and what is missing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scripts.regime.results import Results
from scripts.regime.search import (
    Search,
    family_of,
    lines_of,
    reported_cells,
    search_of,
    searches_by_terms,
    tests_of,
    written_change,
    written_mean,
    written_terms,
)
from scripts.regime.tasks import TASKS
from scripts.regime.theory import percent, what_the_gradient_says

TITLE: Final = "# Which runs has the study of the paper's regime?"
FIRST_PART: Final = """
- **Command:** `python -m scripts.reproduce paper-regime --page` writes this page from
  [paper-regime.jsonl](paper-regime.jsonl), which has a line for each training
- **Seeds, hardware, date:** as on the [page of the results](paper-regime.md), which also says what the names of tasks and
  methods mean; {date}

**{trainings} trainings, of {hours:.0f} hours,** are in the tables below.
""".strip()
MISSING: Final = """
## How much there is

A search finds the best rate of one method under one set of conditions. Hours are of a CPU that was busy with other programs:
a run takes 2 to 4 minutes on the perceptron when nothing else runs, 7 to 15 on `mnist` and `cifar10-half`, and 40 to 75 on
`cifar10`.
""".strip()
SIGNAL: Final = """
## How to read the further tables

The first table of a task compares methods. *Average* is the held-out accuracy of the averaged weights at the rate that is
best for them, and *test* the mean over seeds, ± the standard error. *Minus* are paired differences in points with 95 %
intervals.

*What the gradient says* describes the runs of DPSGD. The *signal* is the mean clipped gradient before noise is added. Its
power, and that of the *draws*, which is the noise of the random choice of a batch, are in units of the power of the noise
that is added. For ε = ∞, without such noise, the unit is the mean square of the gradients. ρ₁ and ρ₁₀ are the signal's
correlation with itself 1 and 10 steps before: 1 means the same direction, −1 the opposite one. *Released* is what the noisy
gradients alone let one estimate: the power of signal and draws, and the covariance at lag 1. Where the noise is much larger
than the signal the estimate is mostly error, and may be negative. The last columns have the ratio of each filter. The last
table of a task has the signal of the runs with each filter, which changes the path of the weights and with it the signal.
""".strip()


def write_runs_page(results: Results, path: Path) -> None:
    """Write the page of all runs."""
    hours = sum(results.seconds(task) for task in TASKS) / 3600
    first = FIRST_PART.format(date=results.date, trainings=sum(1 for _ in results), hours=hours)
    parts = [TITLE, first, *_missing(results), SIGNAL]
    for task in TASKS:
        parts += [*_tables(task, results), *what_the_gradient_says(task, results)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _missing(results: Results) -> Iterator[str]:
    """Yield a table of how much of the study there is."""
    rows = [
        "| task | trainings | hours | finished searches | finished on the test set |",
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
    yield MISSING
    yield "\n".join(rows)


def _tables(task: str, results: Results) -> Iterator[str]:
    for terms, searches in searches_by_terms(task, results).items():
        yield f"## {task}: {written_terms(terms)}, C = {searches[0].clip_norm:g}"
        yield _table(searches, results)


def _table(searches: Sequence[Search], results: Results) -> str:
    rows = [
        "| method | rates tried: held-out accuracy, % | best rate | average | test, % | minus no filter | minus momentum |",
        "|---|---|---|---|---|---|---|",
    ]
    reported = {search.line.method: tests_of(search, results, of="test") for search in searches}
    for search in searches:
        name, found = search.line.method, search.rows
        tried = "; ".join(f"{row['learning_rate']:g}: {percent(row)}" for _, row in sorted(found.items()))
        best = found.get(search.best) if search.best is not None else None
        averages = [row["held_out_of_average"] for row in found.values() if row["held_out"] is not None]
        base, _, momentum = family_of(name)
        rows.append(
            f"| {name} | {tried} | {'still searched' if best is None else format(best['learning_rate'], 'g')} | "
            f"{100 * max(averages):.1f} | {written_mean(reported[name])} | {written_change(reported, name, base)} | "
            f"{written_change(reported, name, momentum)} |"
            if averages
            else f"| {name} | {tried} | still searched | – | – | – | – |"
        )
    return "\n".join(rows)
