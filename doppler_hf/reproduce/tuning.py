"""Tune every method on the same grid, and report it.

Every method has a learning rate of its own for every task and ε: the best by the mean accuracy of the tuning seeds on the
tuning part, on a grid of factor 2 that is widened until the best is inside. Other seeds are reported at it, on the part that
is reported.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from doppler_hf.reproduce.data import Sources
from doppler_hf.reproduce.log import Log
from doppler_hf.reproduce.runs import Run, train
from doppler_hf.reproduce.studies import Study
from doppler_hf.reproduce.tables import Line, table
from doppler_hf.reproduce.tasks import Task
from doppler_hf.training_args import DopplerTrainingArguments

# Where the search for a learning rate begins.
FIRST_RATES: Final[Mapping[str, float]] = {"sgd": 2.0, "adam": 4e-3, "adam_bc": 4e-3}
DEFAULT_BASE: Final = DopplerTrainingArguments.base_optimizer


class Seeds(NamedTuple):
    """Seeds that choose learning rates, and others that are reported."""

    tuning: Sequence[int]
    report: Sequence[int]


def run_study(study: Study, folder: Path, tasks: Mapping[str, Task], sources: Sources, seeds: Seeds) -> str:
    """Train what is missing, and return the tables, which are also written as they are completed.

    Args:
        study: What is compared.
        folder: Where runs.jsonl and tables.md lie.
        tasks: Name → task.
        sources: Where the data come from.
        seeds: The seeds.
    """
    begun, done, total = time.perf_counter(), 0, len(study.tasks) * len(study.epsilons) * len(study.methods)
    tables = []
    for name in study.tasks:
        task, centres = tasks[name], dict(FIRST_RATES)
        log = Log(folder / "runs.jsonl", functools.partial(train, data=task.load(sources)))
        for epsilon in study.epsilons:
            lines = []
            for label, method in study.methods.items():
                run_of = functools.partial(Run.of, name, task, method, epsilon)
                base = method.arguments.get("base_optimizer", DEFAULT_BASE)
                print(f"{name}, ε = {epsilon:g}: {label}", flush=True)
                line = line_of(log, label, run_of, centre=centres[base], seeds=seeds)
                centres[base] = line.learning_rate  # where the next search begins
                lines.append(line)
                done += 1
                left = (time.perf_counter() - begun) / done * (total - done) / 60
                print(f"{done} of {total} lines, about {left:.0f} min left", flush=True)
            tables.append(f"## {name}, ε = {epsilon:g}\n\n{table(lines)}\n")
            (folder / "tables.md").write_text("\n".join([f"# {study.question}\n", *tables]))
            print(f"\n{tables[-1]}", flush=True)
    return "\n".join(tables)


def line_of(log: Log, name: str, run_of: Callable[[float, int], Run], *, centre: float, seeds: Seeds) -> Line:
    """Tune and report a method.

    Args:
        log: The results.
        name: The method's.
        run_of: Learning rate and seed → run.
        centre: The learning rate at which the search begins.
        seeds: The seeds.
    """

    def chosen_by(rate: float) -> float:
        return float(np.mean([log[run_of(rate, seed)]["tuning"] for seed in seeds.tuning]))

    rate = best_on_grid(chosen_by, centre=centre)
    accuracy = np.array([log[run_of(rate, seed)]["report"] for seed in seeds.report])
    return Line(name, rate, accuracy, chosen_by(2 * rate))


def best_on_grid(score: Callable[[float], float], *, centre: float) -> float:
    """Return the best of three values a factor 2 apart, and of as many more as bring the best inside.

    Args:
        score: Value → score, the more the better. It is called again for the same values.
        centre: The one between.
    """
    values = [centre / 2, centre, 2 * centre]
    while True:
        scores = np.array([score(value) for value in values])
        ties = np.flatnonzero(scores == scores.max())
        best = int(ties[len(ties) // 2])  # where nothing is learnt, all are equal
        if 0 < best < len(values) - 1:
            return values[best]
        values = [values[0] / 2, *values] if best == 0 else [*values, 2 * values[-1]]
