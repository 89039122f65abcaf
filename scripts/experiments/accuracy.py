"""What privacy costs in accuracy, and what the defaults win back: the table and picture of the README.

    python -m scripts.experiments.accuracy --data-dir DATA --encoder MODEL [--out out/accuracy] [--picture FILE]

Private runs have the learning rate that is chosen without a trial. Runs without privacy have AdamW, batches of 32, as many
examples in all, and the best of some rates by seeds and examples that are not reported. Started again, it continues.
"""

import argparse
import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import PrinterCallback, set_seed

from doppler_hf.training_args import DopplerTrainingArguments
from scripts.studies.data import Data, Sources
from scripts.studies.networks import with_trained
from scripts.studies.runs import Log, Run, StudyTrainer, accuracy_of, train
from scripts.studies.studies import Method, shaped
from scripts.studies.tasks import small_task

TASKS: Final = {"mnist": "MNIST, a small CNN from scratch", "sst2": "SST-2, LoRA on MiniLM's last layer"}
EPSILONS: Final = (1.0, 3.0, 8.0)
METHODS: Final = {"plain DP": shaped("none", "white"), "doppler_hf": shaped("auto", "auto")}
RATES: Final = (5e-4, 1e-3, 2e-3)
BATCH_SIZE: Final = 32
FIRST_TUNING_SEED: Final = 100


def train_without_privacy(run: Run, *, data: Data) -> dict[str, Any]:
    """Train once with AdamW, and return the accuracies on the parts `tuning` and `report`."""
    task = json.loads(run.arguments)
    set_seed(run.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = DopplerTrainingArguments(
            output_dir=folder,
            disable_dp=True,
            learning_rate=run.learning_rate,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=task["per_device_train_batch_size"] * task["max_steps"] // BATCH_SIZE,
            seed=run.seed,
            bf16=task.get("bf16", False),
            per_device_eval_batch_size=100,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        trainer = StudyTrainer(
            model=with_trained(data.network(), run.trained),
            args=args,
            train_dataset=data.train,
            data_collator=data.collator,
            compute_metrics=accuracy_of,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        scores = {part: trainer.evaluate(getattr(data, part))["eval_accuracy"] for part in ("tuning", "report")}
    return scores | {"first_rate": run.learning_rate}


def accuracies(name: str, sources: Sources, out: Path, seeds: range, tuning: range) -> dict[str, dict[float, np.ndarray]]:
    """Return by method and ε, ∞ without privacy, the accuracies of the seeds."""
    task = small_task(name)
    data = task.load(sources)
    private = Log(out / "private.jsonl", functools.partial(train, data=data))
    found: dict[str, dict[float, np.ndarray]] = {}
    for method, arguments in METHODS.items():
        run_of = functools.partial(Run.of, name, task, data, arguments)
        found[method] = {
            epsilon: np.array([private[run_of(epsilon, None, seed)]["report"] for seed in seeds]) for epsilon in EPSILONS
        }
    plain = Log(out / "plain.jsonl", functools.partial(train_without_privacy, data=data))
    run_of = functools.partial(Run.of, name, task, data, Method(), float("inf"))
    best = max(RATES, key=lambda rate: np.mean([plain[run_of(rate, seed)]["tuning"] for seed in tuning]))
    found["no privacy"] = {float("inf"): np.array([plain[run_of(best, seed)]["report"] for seed in seeds])}
    return found


def error_of(values: np.ndarray) -> float:
    """Return the standard error of a mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5)


def draw(results: Mapping[str, Mapping[str, Mapping[float, np.ndarray]]], path: Path) -> None:
    """Draw accuracy against ε, a panel for each task, one below another so that a phone shows legible letters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 2.7 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    styles = {"plain DP": ("C7", "s", "plain DP"), "doppler_hf": ("C0", "o", "doppler_hf, default noise and filter")}
    for axes, (name, found) in zip(panels, results.items(), strict=True):
        best = 100 * found["no privacy"][float("inf")].mean()
        axes.axhline(best, color="C2", linestyle="--", label=f"no privacy, {best:.1f} %")
        for method, (color, marker, label) in styles.items():
            means = [100 * values.mean() for values in found[method].values()]
            errors = [100 * error_of(values) for values in found[method].values()]
            axes.errorbar(
                list(found[method]), means, yerr=errors, color=color, marker=marker, markersize=5, capsize=3, label=label
            )
        losses = [best - 100 * values.mean() for values in found["doppler_hf"].values()]
        axes.set_title(f"{TASKS[name]}:\nprivacy costs {min(losses):.1f} to {max(losses):.1f} points", fontsize="medium")
        axes.set_xscale("log")
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
        axes.set(xlabel="ε (smaller is more private)", ylabel="accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(0.0, 0.7), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, print a table, and draw it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.experiments.accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS], metavar="TASK")
    parser.add_argument("--data-dir", metavar="DIR", help="mnist/ and glue/sst2/ as parquet; default: the hub")
    parser.add_argument("--encoder", metavar="MODEL", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--seeds", type=int, default=5, metavar="S", help="how many are reported (default: %(default)s)")
    parser.add_argument("--tune-seeds", type=int, default=2, metavar="S", help="how many choose (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/accuracy"), metavar="OUT")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    tuning = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + args.tune_seeds)
    sources = Sources(args.data_dir, args.encoder, args.out)
    results = {name: accuracies(name, sources, args.out, range(args.seeds), tuning) for name in args.tasks}
    print("| task | ε | plain DP | doppler_hf | no privacy |\n|---|---|---|---|---|")
    for name, found in results.items():
        for epsilon in EPSILONS:
            columns = (found["plain DP"][epsilon], found["doppler_hf"][epsilon], found["no privacy"][float("inf")])
            cells = " | ".join(f"{100 * values.mean():.1f} ± {100 * error_of(values):.1f}" for values in columns)
            print(f"| {TASKS[name]} | {epsilon:g} | {cells} |")
    if args.picture is not None:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
