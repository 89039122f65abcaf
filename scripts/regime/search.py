"""Which cell comes next: a line of the table is a search for the best rate, and the lines that decide are filled first.

A search climbs: from the first rate of its grid it goes to the side that is better until the best has been tried on both
sides, so that no best rate is at an end of what was tried. SGD's rates are a factor of 2 apart and Adam's a factor of √10,
as in the paper's grids, but go on beyond their ends. Rates are compared by the held-out accuracy of one seed at the end of
the run. A rate above a better one may be stopped early where it is hopeless (`HopelessRun`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from scripts.regime.cells import METHODS, POINTS, Cell, HopelessRun
from scripts.regime.results import Results
from scripts.regime.tasks import TASKS
from scripts.studies.tuning import difference

SGD, ADAM = "sgd", "adam"
# The largest rate of the paper's grid for SGD and the one between for Adam, and the grids' factors.
FIRST_RATE: Final[Mapping[str, float]] = {SGD: 0.8, ADAM: 1e-3}
FACTOR: Final[Mapping[str, float]] = {SGD: 2.0, ADAM: 10**0.5}
# The places of the rates 0.1, 0.4 and 0.8, which is the largest of the paper's grid.
PAPERS_PLACES: Final = (-3, -1, 0)
TUNING_SEED: Final = 100
# What runs have in common that differ in the filter alone.
_ALIKE: Final = ("epsilon", "batch_size", "schedule", "clipping", "epochs", "sampling", "seed")
# Clip norms that are compared once for each task, with DPSGD at rates that keep rate times norm.
CLIP_NORMS: Final = (1.0, 0.25, 4.0)


@dataclass(frozen=True)
class Line:
    """A line of the table: a method under some conditions, whose rate is searched.

    Attributes:
        terms: Fields of `Cell` but the rate.
        after: The method, under the same conditions, at whose best rate the search begins.
        is_reported: Whether the best rate is also run with the seeds that are reported.
    """

    task: str
    method: str
    terms: tuple[tuple[str, Any], ...] = ()
    after: str | None = None
    is_reported: bool = False

    def cell(self, rate: float | None, *, clip_norm: float, **more: Any) -> Cell:
        """Return the cell of a rate, the search's by default."""
        return Cell(
            self.task, self.method, rate, **({"clip_norm": clip_norm, "seed": TUNING_SEED} | dict(self.terms) | more)
        )

    @property
    def kind(self) -> str:
        """Whose grid it has."""
        return SGD if METHODS[self.method].base == "sgd" else ADAM


def rate_at(kind: str, place: int) -> float:
    """Return the rate of a place on a grid, 0 for the first one that is tried, to three digits."""
    return float(f"{FIRST_RATE[kind] * FACTOR[kind] ** place:.3g}")


def next_place(scores: Mapping[int, float], *, first: int) -> int | None:
    """Return the next place to try of a climb, or None where the best has been tried on both sides.

    Args:
        scores: Place → score, the more the better, of those that were tried.
        first: Where it begins if nothing was tried.
    """
    if not scores:
        return first
    best = max(scores, key=lambda place: (scores[place], -abs(place - first)))
    return next((place for place in (best + 1, best - 1) if place not in scores), None)


class Search:
    """The search of one line in the results that there are."""

    def __init__(self, line: Line, results: Results, *, clip_norm: float) -> None:
        self.line, self._results, self.clip_norm = line, results, clip_norm

    def _row(self, place: int) -> dict[str, Any] | None:
        return self._results.get(self.cell(place))

    def cell(self, place: int, **more: Any) -> Cell:
        """Return the cell of a place on the grid."""
        # With another clip norm, at the same product of rate and norm.
        rate = rate_at(self.line.kind, place) / (self.clip_norm if self.line.kind == SGD else 1.0)
        return self.line.cell(rate, clip_norm=self.clip_norm, **more)

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        """Place → result, of those that were tried."""
        return {place: row for place in range(-12, 13) if (row := self._row(place)) is not None}

    @property
    def scores(self) -> dict[int, float]:
        """Place → held-out accuracy, −1 for runs that were stopped."""
        return {place: -1.0 if row["held_out"] is None else row["held_out"] for place, row in self.rows.items()}

    def next_place(self) -> int | None:
        """Return the next place to try, or None where the line is complete."""
        return next_place(self.scores, first=self._first())

    @property
    def best(self) -> int | None:
        """The best place, or None while the search goes on."""
        scores = self.scores
        return None if not scores or self.next_place() is not None else max(scores, key=scores.__getitem__)

    def _first(self) -> int:
        """Return where the search begins: at the best rate of a line that is like this one, if there is one."""
        line = self.line
        like = [dataclasses.replace(line, method=line.after, after=None)] if line.after is not None else []
        like += [dataclasses.replace(each, terms=()) for each in (line, *like) if line.terms]
        for other in like:
            if scores := Search(other, self._results, clip_norm=self.clip_norm).scores:
                return max(scores, key=scores.__getitem__)
        return 0

    def hopeless(self, place: int) -> HopelessRun | None:
        """Return against what a rate is measured while it runs: the best one below it."""
        below = [row for other, row in self.rows.items() if other < place and row["held_out"] is not None]
        if not below or dict(self.line.terms).get("schedule", "constant") != "constant":
            return None
        best = max(below, key=lambda row: row["held_out"])
        return HopelessRun(tuple(best["curve"])) if len(best["curve"]) == POINTS else None


def best_clip_norm(task: str, results: Results, *, clipping: str = "vanilla") -> float | None:
    """Return the clip norm of a task, by DPSGD at ε = 8 and B = 1,000; None while it is being searched.

    Automatic clipping brings all gradients to C, which then only multiplies the rate.
    """
    first = Search(Line(task, SGD_LINES[0]), results, clip_norm=1.0)
    if clipping != "vanilla":
        return 1.0
    place = first.best
    if place is None:
        return None
    found = {norm: Search(first.line, results, clip_norm=norm).rows.get(place) for norm in CLIP_NORMS}
    if any(row is None for row in found.values()):
        return None
    return max(found, key=lambda norm: (found[norm] or {})["held_out"] or -1.0)


def next_cell(task: str, groups: Sequence[Sequence[Line]], results: Results) -> tuple[Cell, HopelessRun | None] | None:
    """Return the next cell of a task, with what may stop it; None where its table is full."""
    return next(_cells(task, groups, results), None)


def _cells(task: str, groups: Sequence[Sequence[Line]], results: Results) -> Iterator[tuple[Cell, HopelessRun | None]]:
    """Yield cells that can be run now, the first one first."""
    # C is chosen before the other methods are trained: with another C each of them would need a search of its own again.
    first = Search(Line(task, SGD_LINES[0]), results, clip_norm=1.0)
    if (place := first.next_place()) is not None:
        yield first.cell(place), first.hopeless(place)
        return
    assert first.best is not None
    others = [Search(first.line, results, clip_norm=norm).cell(first.best) for norm in CLIP_NORMS]
    if missing := [cell for cell in others if results.get(cell) is None]:
        yield missing[0], None
        return
    for group, lines in enumerate(groups):
        if group == 1 and (cell := noiseless_cell(task, results)) is not None and results.get(cell) is None:
            yield cell, None
        if group == 1:
            yield from ((cell, None) for cell in further_cells(task) if results.get(cell) is None)
        if group == 2:
            yield from ((cell, None) for cell in papers_cells(task, results) if results.get(cell) is None)
        searches = [search_of(line, results) for line in lines]
        for search in searches:
            if (place := search.next_place()) is not None:
                yield search.cell(place), search.hopeless(place)
        for search in searches:
            yield from ((cell, None) for cell in reported_cells(search) if results.get(cell) is None)
        if group == 2:
            again = [cell for cells in repeated_cells(task, results).values() for cell in cells]
            again += [cell for cells in enlarged_cells(task, results).values() for cell in cells]
            yield from ((cell, None) for cell in again if results.get(cell) is None)


def search_of(line: Line, results: Results) -> Search:
    """Return the search of a line, at the clip norm of its task."""
    clip_norm = best_clip_norm(line.task, results, clipping=dict(line.terms).get("clipping", "vanilla"))
    return Search(line, results, clip_norm=1.0 if clip_norm is None else clip_norm)


def papers_cells(task: str, results: Results) -> list[Cell]:
    """Return DPSGD and LP-DPSGD at rates of the paper's grid, below those of the search: is the signal low-pass there?"""
    searches = [search_of(Line(task, method), results) for method in SGD_LINES[:2]]
    return [search.cell(place) for search in searches for place in PAPERS_PLACES]


def reported_seeds(task: str) -> range:
    """Return the seeds that are reported of a task, which are not those that chose the rates."""
    return range(TASKS[task].seeds)


def noiseless_cell(task: str, results: Results) -> Cell | None:
    """Return DPSGD without noise at the best rate with it: its gradients are the signal, clipped and of random batches."""
    search = search_of(Line(task, SGD_LINES[0]), results)
    return None if search.best is None else search.cell(search.best, epsilon=None)


def further_cells(task: str) -> list[Cell]:
    """Return what may raise accuracy beside a filter, with the package's own learning rate, which needs no search."""
    if task not in FURTHER_TASKS:
        return []
    usual = Cell(task, FURTHER[0], None, sampling="allocation", clipping="automatic", tests_once=True)
    changes: list[dict[str, Any]] = [
        {"method": method, "schedule": schedule} for schedule in ("constant", "linear", "cosine") for method in FURTHER
    ]
    changes += [{"batch_size": 5000}, {"views": 4}]
    return [dataclasses.replace(usual, **change, seed=seed) for change in changes for seed in reported_seeds(task)]


def reported_cells(search: Search) -> list[Cell]:
    """Return the cells of a complete line that are reported, at its best rate; none where none are."""
    if search.best is None or not search.line.is_reported:
        return []
    return [search.cell(search.best, seed=seed, tests_once=True) for seed in reported_seeds(search.line.task)]


def repeated_cells(task: str, results: Results) -> dict[str, list[Cell]]:
    """Return method → cells of new seeds, of what was found to gain among several comparisons, and of its base lines."""
    methods, seeds = REPEATED.get(task, ((), ()))
    searches = {name: search_of(Line(task, name, is_reported=True), results) for name in methods}
    return {
        name: [search.cell(search.best, seed=seed, tests_once=True) for seed in seeds]
        for name, search in searches.items()
        if search.best is not None
    }


def tested_places(search: Search, results: Results) -> list[int]:
    """Return the places whose rates have test results, the best one first."""
    places = [place for place in search.rows if tests_at(search, place, results)]
    return sorted(places, key=lambda place: (place != search.best, place))


def enlarged_cells(task: str, results: Results) -> dict[tuple[str, float], list[Cell]]:
    """Return (method, rate) → cells with larger images, at the rates that have test results on smaller images."""
    smaller, methods, seeds = ENLARGED.get(task, ("", (), ()))
    cells: dict[tuple[str, float], list[Cell]] = {}
    for name in methods:
        search = search_of(Line(smaller, name, is_reported=True), results)
        for place in tested_places(search, results):
            found = [dataclasses.replace(search.cell(place, seed=seed, tests_once=True), task=task) for seed in seeds]
            rate = found[0].learning_rate
            assert rate is not None, "the rate comes from a search"
            cells[name, rate] = found
    return cells


def reported_rows(cells: Sequence[Cell], results: Results) -> list[dict[str, Any]]:
    """Return the results of those cells that were trained."""
    return [row for cell in cells if (row := results.get(cell)) is not None]


def tests_of(search: Search, results: Results, *, of: str) -> dict[int, float]:
    """Return the test accuracy in % by seed, of those seeds that were run."""
    return {row["seed"]: 100 * row[of] for row in reported_rows(reported_cells(search), results)}


def tests_at(search: Search, place: int, results: Results) -> dict[int, float]:
    """Return the test accuracy in % by seed at a rate."""
    cells = [search.cell(place, seed=seed, tests_once=True) for seed in reported_seeds(search.line.task)]
    return {row["seed"]: 100 * row["test"] for row in reported_rows(cells, results)}


def runs_of_sgd(
    task: str, results: Results, *, terms: tuple[tuple[str, Any], ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield filter and result of the searches' runs of SGD under some conditions, the usual ones by default."""
    like = Line(task, SGD_LINES[0], terms).cell(None, clip_norm=1.0)
    for row in results.rows(task):
        method = METHODS[row["method"]]
        if method.base == "sgd" and all(row[name] == getattr(like, name) for name in _ALIKE):
            yield method.low_pass_filter, row


def paired_changes(reported: Mapping[str, dict[int, float]], name: str, other: str) -> np.ndarray | None:
    """Return how a method's accuracies differ from another's by seed; None if fewer than two seeds have both."""
    mine, theirs = reported[name], reported.get(other, {})
    seeds = sorted(mine.keys() & theirs.keys())
    return None if name == other or len(seeds) < 2 else np.array([mine[seed] - theirs[seed] for seed in seeds])


SGD_LINES: Final = ("DPSGD", "LP-DPSGD, first-order-v1", "DPSGD with momentum")
ADAM_LINES: Final = ("DPAdamBC, β₁ = 0", "LP-DPAdamBC, first-order-v1", "DPAdamBC, β₁ = 0.9")
GALORE_LINES: Final = ("DPGaLore, β₁ = 0", "LP-DPGaLore, first-order-v1", "DPGaLore, β₁ = 0.9")
# Whose networks have matrices that are worth a projection.
PROJECTED_TASKS: Final = ("mnist-perceptron",)
# Of these methods no rate is searched.
FURTHER: Final = ("ours, auto", "ours, Muon")
FURTHER_TASKS: Final = ("cifar10-half",)
# The best filter under the usual conditions, which is tried under the others, too.
BEST_FILTER: Final = "LP-DPSGD, first-order-v2"
MORE_SGD_LINES: Final = (BEST_FILTER, "LP-DPSGD, second-order")
# The filters of the paper's comparison of filters.
COMPARED_LINES: Final = tuple(f"LP-DPSGD, f{number}" for number in range(1, 7))
MORE_ADAM_LINES: Final = (
    "DPAdam, β₁ = 0", "DPAdam, β₁ = 0.9", "LP-DPAdamBC, first-order-v2", "LP-DPAdamBC, second-order"
)  # fmt: skip
# What was repeated with new seeds, because it was the best of several: task → methods, and seeds.
REPEATED: Final[Mapping[str, tuple[Sequence[str], Sequence[int]]]] = {
    "cifar10-half": (("DPSGD", "DPSGD with momentum", BEST_FILTER), range(5, 10)),
}
# What is trained with larger images at the rates found with smaller ones, since a search there would take days: task → the
# task that gives the rates, methods, and seeds.
ENLARGED: Final[Mapping[str, tuple[str, Sequence[str], Sequence[int]]]] = {
    "cifar10": ("cifar10-half", ("DPSGD", "DPSGD with momentum", BEST_FILTER), range(3)),
}
ALLOCATION: Final = ("sampling", "allocation")
CONDITIONS: Final = (
    (),
    (("schedule", "cosine"),),
    (("epsilon", 2.0),),
    (("batch_size", 5000),),
    (("clipping", "automatic"),),
    (ALLOCATION,),
    (("epsilon", 2.0), ("schedule", "cosine")),
    (("batch_size", 5000), ("schedule", "cosine")),
    (("epsilon", 2.0), ("batch_size", 5000)),
    (("epochs", 150),),
)
"""What differs from ε = 8, B = 1,000, a constant rate, vanilla clipping and Poisson sampling, in the order of its worth."""

USUAL: Final = "ε = 8, B = 1,000, constant rate, vanilla clipping, Poisson sampling"
_WRITTEN: Final[Mapping[str, Callable[[Any], str]]] = {
    "epsilon": lambda value: f"ε = {value:g}",
    "batch_size": lambda value: f"B = {value:,}",
    "schedule": lambda value: f"{value} schedule",
    "clipping": lambda value: f"{value} clipping",
    "epochs": lambda value: f"{value} epochs",
    "sampling": lambda value: f"sampling by {value}",
}


def written_terms(terms: tuple[tuple[str, Any], ...]) -> str:
    """Write in what conditions differ from the usual ones."""
    return ", ".join(_WRITTEN[name](value) for name, value in terms) if terms else USUAL


def family_of(method: str) -> tuple[str, str, str]:
    """Return the methods without a filter, with the paper's and with momentum that have a method's base optimizer."""
    if METHODS[method].is_projected:
        return GALORE_LINES
    return SGD_LINES if METHODS[method].base == "sgd" else ADAM_LINES


def lines_of(task: str) -> list[list[Line]]:
    """Return the lines of a task in groups, the ones that decide first; a group's rates are found before any is reported."""
    groups = [_group(task, methods, ()) for methods in (SGD_LINES, ADAM_LINES, MORE_SGD_LINES)]
    if task in PROJECTED_TASKS:
        groups.append(_group(task, GALORE_LINES, ()))
    groups.append([Line(task, "ours, auto", (ALLOCATION, ("schedule", "cosine")), is_reported=True)])
    groups.append(_group(task, MORE_ADAM_LINES, ()))
    groups.append(_group(task, COMPARED_LINES, ()))
    for terms in CONDITIONS[1:]:
        groups += [_group(task, methods, terms) for methods in ((*SGD_LINES, BEST_FILTER), ADAM_LINES)]
        more = (method for method in (*MORE_SGD_LINES, *MORE_ADAM_LINES) if method != BEST_FILTER)
        groups.append(_group(task, [*more], terms, is_reported=False))
    return groups


def _group(task: str, methods: Sequence[str], terms: tuple[tuple[str, Any], ...], *, is_reported: bool = True) -> list[Line]:
    lines = []
    for method in methods:
        base = family_of(method)[0]
        lines.append(Line(task, method, terms, None if method == base else base, is_reported))
    return lines


def searches_by_terms(task: str, results: Results) -> dict[tuple[tuple[str, Any], ...], list[Search]]:
    """Return the searches of a task that were begun, by what they differ in from the usual conditions."""
    by_terms: dict[tuple[tuple[str, Any], ...], list[Search]] = {}
    for lines in lines_of(task):
        for line in lines:
            if (search := search_of(line, results)).rows:
                by_terms.setdefault(line.terms, []).append(search)
    return by_terms


def written_mean(tests: dict[int, float]) -> str:
    """Write the mean over seeds, ± its standard error."""
    if not tests:
        return "–"
    values = np.array([*tests.values()])
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{error}"


def written_change(reported: dict[str, dict[int, float]], name: str, other: str) -> str:
    """Write the paired difference from another method."""
    paired = paired_changes(reported, name, other)
    return "–" if paired is None else difference(paired)
