"""Overhead of a private step of a small network: `DopplerTrainer` against `Trainer`, in turn, in one process.

    python -m scripts.bench.small_networks --tasks mnist,digits --dataset_dir DATA [--opacus] [--output out/bench.jsonl]

The networks are those of the studies, from scratch, and a step is all of it: data, gradients, noise, filter, optimizer, and
the private run's record of it. Its parts that do not grow with the network weigh most here. With `--opacus`, the loop of
Opacus's own tutorials takes its turn too, with hooks and with ghost clipping: Poisson sampling, plain SGD, no schedule.
"""

import contextlib
import functools
import io
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from doppler_hf import DopplerTrainingArguments
from scripts.bench.measure import append_json_line, chosen, quartiles, settings
from scripts.studies.data import Data, Sources
from scripts.studies.runs import StudyTrainer
from scripts.studies.tasks import SMALL
from scripts.training.arguments import one_line_errors, parse_args

# Tasks whose unit of privacy is an image.
IMAGES = ("digits", "mnist", "mnist-perceptron")
# Of a run, until all that is computed once has been.
UNTIMED = 5
# Runs are stopped long before their end, since the record of one is kept a hundred times in its whole length.
PLANNED = 1000


@dataclass
class BenchArguments:
    """The settings of the trainings."""

    tasks: str = field(
        default="digits", metadata={"help": f"Tasks of the studies, of {', '.join(IMAGES)}, with commas between."}
    )
    batch_size: int = field(default=64, metadata={"help": "Expected batch size."})
    steps: int = field(default=40, metadata={"help": "Steps of a run that are timed."})
    pairs: int = field(default=3, metadata={"help": "How many pairs of runs."})
    dataset_dir: str | None = field(default=None, metadata={"help": "Folder with mnist/ as parquet; by default the hub's."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    threads: int = field(default=1, metadata={"help": "torch's threads."})
    opacus: bool = field(default=False, metadata={"help": "Also time Opacus's own loop, with hooks and ghost clipping."})
    output: str | None = field(default=None, metadata={"help": "File to which each result is added as a line of JSON."})


class Clock(TrainerCallback):
    """Notes the time after each step, and stops after the last that is to be timed.

    Args:
        steps: How many are timed.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._marks = steps, list[float]()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self._marks.append(time.perf_counter())
        control.should_training_stop = len(self._marks) == UNTIMED + self._steps

    def per_step(self) -> float:
        """Return the seconds of a step."""
        return (self._marks[-1] - self._marks[UNTIMED - 1]) / (len(self._marks) - UNTIMED)


def train(data: Data, args: BenchArguments, *, private: bool) -> float:
    """Train, and return the seconds of a step."""
    clock = Clock(args.steps)
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        common = {
            "output_dir": folder,
            "per_device_train_batch_size": args.batch_size,
            "max_steps": PLANNED,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "use_cpu": args.device == "cpu",
        }
        trainer = (StudyTrainer if private else Trainer)(
            model=data.network(),
            args=DopplerTrainingArguments(**common, target_epsilon=3.0) if private else TrainingArguments(**common),
            train_dataset=data.train,
            data_collator=data.collator,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.per_step()


def train_with_opacus(data: Data, args: BenchArguments, *, mode: str) -> float:
    """Train in Opacus's own loop with a `grad_sample_mode`, and return the seconds of a step."""
    from opacus import PrivacyEngine

    set_seed(0)
    network = data.network().to(args.device).train()
    loader: Any = DataLoader(data.train, batch_size=args.batch_size, collate_fn=data.collator)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": mode}
    loss_of: Any = nn.CrossEntropyLoss()
    made = {"module": network, "optimizer": torch.optim.SGD(network.parameters(), lr=0.1), "data_loader": loader}
    if mode == "ghost":
        private, optimizer, loss_of, loader = PrivacyEngine().make_private(**made, criterion=loss_of, **options)
    else:
        private, optimizer, loader = PrivacyEngine().make_private(**made, **options)
    marks = list[float]()
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        optimizer.zero_grad()
        logits = private(batch["inputs"].to(args.device)).logits
        loss_of(logits, batch["labels"].to(args.device)).backward()
        optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        if len(marks) == UNTIMED + args.steps:
            break
    return (marks[-1] - marks[UNTIMED - 1]) / args.steps


def main(argv: Sequence[str] | None = None) -> None:
    """Train in turn, and print one line for each task."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        tasks = chosen("--tasks", args.tasks, IMAGES)
        with tempfile.TemporaryDirectory() as folder:
            sources = Sources(args.dataset_dir, encoder="", cache_dir=Path(folder))
            loaded = {name: SMALL[name].load(sources) for name in tasks}
    torch.set_num_threads(args.threads)
    for name, data in loaded.items():
        ways = {"plain": functools.partial(train, private=False), "private": functools.partial(train, private=True)}
        if args.opacus:
            ways |= {f"opacus {mode}": functools.partial(train_with_opacus, mode=mode) for mode in ("hooks", "ghost")}
        seconds = np.array([[way(data, args) for way in ways.values()] for _ in range(args.pairs)])
        plain_s, *others_s = np.median(seconds, axis=0).tolist()
        for place, (way, taken) in enumerate(zip([*ways][1:], others_s, strict=True), 1):
            q1, ratio, q3 = quartiles(seconds[:, place] / seconds[:, 0])
            times = f"{1000 * plain_s:.4g} → {1000 * taken:.4g} ms per step"
            print(f"{name}, {way}: time ×{ratio:.2f} ({q1:.2f} to {q3:.2f}): {times}", flush=True)
            result = {"work": name, "way": way, "ratio": ratio, "ratio_quartiles": [q1, q3]}
            append_json_line(result | {"plain_s": plain_s, "private_s": taken} | settings(args), args.output)


if __name__ == "__main__":
    main()
