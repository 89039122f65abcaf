"""One private training of a task.

A run's noise and draws follow its seed, so that methods can be paired. Nothing here is meant to be private: the data are
public, and every ε is what the same training would cost.
"""

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import EvalPrediction, PrinterCallback, TrainerCallback, set_seed

from doppler_hf.reproduce.data import Data
from doppler_hf.reproduce.networks import Trained, with_trained
from doppler_hf.reproduce.studies import Method
from doppler_hf.reproduce.tasks import Task
from doppler_hf.run.choices import chosen_filter
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments


@dataclass(frozen=True)
class Run:
    """All that determines a run's result, but the code.

    Attributes:
        task: Its name.
        data: The digest of its data.
        epsilon: ε.
        trained: Which weights are trained.
        arguments: The task's and the method's, as JSON; the others are the defaults of `DopplerTrainer`.
        learning_rate: The first; None for that of the rule.
        seed: Of initialization, draws and noise.
    """

    task: str
    data: str
    epsilon: float
    trained: Trained
    arguments: str
    learning_rate: float | None
    seed: int

    @classmethod
    def of(
        cls, name: str, task: Task, data: Data, method: Method, epsilon: float, learning_rate: float | None, seed: int
    ) -> "Run":
        """Return the run of a task by a method."""
        arguments = json.dumps({**task.settings, **method.arguments}, sort_keys=True)
        return cls(name, data.digest, epsilon, method.trained or task.trained, arguments, learning_rate, seed)


class StudyTrainer(DopplerTrainer):
    """A trainer of the tasks' networks."""

    def compute_per_sample_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the cross entropy of each example, shape (batch,)."""
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


def train(run: Run, *, data: Data, callbacks: Sequence[TrainerCallback] = ()) -> dict[str, Any]:
    """Train once.

    Args:
        run: The run.
        data: Its data.
        callbacks: Callbacks of the trainer. A log of runs does not know of them.

    Returns:
        `tuning` and `report`, the accuracies on these parts, and the numbers of the mechanism.
    """
    start = time.perf_counter()
    arguments = json.loads(run.arguments)
    floor_fraction = arguments.pop("floor_fraction", None)
    set_seed(run.seed)
    network = with_trained(data.network(), run.trained)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = DopplerTrainingArguments(
            output_dir=folder,
            target_epsilon=run.epsilon,
            learning_rate=run.learning_rate,
            seed=run.seed,
            noise_seed=run.seed,
            accountant="pld",
            per_device_eval_batch_size=100,
            save_strategy="no",
            logging_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            **arguments,
        )
        trainer = StudyTrainer(
            model=network,
            args=args,
            train_dataset=data.train,
            data_collator=data.collator,
            compute_metrics=_accuracy,
            callbacks=[*callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        if floor_fraction is not None:
            args.adam_bc_floor = floor_fraction * trainer.private_run.settled_noise_std**2
        trainer.train()
        scores = {part: trainer.evaluate(getattr(data, part))["eval_accuracy"] for part in ("tuning", "report")}
    statement = trainer.private_run.statement
    return scores | {
        "noise_multiplier": statement.noise_multiplier,
        "noise_shape": statement.noise_shape,
        "low_pass_filter": str(chosen_filter(args, statement)),
        "first_rate": trainer.optimizer.optimizer.defaults["lr"],
        "parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "num_examples": len(data.train),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
