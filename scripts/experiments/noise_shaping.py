"""What shaped noise is worth: paired private runs over the shape of the noise, filter, base optimizer, rate and seed.

    python -m scripts.experiments.noise_shaping --data_dir data --output out/shaping.jsonl --tasks mnist
    python -m scripts.experiments.noise_shaping --data_dir data --output out/shaping.jsonl --epsilons 1 3 8 --bases sgd

All methods have equal ε and process equally many examples. Each has a learning rate of its own, the best by the mean of the
tuning seeds on a grid of factor 2 that is widened until the best is inside; other seeds are reported at it. Differences
are from white noise without a filter, paired by the seed, which fixes initialization. The tasks are those of `small_tasks`.

Every run is one line of JSON, written as it ends; what the file holds already is not run again.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line
from scripts.experiments.small_tasks import LOADERS, load, train

# Where the search for a learning rate begins.
FIRST_RATES = {"sgd": 2.0, "adam": 4e-3, "adam_bc": 4e-3}


# What stands before a filter that is meant for the weights.
ON_WEIGHTS = "weights:"


@dataclass
class ShapingArguments:
    """The settings of the trainings."""

    data_dir: str = field(metadata={"help": "Folder with mnist/ and glue/sst2/."})
    output: str = field(metadata={"help": "File of results, a line of JSON for every run; what it holds is not run again."})
    tasks: list[str] = field(default_factory=lambda: ["mnist"], metadata={"help": "Of mnist, mnist-perceptron and sst2."})
    epsilons: list[float] = field(default_factory=lambda: [1.0, 3.0, 8.0], metadata={"help": "Privacy budgets ε."})
    bases: list[str] = field(default_factory=lambda: ["sgd", "adam_bc"], metadata={"help": "Of sgd, adam and adam_bc."})
    shapes: list[str] = field(
        default_factory=lambda: ["white", "banded:bands=4"],
        metadata={"help": "Shapes of the noise, or auto; the first is compared with."},
    )
    filters: list[str] = field(
        default_factory=lambda: ["none", "first-order-v1"],
        metadata={
            "help": "Filters on the gradient, auto, or, as weights:FILTER, on the weights; the first is compared with."
        },
    )
    tune_seeds: list[int] = field(default_factory=lambda: [100, 101], metadata={"help": "Seeds that choose the rate."})
    report_seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "Seeds in the table."})
    steps: int = field(default=300, metadata={"help": "Steps T of a run."})
    expected_batch_size: int = field(default=1000, metadata={"help": "Expected size B of a draw."})
    threads: int = field(default=1, metadata={"help": "torch's threads."})


@dataclass(frozen=True)
class Run:
    """All that determines a run's result."""

    task: str
    epsilon: float
    base: str
    noise_shape: str
    low_pass_filter: str
    lr: float
    seed: int
    steps: int
    expected_batch_size: int


class Results:
    """The accuracies of all runs of a file, to which missing ones are added.

    Args:
        args: The settings.
    """

    def __init__(self, args: ShapingArguments) -> None:
        self._args = args
        path = Path(args.output)
        rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        self._done = {Run(**{each.name: row[each.name] for each in fields(Run)}): row["accuracy"] for row in rows}

    def accuracies(self, seeds: Sequence[int], **setting: Any) -> np.ndarray:
        """Return the accuracy of each seed at one setting, shape (seeds,)."""
        args = self._args
        runs = [Run(**setting, seed=seed, steps=args.steps, expected_batch_size=args.expected_batch_size) for seed in seeds]
        for run in runs:
            if run not in self._done:
                options = asdict(run)
                if run.low_pass_filter.startswith(ON_WEIGHTS):
                    options["weight_filter"] = run.low_pass_filter.removeprefix(ON_WEIGHTS)
                    options["low_pass_filter"] = "none"
                result = train(options.pop("task"), args.data_dir, **options)
                append_json_line(asdict(run) | result, args.output)
                self._done[run] = result["accuracy"]
                print(f"{run}: accuracy {self._done[run]:.4f}, {result['seconds']:.1f} s", flush=True)
        return np.array([self._done[run] for run in runs])

    def best_rate(self, centre: float, **setting: Any) -> float:
        """Return the best learning rate, from three around `centre` and as many more as bring the best of them inside."""
        rates = [centre / 2, centre, centre * 2]
        while True:
            means = np.array([self.accuracies(self._args.tune_seeds, lr=lr, **setting).mean() for lr in rates])
            best = int(means.argmax())
            if 0 < best < len(rates) - 1:
                return rates[best]
            rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]


def table(reported: dict[tuple[str, str], np.ndarray], rates: dict[tuple[str, str], float]) -> str:
    """Return the rows for one task, ε and base, in percent, with paired differences from the first.

    Args:
        reported: Shape and filter → accuracy of each seed, the same seeds for all.
        rates: Shape and filter → learning rate.
    """
    lines = ["| noise | filter | lr | accuracy | difference ± s.e. |", "|---|---|---|---|---|"]
    first = next(iter(reported.values()))
    for (shape, low_pass_filter), accuracy in reported.items():
        paired = 100 * (accuracy - first)
        difference = f"{paired.mean():+.2f} ± {paired.std(ddof=1) / len(paired) ** 0.5:.2f}" if paired.any() else "–"
        mean, std = 100 * accuracy.mean(), 100 * accuracy.std(ddof=1)
        rate = rates[shape, low_pass_filter]
        lines.append(f"| {shape} | {low_pass_filter} | {rate:g} | {mean:.2f} ± {std:.2f} | {difference} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, report, and print a table for every task, ε and base optimizer."""
    with one_line_errors():
        (args,) = parse_args(ShapingArguments, argv=argv)
        for name in args.tasks:
            if name not in LOADERS:
                raise ValueError(f"--tasks must be of {', '.join(LOADERS)}, got {name!r}.")
        if len(args.report_seeds) < 2 or not args.tune_seeds or {*args.tune_seeds} & {*args.report_seeds}:
            raise ValueError(
                f"--tune_seeds must have one seed or more and --report_seeds two or more, with none in both, got "
                f"{args.tune_seeds} and {args.report_seeds}."
            )
        for name in args.tasks:
            load(name, args.data_dir)
    torch.set_num_threads(args.threads)
    results = Results(args)
    for task, epsilon, base in itertools.product(args.tasks, args.epsilons, args.bases):
        reported, rates, centre = {}, {}, FIRST_RATES[base]
        for shape, low_pass_filter in itertools.product(args.shapes, args.filters):
            setting = {"task": task, "epsilon": epsilon, "base": base}
            setting |= {"noise_shape": shape, "low_pass_filter": low_pass_filter}
            rates[shape, low_pass_filter] = centre = results.best_rate(centre, **setting)
            reported[shape, low_pass_filter] = results.accuracies(args.report_seeds, lr=centre, **setting)
        print(f"\n{task}, ε = {epsilon:g}, {base}, {len(args.report_seeds)} seeds\n\n{table(reported, rates)}\n", flush=True)


if __name__ == "__main__":
    main()
