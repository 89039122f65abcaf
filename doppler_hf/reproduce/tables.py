"""The tables of a study. Differences are from the first method, paired by the seed, which fixes initialization.

It fixes draws and noise, too, but a shape of several bands draws from a group at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Line:
    """A line of a table.

    Attributes:
        method: Its name.
        learning_rate: The best.
        accuracy: Of each seed, the same seeds for all lines.
        tuning: The mean accuracy on the tuning part at the best rate, and at twice that.
        untuned: The rate of the rule, and the accuracy at it; None where there is no rule.
    """

    method: str
    learning_rate: float
    accuracy: np.ndarray
    tuning: tuple[float, float]
    untuned: tuple[float, np.ndarray] | None


def table(lines: Sequence[Line]) -> str:
    """Return a table in Markdown: accuracies ± their standard errors, and the paired differences with intervals."""
    rows = [
        "| method | learning rate | accuracy, % | difference, 95 % interval | tuning part: best, twice the rate "
        "| rate by rule | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        percent = 100 * line.accuracy
        error = percent.std(ddof=1) / len(percent) ** 0.5
        rows.append(
            f"| {line.method} | {line.learning_rate:g} | {percent.mean():.2f} ± {error:.2f} | "
            f"{'–' if line is lines[0] else difference(percent - 100 * lines[0].accuracy)} | "
            f"{100 * line.tuning[0]:.1f}, {100 * line.tuning[1]:.1f} | {_untuned(line)} |"
        )
    return "\n".join(rows)


def _untuned(line: Line) -> str:
    if line.untuned is None:
        return "– | –"
    rate, accuracy = line.untuned
    return f"{rate:.3g} | {difference(100 * (accuracy - line.accuracy))}"


def difference(paired: np.ndarray) -> str:
    """Write the mean of paired differences, with Student's interval."""
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(paired) - 1) * paired.std(ddof=1) / len(paired) ** 0.5
    return f"{paired.mean():+.2f} [{paired.mean() - half:+.2f}, {paired.mean() + half:+.2f}]"
