"""What a learning rate that follows the loss could win over the rule, if asking for losses cost no privacy.

    python -m scripts.experiments.feedback --data_dir data --output out/feedback.jsonl

HyFreeDP (Bu & Liu 2025, https://arxiv.org/abs/2503.00703) takes the lowest point of a parabola through the losses along the
way that a step goes, and releases these losses privately, which its budget pays for. Here they are exact, the mean over
1,000 training examples, and paid by nobody: what this wins bounds what it could win with noise. Every run is a line of JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line
from scripts.studies.data import Data, Sources
from scripts.studies.runs import Run, train
from scripts.studies.studies import shaped
from scripts.studies.tasks import small_task

EXAMPLES = 1000
MOST = 2.0  # the factor by which a rate is raised or lowered at most, before the root of it is taken


@dataclass
class FeedbackArguments:
    """The settings of the trainings."""

    data_dir: str = field(metadata={"help": "Folder with mnist/ and glue/sst2/."})
    output: str | None = field(default=None, metadata={"help": "File to which every run is added as a line of JSON."})
    tasks: list[str] = field(default_factory=lambda: ["digits", "mnist", "sst2-words"], metadata={"help": "Tasks."})
    seeds: list[int] = field(default_factory=lambda: [0, 1], metadata={"help": "Seeds."})
    epsilon: float = field(default=3.0, metadata={"help": "ε."})
    every: int = field(default=5, metadata={"help": "Steps from one look at the loss to the next."})


class FreeFeedback(TrainerCallback):
    """Moves the learning rate to where the loss along the last step is lowest, half of the way in logarithms.

    Args:
        examples: Inputs and labels by which the loss is measured.
        every: Steps from one look to the next.
    """

    def __init__(self, examples: dict[str, torch.Tensor], *, every: int) -> None:
        self._examples, self._every = examples, every
        self._before: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the weights before the step."""
        self._before = []
        if state.global_step % self._every == 0:
            self._before = [p.detach().clone() for p in model.parameters()]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at the loss behind the step, and set the rate of the next ones."""
        if not self._before:
            return
        after = [p.detach().clone() for p in model.parameters()]
        losses = []
        for factor in (0.0, 1.0, 2.0):
            place(model, [torch.lerp(old, new, factor) for old, new in zip(self._before, after, strict=True)])
            losses.append(self._loss(model))
        place(model, after)
        factor = float(np.sqrt(lowest(*losses)))
        scheduler = kwargs["lr_scheduler"]
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        for group in kwargs["optimizer"].param_groups:
            group["lr"] *= factor

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        logits = model(inputs=self._examples["inputs"]).logits
        return float(nn.functional.cross_entropy(logits, self._examples["labels"]))


@torch.no_grad()
def place(model: nn.Module, weights: Sequence[torch.Tensor]) -> None:
    """Set the weights of a model."""
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)


def lowest(at_none: float, at_one: float, at_two: float) -> float:
    """Return by which factor a step had to be longer for the lowest loss, by the parabola through three; within `MOST`."""
    curvature = at_two - 2 * at_one + at_none
    slope = at_one - at_none - curvature / 2
    if curvature <= 0:
        return MOST if at_two < at_none else 1 / MOST
    return float(np.clip(-slope / curvature, 1 / MOST, MOST))


def one(name: str, data: Data, args: FeedbackArguments, *, noise: str, schedule: str, seed: int, is_told: bool) -> float:
    """Return the accuracy of a run on the reported part, in %."""
    method = shaped("auto", noise, lr_scheduler_type=schedule)
    run = Run.of(name, small_task(name), data, method, args.epsilon, None, seed)
    some = np.random.default_rng(1).choice(len(data.train), min(EXAMPLES, len(data.train)), replace=False)
    feedback = FreeFeedback(data.collator([data.train[int(index)] for index in some]), every=args.every)
    result = train(run, data=data, callbacks=[feedback] if is_told else [])
    row = {"task": name, "noise": noise, "schedule": schedule, "seed": seed, "feedback": is_told} | result
    append_json_line(row, args.output)
    return 100 * result["report"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train every combination, and print a line for each."""
    with one_line_errors():
        (args,) = parse_args(FeedbackArguments, argv=argv)
        tasks = {name: small_task(name) for name in args.tasks}
    for name, task in tasks.items():
        data = task.load(Sources(args.data_dir, "", Path("out/reproduce")))
        for noise in ("auto", "white"):
            for schedule, is_told in (("linear", False), ("linear", True), ("constant", True)):
                found = [
                    one(name, data, args, noise=noise, schedule=schedule, seed=seed, is_told=is_told) for seed in args.seeds
                ]
                way = "by the losses" if is_told else "by the rule"
                print(f"{name}, {noise} noise, {schedule}, {way}: {' '.join(f'{each:.2f}' for each in found)} %", flush=True)


if __name__ == "__main__":
    main()
