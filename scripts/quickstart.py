"""What shaped noise and a filter gain, in three minutes: a small CNN, trained privately on MNIST with them and without.

    make quickstart        or        python -m scripts.quickstart [--dataset_dir FOLDER]

Same ε, same data, and no learning rate given: it follows from public numbers. Prints one table; the learning curves go to
`out/quickstart/learning_curves.png`, and each run's log and ledger to a folder beside it. Where there is no hub, and no
folder has MNIST, the digits of scikit-learn stand in, which are too few for a difference.
"""

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from transformers import PrinterCallback, set_seed

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.reports.plots import check_picture, new_figure, write
from doppler_hf.workloads.arguments import one_line_errors
from doppler_hf.workloads.data_sources import load_images
from doppler_hf.workloads.metrics import accuracy_from_logits
from scripts.studies.networks import Classifier, mnist_cnn

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

EPSILON = 3.0
SEEDS = (0, 1)
METHODS: dict[str, dict[str, Any]] = {
    "plain DP-Adam": {"noise_shape": "white", "low_pass_filter": "none"},
    "doppler_hf": {},  # the defaults
}
# Batch size and epochs.
SIZES = {"MNIST": (500, 2), "digits": (256, 30)}
OUT = Path("out/quickstart")
PICTURE = OUT / "learning_curves.png"


def load(dataset_dir: str | None) -> tuple[str, "DatasetDict"]:
    """Return the name of the data, and train and test images."""
    try:
        return "MNIST", load_images("mnist", dataset_dir)
    except ValueError as error:
        if dataset_dir is not None:
            raise
        print(f"{error}\nTaking the digits of scikit-learn instead, which are too few for a difference.\n")
        return "digits", load_images("digits")


def examples(split: "Dataset") -> list[dict[str, Any]]:
    """Turn grey values into tensors of 28×28."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in split["image"]])).float()[:, None] / 127.5 - 1
    images = pixels if pixels.shape[-1] == 28 else F.interpolate(pixels, size=(28, 28))
    return [{"inputs": image, "labels": label} for image, label in zip(images, split["label"], strict=True)]


class MnistTrainer(DopplerTrainer):
    """A trainer of a network of one's own: privacy needs one loss for each example."""

    def compute_per_sample_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the cross entropy of each example, shape (batch,)."""
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


def train(method: str, seed: int, data: dict[str, list[dict[str, Any]]], *, batch_size: int, epochs: int) -> DopplerTrainer:
    """Train once, and return the trainer with its history and its ledger."""
    set_seed(seed)
    args = DopplerTrainingArguments(
        output_dir=str(OUT / f"{method.replace(' ', '-')}-seed{seed}"),
        target_epsilon=EPSILON,
        **METHODS[method],
        clipping="vanilla",
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=1000,
        num_train_epochs=epochs,
        eval_strategy="steps",
        eval_steps=1 / 6,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=seed,
    )
    trainer = MnistTrainer(
        model=Classifier(mnist_cnn()),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        compute_metrics=accuracy_from_logits,
    )
    trainer.remove_callback(PrinterCallback)
    # The start-up summaries of all runs would hide the one table; each run keeps its own.
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with (Path(args.output_dir) / "log.txt").open("w") as log, contextlib.redirect_stdout(log):
        trainer.train()
    return trainer


def draw(curves: dict[str, list[list[tuple[float, float]]]], *, title: str) -> None:
    """Draw the mean over the runs of each method, and the range from the lowest to the highest."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    for label, runs in curves.items():
        epochs, values = [epoch for epoch, _ in runs[0]], np.array([[value for _, value in run] for run in runs])
        (line,) = axes.plot(epochs, values.mean(axis=0), label=label)
        axes.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", title=title)
    axes.legend(loc="lower right")
    write(figure, PICTURE)


def main(argv: list[str] | None = None) -> None:
    """Train by every method with every seed, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description="Train privately on MNIST, with shaped noise and a filter and without.")
    parser.add_argument("--dataset_dir", help="folder with train.parquet and test.parquet of MNIST; default: the hub")
    dataset_dir = parser.parse_args(argv).dataset_dir
    torch.set_num_threads(1)  # layers this small are slower on several threads
    start = time.perf_counter()
    with one_line_errors():
        check_picture(PICTURE)
        name, splits = load(dataset_dir)
    data = {split: examples(splits[split]) for split in ("train", "test")}
    batch_size, epochs = SIZES[name]
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    epsilons: list[float] = []
    chosen: dict[str, str] = {}
    table = Table("method", "noise, filter", "learning rate", f"{len(SEEDS)} seeds", "mean")
    for method in METHODS:
        print(f"Training by {method}, {len(SEEDS)} seeds …")
        trainers = [train(method, seed, data, batch_size=batch_size, epochs=epochs) for seed in SEEDS]
        curves[method] = [
            [(log["epoch"], 100 * log["eval_accuracy"]) for log in trainer.state.log_history if "eval_accuracy" in log]
            for trainer in trainers
        ]
        final = [run[-1][1] for run in curves[method]]
        optimizer, statement = trainers[0].optimizer.optimizer, trainers[0].private_run.statement
        parts = statement.noise_shape, str(optimizer.low_pass_filter)
        chosen[method] = ", ".join(part.partition(":")[0] for part in parts)
        table.add_row(
            method,
            chosen[method],
            f"{optimizer.defaults['lr']:.2g}",
            "  ".join(f"{accuracy:.1f}" for accuracy in final),
            f"{np.mean(final):.1f}",
        )
        epsilons += [trainer.privacy.epsilon() for trainer in trainers]
    title = f"{name}, CNN from scratch, ε = {EPSILON:g}, {len(SEEDS)} seeds"
    draw(curves, title=title)
    table.title = f"Test accuracy (%) on {name}, ε spent {max(epsilons):.3f}, {time.perf_counter() - start:.0f} s"
    Console().print(table)
    print(f"Learning curves, mean and range: {PICTURE}. Ledgers: {OUT}/*/privacy_ledger.json.")
    if len(set(chosen.values())) == 1:
        print("Both are the same method here, since the defaults chose plain DP-Adam: what differs is the noise alone.")
    print("On MNIST, five seeds of each, and with tuned learning rates: recipes/results/noise-shaping.md.")


if __name__ == "__main__":
    main()
