"""Tune every method on the same grid, and report it in a table.

Every method has a learning rate of its own for every task and ε: the best by the mean accuracy of the tuning seeds on the
tuning part, on a grid of factor 2 that is widened until the best is inside. Other seeds are reported at it, on the part that
is reported, and where a rule chooses a rate without any trial, at that one, too. Differences are from the first method,
paired by the seed, which fixes initialization; a shape of several bands draws from a group at a time.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from scipy import stats

from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import setting_without_default_rate
from scripts.studies.data import Sources
from scripts.studies.runs import Log, Run, say, train
from scripts.studies.studies import Study, fits
from scripts.studies.tasks import Task

# Where the search for a learning rate begins.
FIRST_RATES: Final[Mapping[str, float]] = {"sgd": 2.0, **dict.fromkeys(("adam", "adam_bc", "muon"), 4e-3)}
# From three rates at which nothing is learnt to the next three, and how often.
_LEAP, _MOST_LEAPS = 8, 3
DEFAULT_BASE: Final = DopplerTrainingArguments.base_optimizer
CONFIDENCE: Final = 0.95


class Seeds(NamedTuple):
    """Seeds that choose learning rates, and others that are reported."""

    tuning: Sequence[int]
    report: Sequence[int]


class Line(NamedTuple):
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


def run_study(study: Study, path: Path, tasks: Mapping[str, Task], sources: Sources, seeds: Seeds) -> Iterator[str]:
    """Train what the log at `path` lacks, and return a table for every task and ε, as it is completed."""
    for name, task in tasks.items():
        centres = dict(FIRST_RATES)
        data = task.load(sources)
        log = Log(path, functools.partial(train, data=data))
        methods = {label: method for label, method in study.methods.items() if fits(method, task)}
        left = len(study.epsilons) * len(methods)
        took: list[float] = []
        for epsilon in study.epsilons:
            lines = []
            for label, method in methods.items():
                say(f"{name}, ε = {epsilon:g}: {label}")
                begun, held = time.perf_counter(), len(log)
                run_of = functools.partial(Run.of, name, task, data, method, epsilon)
                base = method.arguments.get("base_optimizer", DEFAULT_BASE)
                has_rule = setting_without_default_rate(base, method.arguments.get("optim_target_modules")) is None
                line = line_of(log, label, run_of, centre=centres[base], seeds=seeds, has_rule=has_rule)
                centres[base] = line.learning_rate  # where the next search begins
                lines.append(line)
                left -= 1
                if len(log) > held:
                    took.append(time.perf_counter() - begun)
                    say(f"{left} lines of {name} to come, about {left * np.mean(took) / 60:.0f} min")
            yield f"## {name}, ε = {epsilon:g}\n\n{table(lines)}\n"


def line_of(
    log: Log, name: str, run_of: Callable[[float | None, int], Run], *, centre: float, seeds: Seeds, has_rule: bool
) -> Line:
    """Tune a method from the rate `centre` on, and report it; a rate of None is chosen by the rule, if it has one."""

    def chosen_by(rate: float) -> float:
        return float(np.mean([log[run_of(rate, seed)]["tuning"] for seed in seeds.tuning]))

    rate = best_on_grid(chosen_by, centre=centre)

    def reported(at: float | None) -> tuple[float, np.ndarray]:
        results = [log[run_of(at, seed)] for seed in seeds.report]
        return results[0]["first_rate"], np.array([result["report"] for result in results])

    tuning = chosen_by(rate), chosen_by(2 * rate)
    return Line(name, *reported(rate), tuning, reported(None) if has_rule else None)


def best_on_grid(score: Callable[[float], float], *, centre: float) -> float:
    """Return the best of three values a factor 2 apart, and of as many more as bring the best inside.

    Args:
        score: Value → score, the more the better. It is called again for the same values.
        centre: The one between. Where all three have the same score, nothing is learnt, as at a rate that is far too small:
            larger ones are tried, to 512 times this one.
    """
    starts = [[start / 2, start, 2 * start] for start in (centre * _LEAP**leap for leap in range(_MOST_LEAPS + 1))]
    values = next((values for values in starts if len(set(map(score, values))) > 1), starts[0])
    while True:
        scores = np.array([score(value) for value in values])
        ties = np.flatnonzero(scores == scores.max())
        best = int(ties[len(ties) // 2])
        if 0 < best < len(values) - 1:
            return values[best]
        values = [values[0] / 2, *values] if best == 0 else [*values, 2 * values[-1]]


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
        untuned = "– | –"
        if line.untuned is not None:
            untuned = f"{line.untuned[0]:.3g} | {difference(100 * (line.untuned[1] - line.accuracy))}"
        rows.append(
            f"| {line.method} | {line.learning_rate:g} | {percent.mean():.2f} ± {error:.2f} | "
            f"{'–' if line is lines[0] else difference(percent - 100 * lines[0].accuracy)} | "
            f"{100 * line.tuning[0]:.1f}, {100 * line.tuning[1]:.1f} | {untuned} |"
        )
    return "\n".join(rows)


def difference(paired: np.ndarray) -> str:
    """Write the mean of paired differences, with Student's interval."""
    low, high = interval(paired)
    mean, low, high = (round(float(value), 2) + 0.0 for value in (paired.mean(), low, high))  # no -0.00
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def interval(paired: np.ndarray) -> tuple[float, float]:
    """Return Student's interval for the mean of paired differences."""
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(paired) - 1) * paired.std(ddof=1) / len(paired) ** 0.5
    return paired.mean() - half, paired.mean() + half
