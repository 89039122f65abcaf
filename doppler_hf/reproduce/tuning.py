"""Tune every method on the same grid, and report it.

Every method has a learning rate of its own for every task and ε: the best by the mean accuracy of the tuning seeds on the
tuning part, on a grid of factor 2 that is widened until the best is inside. Other seeds are reported at it, on the part that
is reported, and where a rule chooses a rate without any trial, at that one, too.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from doppler_hf.reproduce.data import Sources
from doppler_hf.reproduce.log import Log, say
from doppler_hf.reproduce.runs import Run, train
from doppler_hf.reproduce.studies import Study, fits
from doppler_hf.reproduce.tables import Line, table
from doppler_hf.reproduce.tasks import Task
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import without_rate_rule

# Where the search for a learning rate begins.
FIRST_RATES: Final[Mapping[str, float]] = {"sgd": 2.0, "adam": 4e-3, "adam_bc": 4e-3}
# From three rates at which nothing is learnt to the next three, and how often.
_LEAP, _MOST_LEAPS = 8, 3
DEFAULT_BASE: Final = DopplerTrainingArguments.base_optimizer


class Seeds(NamedTuple):
    """Seeds that choose learning rates, and others that are reported."""

    tuning: Sequence[int]
    report: Sequence[int]


def run_study(study: Study, path: Path, tasks: Mapping[str, Task], sources: Sources, seeds: Seeds) -> Iterator[str]:
    """Train what is missing, and return a table for every task and ε, as it is completed.

    Args:
        study: What is compared.
        path: The log.
        tasks: Name → task, all of which are run.
        sources: Where the data come from.
        seeds: The seeds.
    """
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
                has_rule = without_rate_rule(base, method.arguments.get("optim_target_modules")) is None
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
    """Tune and report a method.

    Args:
        log: The results.
        name: The method's.
        run_of: Learning rate and seed → run.
        centre: The learning rate at which the search begins.
        seeds: The seeds.
        has_rule: Whether a rate that is left out is chosen by a rule, which is then reported beside.
    """

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
    starts = [around(centre * _LEAP**leap) for leap in range(_MOST_LEAPS + 1)]
    values = next((values for values in starts if len(set(map(score, values))) > 1), starts[0])
    while True:
        scores = np.array([score(value) for value in values])
        ties = np.flatnonzero(scores == scores.max())
        best = int(ties[len(ties) // 2])
        if 0 < best < len(values) - 1:
            return values[best]
        values = [values[0] / 2, *values] if best == 0 else [*values, 2 * values[-1]]


def around(centre: float) -> list[float]:
    """Return three values a factor 2 apart."""
    return [centre / 2, centre, 2 * centre]
