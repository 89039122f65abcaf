"""The best floor for DP-AdamBC: paired private runs over floor, learning rate and seed, on two tasks.

    python -m scripts.experiments.tune_floor --data_dir data --output out/floor.jsonl --tasks mnist
    python -m scripts.experiments.tune_floor --data_dir data --output out/floor.jsonl --tasks sst2 --steps 200

DP-AdamBC divides by √max(v̂ - noise_std², floor), and the default floor is a fraction of noise_std². The floor changes the
effective step size, so every fraction gets a learning rate of its own: the best by the mean accuracy of the tuning seeds, on
a grid of factor 2 that is widened until the best is inside. What is reported are other seeds at that learning rate. Runs are
paired: a seed fixes initialization, draws and noise, and two fractions differ in nothing else. The tasks are those of
`small_tasks`, with the filter `momentum`.

Every run is one line of JSON, written as it ends; what the file holds already is not run again. `data_dir` holds
`mnist/` and `glue/sst2/`, each with its splits as parquet files.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from doppler_hf.reproduce.tuning import best_on_grid
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line
from scripts.experiments import small_tasks
from scripts.experiments.small_tasks import LOADERS, load


@dataclass
class FloorArguments:
    """The settings of the trainings."""

    data_dir: str = field(metadata={"help": "Folder with mnist/ and glue/sst2/."})
    output: str = field(metadata={"help": "File of results, a line of JSON for every run; what it holds is not run again."})
    tasks: list[str] = field(default_factory=lambda: ["mnist", "sst2"], metadata={"help": "Of mnist and sst2."})
    epsilons: list[float] = field(default_factory=lambda: [1.0, 8.0], metadata={"help": "Privacy budgets ε."})
    fractions: list[float] = field(
        default_factory=lambda: [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0],
        metadata={
            "help": "Floors in units of noise_std². The search of each begins at the learning rate of the one before."
        },
    )
    lr: float = field(default=4e-3, metadata={"help": "Centre of the first grid of learning rates."})
    tune_seeds: list[int] = field(default_factory=lambda: [100, 101], metadata={"help": "Seeds that choose the rate."})
    report_seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "Seeds in the table."})
    steps: int = field(default=100, metadata={"help": "Steps T of a run."})
    expected_batch_size: int = field(default=1024, metadata={"help": "Expected size B of a draw."})
    threads: int = field(default=1, metadata={"help": "torch's threads."})


@dataclass(frozen=True)
class Run:
    """All that determines a run's result."""

    task: str
    epsilon: float
    fraction: float
    lr: float
    seed: int
    steps: int
    expected_batch_size: int


def train(run: Run, data_dir: str) -> dict[str, Any]:
    """Train once; see `small_tasks.train`."""
    setting = asdict(run) | {"low_pass_filter": "momentum", "floor": run.fraction}
    task, _ = setting.pop("task"), setting.pop("fraction")
    return small_tasks.train(task, data_dir, **setting)


def read(path: str) -> dict[Run, float]:
    """Return the accuracy of every run that the file holds."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return {Run(**{key.name: row[key.name] for key in fields(Run)}): row["accuracy"] for row in map(json.loads, lines)}


def accuracies(done: dict[Run, float], args: FloorArguments, seeds: Sequence[int], **setting: Any) -> np.ndarray:
    """Return the accuracy of each seed at one setting, shape (seeds,). Missing runs are added to `done` and the file."""
    runs = [Run(**setting, seed=seed, steps=args.steps, expected_batch_size=args.expected_batch_size) for seed in seeds]
    for run in runs:
        if run not in done:
            result = train(run, args.data_dir)
            append_json_line(asdict(run) | result | {"settings": asdict(args)}, args.output)
            done[run] = result["accuracy"]
            print(f"{run}: accuracy {done[run]:.4f}, {result['seconds']:.1f} s", flush=True)
    return np.array([done[run] for run in runs])


def table(reported: dict[float, np.ndarray], lrs: dict[float, float]) -> str:
    """Return the rows for one task and ε, in percent, with the paired difference from the fraction of the best mean.

    Args:
        reported: Fraction → accuracy of each seed, the same seeds for all.
        lrs: Fraction → learning rate.
    """
    best = max(reported, key=lambda fraction: reported[fraction].mean())
    lines = ["| fraction | lr | accuracy | difference from the best ± s.e. |", "|---|---|---|---|"]
    for fraction, accuracy in reported.items():
        paired = 100 * (accuracy - reported[best])
        difference = "best" if fraction == best else f"{paired.mean():+.2f} ± {paired.std(ddof=1) / len(paired) ** 0.5:.2f}"
        mean, std = 100 * accuracy.mean(), 100 * accuracy.std(ddof=1)
        lines.append(f"| {fraction:g} | {lrs[fraction]:.2g} | {mean:.2f} ± {std:.2f} | {difference} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, report, and print a table for every task and ε."""
    with one_line_errors():
        (args,) = parse_args(FloorArguments, argv=argv)
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
    done = read(args.output)
    tables = []
    for name in args.tasks:
        for epsilon in args.epsilons:
            lrs, reported, centre = {}, {}, args.lr
            for fraction in args.fractions:
                setting = {"task": name, "epsilon": epsilon, "fraction": fraction}

                def score(lr: float, setting: dict[str, Any] = setting) -> float:
                    return float(accuracies(done, args, args.tune_seeds, lr=lr, **setting).mean())

                centre = best_on_grid(score, centre=centre)
                lrs[fraction] = centre
                reported[fraction] = accuracies(done, args, args.report_seeds, lr=centre, **setting)
            tables.append(f"{name}, ε = {epsilon:g}, {len(args.report_seeds)} seeds\n\n{table(reported, lrs)}\n")
    print("", *tables, sep="\n")


if __name__ == "__main__":
    main()
