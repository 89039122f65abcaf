"""Whether a private search is worth its ε: a search and one run with the automatic values, both at the same total ε.

    python -m scripts.experiments.private_search --data-dir DATA [--task mnist-perceptron] [--trials 10] [--seeds 3]

The search chooses learning rate, clip norm and number of steps by examples that are not reported. The single run has the
learning rate and the clipping that are chosen without a trial. Each seed is a line of OUT/TASK.jsonl, written when it ends;
started again, the command continues. Noise, settings and the number of trials are secret, so no seed repeats them.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from doppler_hf.training_args import DopplerTrainingArguments
from scripts.experiments.accuracy import error_of
from scripts.studies.data import Data, Sources
from scripts.studies.networks import with_trained
from scripts.studies.runs import StudyTrainer, accuracy_of, say
from scripts.studies.tasks import SMALL, Task, small_task

WAYS = ("automatic values", "search")


def trainer_of(task: Task, data: Data, *, epsilon: float, seed: int, folder: str) -> StudyTrainer:
    """Return a trainer with the automatic values, for the batch size and number of steps of a task."""
    own = {name: value for name, value in task.settings.items() if name not in ("clipping", "per_sample_max_grad_norm")}
    args = DopplerTrainingArguments(
        output_dir=folder,
        target_epsilon=epsilon,
        report_train_loss="none",
        rehearse=False,
        allow_any_learning_rate=True,  # a search may draw a rate that the check would refuse
        seed=seed,
        per_device_eval_batch_size=100,
        save_strategy="no",
        logging_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        **own,
    )
    return StudyTrainer(
        model_init=lambda: with_trained(data.network(), task.trained),
        args=args,
        train_dataset=data.train,
        eval_dataset=data.tuning,
        data_collator=data.collator,
        compute_metrics=accuracy_of,
    )


def compared(task: Task, data: Data, *, epsilon: float, trials: float, seed: int) -> dict[str, Any]:
    """Return the accuracy of both ways on the examples that are reported, and what the search has chosen."""
    steps = task.settings["max_steps"]

    def hp_space(trial: Any) -> dict[str, Any]:
        return {
            "learning_rate": trial.suggest_float("learning_rate", 3e-4, 3e-2, log=True),
            "clipping": "vanilla",
            "per_sample_max_grad_norm": trial.suggest_float("per_sample_max_grad_norm", 0.1, 10.0, log=True),
            "max_steps": trial.suggest_int("max_steps", max(1, steps // 2), 2 * steps, log=True),
        }

    found: dict[str, Any] = {"seed": seed, "epsilon": epsilon, "trials": trials}
    for way in WAYS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = trainer_of(task, data, epsilon=epsilon, seed=seed, folder=folder)
            if way == "search":
                best = trainer.hyperparameter_search(
                    hp_space, lambda metrics: metrics["eval_accuracy"], n_trials=trials, direction="maximize"
                )
                found["chosen"] = best.hyperparameters
            else:
                trainer.train()
            assert trainer.privacy.epsilon() <= epsilon * (1 + 1e-9)
            found[way] = trainer.evaluate(data.report)["eval_accuracy"]
        say(f"seed {seed}, {way}: {100 * found[way]:.1f} % in {time.perf_counter() - start:.0f} s")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds that are missing, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.experiments.private_search", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--task", choices=SMALL, default="mnist-perceptron", metavar="TASK", help=", ".join(SMALL))
    parser.add_argument("--epsilon", type=float, default=3.0, metavar="ε", help="of each way (default: %(default)s)")
    parser.add_argument("--trials", type=float, default=10.0, metavar="K", help="expected trials (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, metavar="S", help="how many, at least 2 (default: %(default)s)")
    parser.add_argument("--data-dir", metavar="DIR", help="mnist/, cifar10/ and glue/TASK/ as parquet; default: the hub")
    parser.add_argument("--encoder", metavar="MODEL", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, default=Path("out/private_search"), metavar="OUT")
    args = parser.parse_args(argv)
    if args.seeds < 2:
        parser.error("--seeds must be at least 2, because the table has the error of a mean.")
    task = small_task(args.task)
    data = task.load(Sources(args.data_dir, args.encoder, args.out))
    path = args.out / f"{args.task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    terms = {"epsilon": args.epsilon, "trials": args.trials}
    done = {each["seed"]: each for each in known if {name: each[name] for name in terms} == terms}
    for seed in range(args.seeds):
        if seed not in done:
            done[seed] = compared(task, data, seed=seed, **terms)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[seed]) + "\n")
    print(f"| {args.task}, ε = {args.epsilon:g}, {args.seeds} seeds | accuracy |\n|---|---|")
    accuracies = {way: np.array([done[seed][way] for seed in range(args.seeds)]) for way in WAYS}
    for way, values in accuracies.items():
        what = f"{way}, {args.trials:g} trials expected" if way == "search" else way
        print(f"| {what} | {100 * values.mean():.1f} ± {100 * error_of(values):.1f} |")
    differences = accuracies["search"] - accuracies["automatic values"]
    print(f"| difference | {100 * differences.mean():+.1f} ± {100 * error_of(differences):.1f} |")


if __name__ == "__main__":
    main()
