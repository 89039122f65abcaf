"""The accuracy with each filter side by side at the same rates, under each condition: a map of rate and batch."""

from collections.abc import Iterator
from typing import Any, Final

from doppler_hf.filters import PAPER_FILTERS
from scripts.regime.results import Results
from scripts.regime.search import CONDITIONS, runs_of_sgd, written_terms
from scripts.regime.tasks import TASKS
from scripts.regime.theory import percent, step_length

EQUAL_RATES: Final = """
## At which rate and batch does a filter gain?

This is the accuracy of SGD in % on the held-out images, with each filter and by C·η. Compare down a column, to see what a
filter changes at the same rate. Compare along a row, to see which rates it allows. These are single runs with the same seed.
So differences of less than about a point on MNIST and two points on CIFAR-10 may be chance. *Stopped* runs were hopeless: at
two fifths of the run or later, they were more than five points behind the run at a smaller rate.
""".strip()


def accuracies_at_equal_rates(results: Results) -> Iterator[str]:
    """Yield the accuracy on the held-out images with each filter at each rate, under each condition."""
    rows = [
        (task, written_terms(terms) if terms else "usual", name, found[name])
        for task in TASKS
        for terms in CONDITIONS
        if len(found := _by_step(task, terms, results)) > 1
        for name in PAPER_FILTERS
        if name in found
    ]
    if not rows:
        return
    steps = sorted({step for *_, cells in rows for step in cells})
    yield EQUAL_RATES
    lines = [f"| task | conditions | filter | {' | '.join(f'{step:g}' for step in steps)} |"]
    lines += ["|---" * (3 + len(steps)) + "|"]
    lines += [
        f"| {task} | {under} | {name} | {' | '.join(cells.get(step, '–') for step in steps)} |"
        for task, under, name, cells in rows
    ]
    yield "\n".join(lines)


def _by_step(task: str, terms: tuple[tuple[str, Any], ...], results: Results) -> dict[str, dict[float, str]]:
    """Return filter → C·η → accuracy in %, at the clip norm with which most filters were run."""
    found: dict[float, dict[str, dict[float, str]]] = {}
    for name, row in runs_of_sgd(task, results, terms=terms):
        found.setdefault(row["clip_norm"], {}).setdefault(name, {})[step_length(row)] = percent(row)
    return max(found.values(), key=len, default={})
