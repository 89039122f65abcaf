"""The page of the results: what was found, and what the theory says of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.regime.cells import METHODS, Cell
from scripts.regime.equal_rates import accuracies_at_equal_rates
from scripts.regime.explanations import LEAST_GAIN, what_could_explain_the_papers_gains
from scripts.regime.results import Results
from scripts.regime.search import (
    ADAM_LINES,
    BEST_FILTER,
    GALORE_LINES,
    SGD_LINES,
    USUAL,
    Line,
    Search,
    enlarged_cells,
    family_of,
    further_cells,
    noiseless_cell,
    paired_changes,
    repeated_cells,
    reported_cells,
    reported_rows,
    search_of,
    searches_by_terms,
    tests_at,
    tests_of,
    written_change,
    written_mean,
    written_terms,
)
from scripts.regime.tasks import TASKS
from scripts.regime.theory import (
    percent,
    what_a_quadratic_says,
    whether_it_is_low_pass,
    whether_the_best_was_predicted,
)
from scripts.studies.tuning import difference, interval

TITLE: Final = "# Does the paper's filter gain in runs of the paper's length?"
ANSWER: Final = """
A *low-pass filter* averages the noisy gradients of several steps before the optimizer gets them. It costs no privacy. [The
paper of DOPPLER](https://arxiv.org/abs/2408.13460), below *the paper*, proposes nine such filters, and reports that they
gain 3 to 10 points when networks are trained from scratch. Momentum is the simplest low-pass filter. It is compared, too.

Here, small networks are trained from scratch for 50 epochs, the paper's fewest: `mnist-perceptron`, a perceptron for MNIST,
and `cifar10-half`, a CNN of five layers for images of CIFAR-10 with 16 × 16 pixels. *SGD* is DP-SGD without momentum. Where
nothing else is said, ε is 8, a batch has B = 1,000 records on average, and the learning rate is constant.

**{found} Leave `low_pass_filter` at `"auto"`,** which takes momentum that suits the run, or no filter
([which](../../docs/method/filters.md#what-auto-chooses)).

The study covers ε = {epsilons} and batches of {batches}. Of the paper's nine filters, {filters}. In [short runs at
ε = 3](paper.md) a filter gained 1.05 ± 0.15 points on the perceptron, but the rates there were chosen on the test records.
""".strip()
CHANGES: Final = (
    "This is the change of the test accuracy by each filter in points, with the learning rate tuned for each method. The "
    "95 % intervals cover the choice of the seed alone, and are not corrected for the number of comparisons. Even if no "
    "filter changed anything, at least one of {number} independent intervals would exclude 0 in {share:.0%} of such studies:"
)
OTHER_BASE: Final = (
    "**The gain of `{filter}` on `{task}` depends on the rate:** one run chose the rate of {base}, and against {base} at "
    "a rate of {rate} the change is {change} ({seeds} seeds)."
)
# Shown for each task that has tests in large batches.
LARGE_BATCHES: Final = (
    "**In batches of {batch:,}** on `{task}`, momentum changes the test accuracy by {momentum}, and `{filter}` by {change}. "
    "From momentum to this filter it changes by {apart}. The number of epochs is the same, so these runs have few steps, "
    "and a larger learning rate helps. Both filters [allow one](#at-which-rate-and-batch-does-a-filter-gain). {compared}"
)
AFTER_CHANGES: Final = (
    "At a constant rate, [averaging the weights](#what-averaging-gains) gains about as much as the best filter, with every "
    "filter and without one. At a constant rate the package's other defaults reach the accuracy of the best filter [without "
    "any search](#what-else-raises-accuracy)."
)
ROOMS: Final = (
    "**How much is there to gain?** At an unchanged learning rate, a filter can gain at most what all of the noise costs. A "
    "filter that allows a larger rate can gain more. These are single runs, whose difference has an error of about a point "
    "on CIFAR-10:"
)
# Shown for each task whose best run was made without noise, too.
ROOM: Final = (
    "`{task}`: all of the noise costs {cost:.1f} points. At its best rate, DPSGD reaches {noisy:.1f} % on held-out images, "
    "and {noiseless:.1f} % if the run is the same, with clipping, but without noise."
)
ALGORITHMS: Final = {"SGD": SGD_LINES, "AdamBC": ADAM_LINES, "GaLore": GALORE_LINES}
FIRST_PART: Final = """
- **Command:** `python -m scripts.reproduce paper-regime --data-dir DATA`; this page is written from
  [paper-regime.jsonl](paper-regime.jsonl), which has a line for each training. With `--curvature` the command measures the
  curvatures. [All runs](paper-regime-runs.md) are on a page of their own
- **Seeds, hardware, date:** seed 100 chooses the learning rates. Three to five other seeds are reported, as the tables say,
  and further ones of what was repeated. In this study a seed fixes initial weights, batches and noise, so that methods can
  be paired; the data are public. One thread of a busy CPU; {date}
""".strip()
SETTING: Final = """
## The runs

The tasks are

- `cifar10`: the CNN of five layers of [De et al. 2022](https://arxiv.org/abs/2204.13650) with a quarter of its channels, on
  CIFAR-10; `cifar10-half`: the same on images of 16 × 16 pixels; `cifar10-full`: that CNN with all channels
- `mnist`: the CNN of [Papernot et al. 2021](https://arxiv.org/abs/2007.14191) on MNIST; `mnist-perceptron`: a perceptron
  with tanh activations

All have 50 epochs and δ = N^−1.1. Images are not augmented. The test set has 5,000 of the 10,000 test images, those of
CIFAR-10 compressed as JPEG, so accuracies are not those of published work to the last digit. It is evaluated at the end of
the reported runs only. Learning rate η and clip norm C are chosen by the accuracy on 5,000 training images that are held
out. C is the best of 0.25, 1 and 4 for DPSGD, at equal C·η. The other methods of a task use the same, which may favour
DPSGD. In tasks whose C is not chosen yet, it is 1. η is doubled or halved, for Adam multiplied or divided by √10, until the
best rate has a worse rate on each side.

*LP* means that a [filter of the paper](../../docs/method/filters.md#which-filter) is used, and the name of the filter
follows. With β₁ = 0.9 Adam has its momentum, with β₁ = 0 it has none. GaLore has rank 16, a new projection every 50 steps,
and scale 1. With *vanilla* clipping a gradient is shortened to C if it is longer, with *automatic* clipping every gradient
gets the length C. The *last weights* are those at the end of a run. *Average* is an exponential average of the weights, as
De et al. have it, which costs no privacy. The other symbols are in [notation](../../docs/method/notation.md).
""".strip()
ANSWERS: Final = f"""
Each difference is of test accuracies in points, paired by the seed, with a 95 % interval. It covers the choice of the seed,
but not that of the rate or of the test images. The averages are of the same runs, whose rates were chosen by the last
weights. On `cifar10-half` two seeds were added after three had left intervals of up to ±5 points, so take the intervals as
nominal. Usual conditions are {USUAL}.

| task | conditions | difference | seeds | of the last weights | of their averages |
|---|---|---|---|---|---|
""".strip()
REPEATS: Final = """
`first-order-v2` was the best of several filters, so its lead may be chance. It was therefore repeated with new seeds, at the
same rates. *All* are these seeds and the earlier ones:

| task | difference | seeds | of the last weights | of their averages |
|---|---|---|---|---|
""".strip()
OTHER_RATES: Final = """
Rates are chosen by one seed, so another rate may be as good. Some were tested, too. A star marks a rate that is not the
chosen one. Beside a rate is the held-out accuracy in % by which it was compared.

| task | difference | rate of the first | rate of the second | seeds | of the last weights |
|---|---|---|---|---|---|
""".strip()
LARGER: Final = """
The same with larger images, at the rates above, since a search there would take days. The last columns have the difference
from DPSGD at the rate in their head, in points, paired by the seed.
""".strip()
AVERAGED: Final = """
## What averaging gains

This is the test accuracy in % of the same runs, ± the standard error over seeds, before and after the average took the place
of the last weights. The learning rate is constant. With a rate that falls to 0, averaging gained nothing in the few runs
that there are ([digits](digits.md#a-mean-of-the-weights), and the runs with a cosine below).
""".strip()
AVERAGES_TABLE: Final = """
| task | method | last weights | average | gain, paired, 95 % interval |
|---|---|---|---|---|
""".strip()
FURTHER: Final = """
## What else raises accuracy

All runs have 50 epochs at ε = 8 without public data. The lines without *ours* repeat results from above, with Poisson
sampling and a constant rate that was searched. Muon is an optimizer that makes the updates of matrices orthogonal. *ours*
has the package's defaults, but for the schedule, the batch and the optimizer that its line names: [random
allocation](../../docs/method/accounting.md) in place of Poisson sampling, automatic clipping, AdamBC, filter and noise shape
by `auto`, and no learning rate given. Here `auto` took momentum with noise that is correlated over 8 steps. So these lines
differ in several things at once, and have few seeds: they do not show what made the difference. With a linear schedule,
which is the package's default, or a cosine they are 1 to 3 points worse than at a constant rate. *Average* is that of the
weights. Test accuracy is in %, ± the standard error over seeds.
""".strip()
AVERAGE: Final = "test_of_average"


def write_page(results: Results, path: Path, *, curvatures: Sequence[dict[str, Any]] = ()) -> None:
    """Write the page of the results that there are, and of the curvatures that were measured."""
    parts = [TITLE, FIRST_PART.format(date=results.date), *_answer(results), SETTING, *_answers(results)]
    parts += [
        *_averages(results),
        *_what_else(results),
        *accuracies_at_equal_rates(results),
        *what_could_explain_the_papers_gains(results),
        *whether_the_best_was_predicted(results),
        *what_a_quadratic_says(results, curvatures),
        *whether_it_is_low_pass(results),
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _answer(results: Results) -> Iterator[str]:
    """Yield whether the paper's filters gain with each of the paper's algorithms, as far as it is known."""
    changes: list[str] = []
    intervals: dict[str, tuple[float, float]] = {}
    filters, epsilons, batches = dict[str, set[str]](), dict[str, None](), dict[str, None]()
    for task in TASKS:
        for terms, searches in searches_by_terms(task, results).items():
            reported = {search.line.method: tests_of(search, results, of="test") for search in searches}
            for algorithm, (base, *_) in ALGORITHMS.items():
                found = []
                for name in reported:
                    paired = paired_changes(reported, name, base) if name.startswith("LP-") else None
                    if family_of(name)[0] != base or paired is None:
                        continue
                    used = f"`{METHODS[name].low_pass_filter}`"
                    filters.setdefault(task, set()).add(used)
                    epsilons[f"{dict(terms).get('epsilon', 8):g}"] = None
                    batches[f"{dict(terms).get('batch_size', 1000):,}"] = None
                    of = f"{used} with {algorithm} on `{task}`"
                    intervals[of + (f" ({written_terms(terms)})" if terms else "")] = interval(paired)
                    found.append(f"{used} {difference(paired)}")
                if found:
                    under = f", {written_terms(terms)}" if terms else ""
                    changes.append(f"- `{task}`, {algorithm}{under}: {', '.join(found)}")
    if changes:
        tested = _and(
            f"{len(names)} {'has' if len(names) == 1 else 'have'} results on `{task}`" for task, names in filters.items()
        )
        yield ANSWER.format(found=_found(intervals), filters=tested, epsilons=_and(epsilons), batches=_and(batches))
        number = len(intervals)
        yield CHANGES.format(number=number, share=1 - 0.95**number) + "\n\n" + "\n".join(changes)
        yield from map(OTHER_BASE.format_map, _gains_against_other_rates(results))
        yield from _in_large_batches(results)
        yield AFTER_CHANGES
        if rooms := [room for task in TASKS if (room := _room(task, results))]:
            yield "\n\n".join([ROOMS, "\n".join(rooms)])


def _gains_against_other_rates(results: Results) -> Iterator[dict[str, str]]:
    """Yield what is left of each gain where the method without a filter was tested at another rate, too."""
    for task in TASKS:
        searches = {search.line.method: search for search in searches_by_terms(task, results).get((), [])}
        for name in searches:
            base = family_of(name)[0]
            tests = {each: tests_of(searches[each], results, of="test") for each in (name, base) if each in searches}
            gained = paired_changes(tests, name, base) if name.startswith("LP-") and base in tests else None
            if gained is None or interval(gained)[0] <= 0:
                continue
            for place in searches[base].rows:
                other = {name: tests[name], base: tests_at(searches[base], place, results)}
                paired = None if place == searches[base].best else paired_changes(other, name, base)
                if paired is not None:
                    yield {
                        "filter": METHODS[name].low_pass_filter,
                        "task": task,
                        "base": base,
                        "rate": f"{searches[base].rows[place]['learning_rate']:g}",
                        "change": difference(paired),
                        "seeds": str(len(paired)),
                    }


def _in_large_batches(results: Results) -> Iterator[str]:
    """Yield what the best filter and momentum change in large batches, and what small ones reach without a filter."""
    terms = (("batch_size", 5000),)
    for task in TASKS:
        base, _, momentum = SGD_LINES
        tests = {
            name: tests_of(search_of(Line(task, name, terms, is_reported=True), results), results, of="test")
            for name in (base, momentum, BEST_FILTER)
        }
        pairs = ((BEST_FILTER, base), (momentum, base), (BEST_FILTER, momentum))
        changes = [paired_changes(tests, name, other) for name, other in pairs]
        usual = tests_of(search_of(_reported(task, base), results), results, of="test")
        if any(change is None for change in changes) or not usual:
            continue
        of_filter, of_momentum, apart = (difference(change) for change in changes if change is not None)
        best = max(np.mean([*tests[name].values()]) for name in (BEST_FILTER, momentum))
        compared = (
            f"But such batches gain little: in batches of 1,000 and at the same ε, SGD without a filter reaches "
            f"{np.mean([*usual.values()]):.1f} %. Here momentum or this filter, the better of them, reaches {best:.1f} %."
        )
        yield LARGE_BATCHES.format(
            batch=dict(terms)["batch_size"],
            task=task,
            filter=METHODS[BEST_FILTER].low_pass_filter,
            change=of_filter,
            momentum=of_momentum,
            apart=apart,
            compared=compared,
        )


def _found(intervals: Mapping[str, tuple[float, float]]) -> str:
    """Say in which comparisons a filter gains, in how many it loses, and in how many the paper's gains are excluded."""
    gains = [name for name, (low, _) in intervals.items() if low > 0]
    losses = sum(high < 0 for _, high in intervals.values())
    excluded, number = sum(high < LEAST_GAIN for _, high in intervals.values()), len(intervals)
    if gains:
        found = f"In {len(gains)} of {number} comparisons with no filter, a filter of the paper gains: {_and(gains)}."
    else:
        found = f"In {number} comparisons with no filter, no gain of the paper's filters is shown."
    found += f" In {losses} a filter loses, at the learning rate that was chosen for it." if losses else ""
    return f"{found} In {excluded} a gain of {LEAST_GAIN:g} points is excluded."


def _and(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _room(task: str, results: Results) -> str:
    """Return how much a task's best run gains if it has no noise, '' where that was not run."""
    cell = noiseless_cell(task, results)
    noiseless = None if cell is None else results.get(cell)
    search = search_of(Line(task, SGD_LINES[0]), results)
    if noiseless is None or search.best is None:
        return ""
    with_noise, without = (100 * row["held_out"] for row in (search.rows[search.best], noiseless))
    return f"- {ROOM.format(task=task, noiseless=without, noisy=with_noise, cost=without - with_noise)}"


def _answers(results: Results) -> Iterator[str]:
    """Yield what the filters gained on the test set, for each comparison that is whole."""
    rows: list[str] = []
    beyond, widest = 0, 0.0
    for task in TASKS:
        for terms, searches in searches_by_terms(task, results).items():
            last, average = (
                {search.line.method: tests_of(search, results, of=of) for search in searches} for of in ("test", AVERAGE)
            )
            for name in last:
                none, _, momentum = family_of(name)
                for base in (none, momentum) if name.startswith("LP-") else (none,):
                    found = [paired for each in (last, average) if (paired := paired_changes(each, name, base)) is not None]
                    if not found:
                        continue
                    widest = max([widest, *((high - low) / 2 for low, high in map(interval, found) if low <= 0 <= high)])
                    beyond += sum(low > 0 or high < 0 for low, high in map(interval, found))
                    rows.append(
                        f"| {task} | {written_terms(terms) if terms else 'usual'} | {name} − {base} | {len(found[0])} | "
                        f"{' | '.join(map(difference, found))} |"
                    )
    yield "## What was found\n\n" + ("\n".join([ANSWERS, *rows]) if rows else "No comparison is finished.")
    if rows:
        counted = f"{2 * len(rows) - beyond} of these" if beyond else "All"
        yield (
            f"{counted} {2 * len(rows)} intervals contain 0. That does not show that there is no effect: the widest is "
            f"±{widest:.1f} points."
        )
    yield from _repeated(results)
    yield from _at_other_rates(results)
    yield from _with_larger_images(results)


def _repeated(results: Results) -> Iterator[str]:
    """Yield what a filter gains with new seeds, where it was repeated because it was the best of several."""
    rows = []
    for task in TASKS:
        new = {name: reported_rows(cells, results) for name, cells in repeated_cells(task, results).items()}
        earlier = {name: reported_rows(reported_cells(search_of(_reported(task, name), results)), results) for name in new}
        for name in new:
            none, _, momentum = family_of(name)
            for base in (none, momentum) if name.startswith("LP-") else (none,):
                for which, found in (("new", new), ("all", {each: new[each] + earlier[each] for each in new})):
                    tests = (
                        {each: {row["seed"]: 100 * row[of] for row in few} for each, few in found.items()}
                        for of in ("test", AVERAGE)
                    )
                    paired = [each for test in tests if (each := paired_changes(test, name, base)) is not None]
                    if paired:
                        count = f"{len(paired[0])} {which}"
                        rows.append(f"| {task} | {name} − {base} | {count} | {' | '.join(map(difference, paired))} |")
    if rows:
        yield "\n".join([REPEATS, *rows])


def _at_other_rates(results: Results) -> Iterator[str]:
    """Yield what the filters change where one of two methods has a rate that was not chosen, and was tested, too."""
    rows = []
    for task in TASKS:
        searches = {search.line.method: search for search in searches_by_terms(task, results).get((), [])}
        tests = {
            name: {place: tests_at(search, place, results) for place in search.rows}
            for name, search in searches.items()
            if search.best is not None
        }
        for name in tests:
            base = family_of(name)[0]
            if name == base or base not in tests:
                continue
            mine, theirs = searches[name], searches[base]
            places = [(place, theirs.best) for place in tests[name] if place != mine.best]
            places += [(mine.best, place) for place in tests[base] if place != theirs.best]
            for place, other in places:
                paired = paired_changes({name: tests[name][place], base: tests[base][other]}, name, base)
                if paired is not None:
                    rates = f"{_rate(mine, place)} | {_rate(theirs, other)}"
                    rows.append(f"| {task} | {name} − {base} | {rates} | {len(paired)} | {difference(paired)} |")
    if rows:
        yield "\n".join([OTHER_RATES, *rows])


def _with_larger_images(results: Results) -> Iterator[str]:
    """Yield the test accuracies of the runs with larger images, and how they differ from those without a filter."""
    for task in TASKS:
        found = {of: reported_rows(cells, results) for of, cells in enlarged_cells(task, results).items()}
        tests = {
            f"{name}, η = {rate:g}": {row["seed"]: 100 * row["test"] for row in rows}
            for (name, rate), rows in found.items()
            if rows
        }
        unfiltered = [each for each in tests if each.startswith(f"{SGD_LINES[0]},")]
        bases = [base for base in unfiltered if any(written_change(tests, name, base) != "–" for name in tests)]
        if not bases:
            continue
        lines = [
            f"| task | method | seeds | last weights | {' | '.join(f'minus {base}' for base in bases)} |",
            "|" + "---|" * (4 + len(bases)),
        ]
        lines += [
            f"| {task} | {name} | {len(test)} | {written_mean(test)} | "
            f"{' | '.join(written_change(tests, name, base) for base in bases)} |"
            for name, test in tests.items()
        ]
        yield LARGER
        yield "\n".join(lines)


def _rate(search: Search, place: int) -> str:
    row = search.rows[place]
    return f"{row['learning_rate']:g}{'' if place == search.best else '*'}: {percent(row)}"


def _reported(task: str, method: str) -> Line:
    return Line(task, method, is_reported=True)


def _averages(results: Results) -> Iterator[str]:
    """Yield what the average of the weights gains on the test set, at a constant rate."""
    rows: list[str] = []
    found = []
    for task in TASKS:
        gains = []
        for search in searches_by_terms(task, results).get((), []):
            last, average = (tests_of(search, results, of=of) for of in ("test", AVERAGE))
            if len(last) > 1:
                gains.append(np.array([average[seed] - last[seed] for seed in last]))
                method = search.line.method
                rows.append(
                    f"| {task} | {method} | {written_mean(last)} | {written_mean(average)} | {difference(gains[-1])} |"
                )
        if gains:
            sure = sum(interval(gain)[0] > 0 for gain in gains)
            means = [gain.mean() for gain in gains]
            found.append(
                f"- `{task}`: the average gains {min(means):.1f} to {max(means):.1f} points; {sure} of {len(gains)} "
                "intervals are above 0."
            )
    if rows:
        yield AVERAGED
        yield "\n".join([*found, "", AVERAGES_TABLE, *rows])


def _what_else(results: Results) -> Iterator[str]:
    """Yield test accuracies of what may raise them beside a filter, for the tasks that have such runs."""
    for task in TASKS:
        groups: dict[str, list[Cell]] = {}
        for cell in further_cells(task):
            views = f", {cell.views} views" if cell.views > 1 else ""
            groups.setdefault(f"{cell.method}, {cell.schedule} rate, B = {cell.batch_size:,}{views}", []).append(cell)
        ours = {name: reported_rows(cells, results) for name, cells in groups.items()}
        if not any(ours.values()):
            continue
        searches = {method: search_of(Line(task, method, is_reported=True), results) for method in METHODS}
        rows = {
            name: reported_rows(reported_cells(search), results)
            for name, search in searches.items()
            if search.best is not None
        }
        lines = ["| method | seeds | last weights | average |", "|---|---|---|---|"]
        for name, found in (rows | ours).items():
            if found:
                last, average = ({row["seed"]: 100 * row[of] for row in found} for of in ("test", AVERAGE))
                lines.append(f"| {name} | {len(found)} | {written_mean(last)} | {written_mean(average)} |")
        yield FURTHER
        yield f"**{task}**\n\n" + "\n".join(lines)
