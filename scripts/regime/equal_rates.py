"""What each filter changes at the same rate, under each condition: a map of rate and batch."""

from collections.abc import Iterator
from typing import Any, Final

from doppler_hf.filters import PAPER_FILTERS
from scripts.regime.results import Results
from scripts.regime.search import CONDITIONS, runs_of_sgd, written_terms
from scripts.regime.tasks import TASKS
from scripts.regime.theory import percent, points, step_length

EQUAL_RATES: Final = """
## At which rate and batch does a filter gain?

A row of *none* has the accuracy in % of SGD without a filter, on the held-out images, by C·η. The rows below it have the
change by a filter at the same C·η, in points. These are single runs with the same seed. So changes of less than about a
point on MNIST and two points on CIFAR-10 may be chance. A dash stands for a run that is missing or was stopped as hopeless.
""".strip()


def changes_at_equal_rates(results: Results) -> Iterator[str]:
    """Yield what each filter changes on the held-out images at each rate, under each condition."""
    rows: list[tuple[str, str, str, dict[float, str]]] = []
    for task in TASKS:
        for terms in CONDITIONS:
            found = _by_step(task, terms, results)
            none = found.pop("none", {})
            changes = {name: _changes(of, none) for name, of in found.items() if of.keys() & none.keys()}
            if changes:
                under = written_terms(terms) if terms else "usual"
                rows.append((task, under, "none", {step: percent(row) for step, row in none.items()}))
                rows += [(task, under, name, changes[name]) for name in PAPER_FILTERS if name in changes]
    if not rows:
        return
    steps = sorted({step for *_, cells in rows for step in cells})
    yield EQUAL_RATES
    lines = [
        f"| task | conditions | filter | {' | '.join(f'{step:g}' for step in steps)} |",
        "|---" * (3 + len(steps)) + "|",
    ]
    lines += [
        f"| {task} | {under} | {name} | {' | '.join(cells.get(step, '–') for step in steps)} |"
        for task, under, name, cells in rows
    ]
    yield "\n".join(lines)


def _by_step(task: str, terms: tuple[tuple[str, Any], ...], results: Results) -> dict[str, dict[float, dict[str, Any]]]:
    """Return filter → C·η → finished run, at the clip norm with which most filters were run."""
    found: dict[float, dict[str, dict[float, dict[str, Any]]]] = {}
    for name, row in runs_of_sgd(task, results, terms=terms):
        if row["held_out"] is not None:
            found.setdefault(row["clip_norm"], {}).setdefault(name, {})[step_length(row)] = row
    return max(found.values(), key=len, default={})


def _changes(of: dict[float, dict[str, Any]], none: dict[float, dict[str, Any]]) -> dict[float, str]:
    return {step: points(100 * (of[step]["held_out"] - none[step]["held_out"])) for step in of.keys() & none.keys()}
