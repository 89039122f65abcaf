"""One training of a task by a method, and what is kept of it.

A run's noise and draws follow its seed, so that methods are paired. Nothing here is meant to be private: the data are
public, and ε is what the same training would cost. Settings are compared on training images that are held out. Only a cell
with `tests_once` is evaluated on the test set, at its end.

A cell saves itself at every point of its curve, and continues from the last one when it is trained again. Its draws and
noise follow from its seed, so that the result is the same as without the interruption.
"""

import contextlib
import dataclasses
import functools
import io
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback, set_seed

import doppler_hf
from doppler_hf.run.planning.filter_and_noise import chosen_filter
from doppler_hf.training_args import DopplerTrainingArguments
from scripts.regime.spectrum import Released, Signal
from scripts.regime.tasks import TASKS, Loaded, network_of
from scripts.studies.runs import StudyTrainer
from scripts.studies.studies import GALORE

# How often a run is evaluated, at equal distances.
POINTS: Final = 10
# The average of the weights follows them as in De et al. 2022: by (1 + t)/(10 + t), and at most by this.
LONGEST_AVERAGE: Final = 0.9999
_AT_ONCE: Final = 500  # images of an evaluation


@dataclass(frozen=True)
class Method:
    """An algorithm: the base optimizer, the filter, the noise over the steps, and whether GaLore projects its updates."""

    base: str
    low_pass_filter: str
    noise_shape: str = "white"
    is_projected: bool = False


METHODS: Final[Mapping[str, Method]] = {
    "DPSGD": Method("sgd", "none"),
    "DPSGD with momentum": Method("sgd", "momentum"),
    "LP-DPSGD, first-order-v1": Method("sgd", "first-order-v1"),
    "LP-DPSGD, first-order-v2": Method("sgd", "first-order-v2"),
    "LP-DPSGD, second-order": Method("sgd", "second-order"),
    **{f"LP-DPSGD, f{number}": Method("sgd", f"f{number}") for number in range(1, 7)},
    "DPAdam, β₁ = 0": Method("adam", "none"),
    "DPAdam, β₁ = 0.9": Method("adam", "momentum"),
    "DPAdamBC, β₁ = 0": Method("adam_bc", "none"),
    "DPAdamBC, β₁ = 0.9": Method("adam_bc", "momentum"),
    "LP-DPAdamBC, first-order-v1": Method("adam_bc", "first-order-v1"),
    "LP-DPAdamBC, first-order-v2": Method("adam_bc", "first-order-v2"),
    "LP-DPAdamBC, second-order": Method("adam_bc", "second-order"),
    "DPGaLore, β₁ = 0": Method("adam_bc", "none", is_projected=True),
    "LP-DPGaLore, first-order-v1": Method("adam_bc", "first-order-v1", is_projected=True),
    "DPGaLore, β₁ = 0.9": Method("adam_bc", "momentum", is_projected=True),
    "ours, auto": Method("adam_bc", "auto", noise_shape="auto"),
    "ours, Muon": Method("muon", "auto", noise_shape="auto"),
}
"""Name → method."""


@dataclass(frozen=True)
class Cell:
    """All that determines a run's result, but the code.

    Attributes:
        learning_rate: The first rate; `None` for that of the package's rule.
        epsilon: ε at δ = N^−1.1; `None` for a run without noise, whose gradients are clipped all the same.
        tests_once: Whether the weights at the end are evaluated on the test set.
        views: How many randomly moved versions of an image a step looks at; 1 for the image itself.
    """

    task: str
    method: str
    learning_rate: float | None
    schedule: str = "constant"
    clip_norm: float = 1.0
    clipping: str = "vanilla"
    sampling: str = "poisson"
    epsilon: float | None = 8.0
    batch_size: int = 1000
    epochs: int = 50
    seed: int = 100
    tests_once: bool = False
    views: int = 1


@dataclass(frozen=True)
class HopelessRun:
    """When a run is stopped early: at 40 % or more, if it is so far behind another rate at the same point.

    Only rates above a better one, at a constant schedule, are measured against it: a lower rate, or one that falls, may
    catch up.
    """

    reference: tuple[float, ...]  # held-out accuracy of the better rate at each point
    margin: float = 0.05
    first_point: int = 4

    def is_behind(self, curve: list[float]) -> bool:
        """Return whether the last point of a curve is so far behind."""
        point = len(curve)
        return self.first_point <= point < POINTS and curve[-1] < self.reference[point - 1] - self.margin


class Follower(TrainerCallback):
    """Evaluates a run at equal distances, keeps the average of its weights, and stops it where it is hopeless.

    Attributes:
        curve: The held-out accuracy at each point that was reached.
        is_stopped: Whether the run was stopped early.
        recorders: What records gradients beside it, and is saved with it.
    """

    def __init__(
        self,
        evaluate: Callable[[nn.Module], float],
        *,
        steps: int,
        hopeless: HopelessRun | None = None,
        recorders: Sequence[Released | Signal] = (),
    ) -> None:
        self._evaluate, self._steps, self._hopeless, self.recorders = evaluate, steps, hopeless, recorders
        self._average: list[Tensor] = []
        self._seconds_before, self._begun = 0.0, time.perf_counter()
        self.curve: list[float] = []
        self.is_stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Begin the average, or continue that of a checkpoint."""
        self._average = [parameter.detach().clone() for parameter in model.parameters()]
        if state.global_step:
            self._take_up(torch.load(saved_at(Path(args.output_dir), state.global_step), weights_only=False))

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save beside a checkpoint what the run needs to be followed from there on."""
        series = [recorder.series for recorder in self.recorders]
        saved = {"average": self._average, "curve": self.curve, "series": series, "seconds": self.seconds}
        path = saved_at(Path(args.output_dir), state.global_step)
        unfinished = path.with_suffix(".unfinished")  # a process that is killed while it writes leaves no half of a file
        torch.save(saved, unfinished)
        unfinished.replace(path)

    def _take_up(self, saved: dict[str, Any]) -> None:
        self._average, self.curve, self._seconds_before = saved["average"], saved["curve"], saved["seconds"]
        for recorder, series in zip(self.recorders, saved["series"], strict=True):
            recorder.before = series

    @property
    def seconds(self) -> float:
        """How long the run took, with all that was before its interruptions and is kept."""
        return self._seconds_before + time.perf_counter() - self._begun

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Follow one step."""
        step = state.global_step
        share = 1 - min((1 + step) / (10 + step), LONGEST_AVERAGE)
        torch._foreach_lerp_(self._average, [parameter.detach() for parameter in model.parameters()], share)
        if step * POINTS // self._steps > (step - 1) * POINTS // self._steps:
            self.curve.append(self._evaluate(model))
            if self._hopeless is not None and self._hopeless.is_behind(self.curve):
                control.should_training_stop = self.is_stopped = True

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Exchange the weights and their average (both modified in place)."""
        for parameter, average in zip(model.parameters(), self._average, strict=True):
            last = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(last)


def saved_at(folder: Path, step: int) -> Path:
    """Return where a `Follower` is saved beside the checkpoint of a step."""
    return folder / f"checkpoint-{step}" / "follower.pt"


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last checkpoint of a run that was saved completely, or None after clearing a folder that has none."""
    whole = [path.parent for path in folder.glob("checkpoint-*/follower.pt")]
    if whole:
        return max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    shutil.rmtree(folder, ignore_errors=True)  # with the ledger of what was begun
    return None


def train_cell(
    cell: Cell,
    data: Loaded,
    *,
    folder: Path,
    hopeless: HopelessRun | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Train once, and return accuracies, the numbers of the mechanism, and the spectrum of the private gradients.

    Args:
        cell: What is trained.
        data: The task's.
        folder: Where it is saved while it runs; a run that is there continues.
        hopeless: When it is stopped early.
        callbacks: Further callbacks, which must not draw from the global generators.
    """
    task, method = TASKS[cell.task], METHODS[cell.method]
    steps = round(cell.epochs * len(data.train) / cell.batch_size)
    # A GPU computes a whole batch of the usual size together.
    micro_batch = math.gcd(1000 if torch.cuda.is_available() else task.micro_batch, cell.batch_size)
    set_seed(cell.seed)
    network = network_of(task)
    checkpoint = last_checkpoint(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        args = DopplerTrainingArguments(
            output_dir=str(folder),
            target_epsilon=cell.epsilon,
            noise_multiplier=0.0 if cell.epsilon is None else None,
            report_train_loss="none",  # all of ε is for the gradient, as in the paper
            max_steps=steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=cell.batch_size // micro_batch,
            per_sample_max_grad_norm=cell.clip_norm,
            clipping=cell.clipping,
            sampling=cell.sampling,
            augmentation_multiplicity=cell.views,
            base_optimizer=method.base,
            low_pass_filter=method.low_pass_filter,
            noise_shape="auto" if cell.epsilon is None else method.noise_shape,
            **(GALORE if method.is_projected else {}),
            learning_rate=cell.learning_rate,
            lr_scheduler_type=cell.schedule,
            rehearse=False,
            allow_any_learning_rate=True,  # a grid of rates may reach a hundredfold
            seed=cell.seed,
            noise_seed=cell.seed,
            save_strategy="steps",
            save_steps=max(1, steps // POINTS),
            save_total_limit=2,  # the last one that is whole, and that of an interruption
            logging_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        recorders = recorders_of(cell)
        follower = Follower(
            lambda model: accuracy(model, data, data.held_out), steps=steps, hopeless=hopeless, recorders=recorders
        )
        trainer = StudyTrainer(
            model=network,
            args=args,
            train_dataset=data.train,
            data_collator=data.batch if cell.views == 1 else functools.partial(data.moved_batch, flips=task.flips),
            callbacks=[follower, *(recorder.callback for recorder in recorders), *callbacks],
        )
        for recorder in recorders:
            recorder.attach(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    statement = trainer.privacy.statement
    trained = trainer.model
    found = {
        **dataclasses.asdict(cell),
        "low_pass_filter": str(chosen_filter(args, statement)),
        "optim_args": args.optim_args,
        "first_rate": trainer.optimizer.optimizer.defaults["lr"],
        "delta": statement.target_delta,
        "noise_multiplier": statement.noise_multiplier,
        "noise_shape": statement.noise_shape,
        "steps": steps,
        "num_examples": len(data.train),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "curve": [round(value, 4) for value in follower.curve],
        "stopped_at": len(follower.curve) / POINTS if follower.is_stopped else None,
        "held_out": None if follower.is_stopped else follower.curve[-1],
    }
    if not follower.is_stopped:
        if cell.tests_once:
            found["test"] = accuracy(trained, data, range(len(data.labels[data.test])), split=data.test)
        follower.exchange(trained)
        found["held_out_of_average"] = accuracy(trained, data, data.held_out)
        if cell.tests_once:
            found["test_of_average"] = accuracy(trained, data, range(len(data.labels[data.test])), split=data.test)
        found |= {recorder.name: recorder.spectrum() for recorder in recorders}
    return found | {
        "seconds": round(follower.seconds, 1),
        "device": next(trained.parameters()).device.type,
        "date": time.strftime("%Y-%m-%d"),
        "interrupted": checkpoint is not None,
        "versions": {
            "doppler_hf": doppler_hf.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def recorders_of(cell: Cell) -> list[Released | Signal]:
    """Return what records the gradients of a cell: in the runs that choose rates, of white noise alone.

    The signal is recorded for every method, and what is released for those without a filter.
    """
    method = METHODS[cell.method]
    if method.noise_shape != "white" or cell.tests_once:
        return []
    return [Signal(), Released()] if method.low_pass_filter == "none" else [Signal()]


@torch.no_grad()
def accuracy(model: nn.Module, data: Loaded, rows: Any, *, split: str = "train") -> float:
    """Return the share of right predictions for some rows."""
    was_training, right, device = model.training, 0, next(model.parameters()).device
    model.eval()
    for first in range(0, len(rows), _AT_ONCE):
        batch = data.batch(rows[first : first + _AT_ONCE], split=split)
        found = model(batch["inputs"].to(device)).logits.argmax(dim=-1)
        right += int((found.cpu() == batch["labels"]).sum())
    model.train(was_training)
    return right / len(rows)
