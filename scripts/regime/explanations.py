"""What could explain the gains that the paper reports, as far as the runs that there are can say."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from scripts.regime.results import Results
from scripts.regime.search import (
    ADAM_LINES,
    CONDITIONS,
    SGD_LINES,
    Line,
    paired_changes,
    search_of,
    tests_of,
    written_terms,
)
from scripts.regime.tasks import TASKS
from scripts.regime.theory import points as points_of
from scripts.regime.theory import step_length
from scripts.studies.tuning import difference, interval

# The place of 0.8 on the grid, with which the paper's rates for SGD end. Its clip norm is not known: C·η is compared with
# it.
END_OF_GRID: Final = 0
LEAST_GAIN: Final = 3.0  # of those that the paper reports, in points
# The expected largest of so many independent standard normal numbers.
LARGEST_OF_80: Final = 2.427
LARGEST_OF_720: Final = 3.146
_WIDTH: Final = 125
EXPLANATIONS: Final = """
## What could explain the paper's gains?

The paper does not say of how many runs a figure is the mean, nor which rates were the best ones of each method. It says that
rates, batch sizes and epochs were chosen by the test accuracy. What could put a filter ahead without being its merit?
""".strip()
GRID: Final = """
**A grid of rates that ends too early?** Hardly, in batches of 1,000. The paper's rates for SGD end at 0.8. If it clips to
C = 1, this is below the best C·η of DPSGD here, which is {best}. But in single runs at C·η = 0.8, `first-order-v1` changes
the held-out accuracy by no more than {changes} points.
""".strip()
MOMENTUM: Final = """
**A baseline without momentum?** Then momentum would gain as much without the paper's filter. It changes the test accuracy by
{changes} points. {verdict}
""".strip()
CHANCE: Final = """
**Chance and choice?** With everything but the seed the same, test accuracies have a standard deviation of {scatter} points.
The paper's grids have 80 settings for each method, and nine filters. Were all alike, the best of nine times 80 runs would
be ahead of the best of 80 by {of_best} points in expectation, and ahead of the mean by {of_many}. So if the paper compares
best runs, chance explains less than a point. Against a baseline that is a mean, it could explain a gain near 3 points on
CIFAR-10, but none of 10.
""".strip()
NOT_SEEN: Final = """
**What was not looked at:** {unseen}, more than 50 epochs, and the paper's larger networks. The paper also shows its filter
with a schedule, and does not say if its comparisons have one.
""".strip()


def what_could_explain_the_papers_gains(results: Results) -> Iterator[str]:
    """Yield what the runs say of possible reasons, for the tasks that have reported runs."""
    tests = {task: _tests(task, (), results) for task in TASKS}
    scatters = {task: found for task in TASKS if (found := _scatter(tests[task])) is not None}
    if not scatters:
        return
    best = {task: f"{step_length(row):g}" for task in TASKS if (row := _best_of_dpsgd(task, results)) is not None}
    early = {task: points_of(change) for task in TASKS if (change := _change_at_the_end(task, results)) is not None}
    momentum, terms_seen = {}, set()
    for task in TASKS:
        for terms in CONDITIONS:
            of_terms = _tests(task, terms, results)
            for algorithm, (base, _, with_momentum) in {"SGD": SGD_LINES, "AdamBC": ADAM_LINES}.items():
                if (found := paired_changes(of_terms, with_momentum, base)) is not None:
                    momentum[", ".join([task, algorithm, *([written_terms(terms)] if terms else [])])] = found
                    terms_seen |= {*terms}
    points = []
    if best and early:
        points.append(GRID.format(best=_listed(best), changes=_listed(early)))
    if momentum:
        changes = _listed({name: difference(found) for name, found in momentum.items()})
        points.append(MOMENTUM.format(changes=changes, verdict=_verdict(momentum)))
    scatter = _listed({task: f"{found:.2f}" for task, found in scatters.items()})
    of_many = _listed({task: f"{LARGEST_OF_720 * found:.1f}" for task, found in scatters.items()})
    of_best = _listed({task: f"{(LARGEST_OF_720 - LARGEST_OF_80) * found:.1f}" for task, found in scatters.items()})
    batches = "batches of 500 and 2,000" if ("batch_size", 5000) in terms_seen else "batches of 500, 2,000 and 5,000"
    unseen = batches if ("epsilon", 2.0) in terms_seen else f"ε below 8, {batches}"
    points += [CHANCE.format(scatter=scatter, of_many=of_many, of_best=of_best), NOT_SEEN.format(unseen=unseen)]
    yield EXPLANATIONS
    yield "\n".join(
        textwrap.fill(f"- {' '.join(point.split())}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for point in points
    )


def _tests(task: str, terms: tuple[tuple[str, Any], ...], results: Results) -> dict[str, dict[int, float]]:
    """Return the test accuracies of a task in %: method → seed → accuracy."""
    return {
        name: tests_of(search_of(Line(task, name, terms, is_reported=True), results), results, of="test")
        for name in (*SGD_LINES, *ADAM_LINES)
    }


def _verdict(momentum: Mapping[str, np.ndarray]) -> str:
    """Say whether momentum gains as much as the paper reports of its filter."""
    enough = [name for name, found in momentum.items() if interval(found)[0] >= LEAST_GAIN]
    if enough:
        return f"So under some conditions it gains as much as the paper reports of its filter: {'; '.join(enough)}."
    excluded = all(interval(found)[1] < LEAST_GAIN for found in momentum.values())
    return "No interval reaches the 3 points of the paper." if excluded else "Not all intervals exclude 3 points."


def _listed(found: Mapping[str, str]) -> str:
    *others, last = [f"{value} ({name})" for name, value in found.items()]
    return f"{', '.join(others)} and {last}" if others else last


def _best_of_dpsgd(task: str, results: Results) -> dict[str, Any] | None:
    search = search_of(Line(task, SGD_LINES[0]), results)
    return None if search.best is None else search.rows[search.best]


def _change_at_the_end(task: str, results: Results) -> float | None:
    """Return by how many points the paper's filter changes the held-out accuracy at the end of the paper's grid."""
    found = [search_of(Line(task, name), results).rows.get(END_OF_GRID, {}).get("held_out") for name in SGD_LINES[:2]]
    return None if None in found else 100 * float(found[1] - found[0])


def _scatter(tests: Mapping[str, Mapping[int, float]]) -> float | None:
    """Return the standard deviation over seeds of test accuracies in points, pooled over methods: name → by seed."""
    found = [np.array([*by_seed.values()]) for by_seed in tests.values() if len(by_seed) > 1]
    freedom = sum(len(each) - 1 for each in found)
    return float(np.sqrt(sum(each.var() * len(each) for each in found) / freedom)) if freedom else None
