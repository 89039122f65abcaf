"""One private training of a task, and the log of all trainings of a study, which survives an interruption at any moment.

A run's noise and draws follow its seed, so that methods can be paired. Nothing here is meant to be private: the data are
public, and every ε is what the same training would cost.
"""

import contextlib
import functools
import hashlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import EvalPrediction, PrinterCallback, TrainerCallback, set_seed

import doppler_hf
from doppler_hf.run.planning.filter_and_noise import chosen_filter
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments
from scripts.studies.data import Data
from scripts.studies.networks import Trained, with_trained
from scripts.studies.studies import Method
from scripts.studies.tasks import Task


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
    """Train once, and return the accuracies on the parts `tuning` and `report`, and the numbers of the mechanism."""
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
            report_train_loss="none",  # all of ε is for the gradient, as in the papers
            rehearse=False,
            allow_any_learning_rate=True,  # a grid of rates may reach a hundredfold
            seed=run.seed,
            noise_seed=run.seed,
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
            compute_metrics=accuracy_of,
            callbacks=[*callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        if floor_fraction is not None:
            args.adam_bc_floor = floor_fraction * trainer.privacy.settled_noise_std**2
        trainer.train()
        scores = {part: trainer.evaluate(getattr(data, part))["eval_accuracy"] for part in ("tuning", "report")}
    statement = trainer.privacy.statement
    return scores | {
        "noise_multiplier": statement.noise_multiplier,
        "noise_shape": statement.noise_shape,
        "low_pass_filter": str(chosen_filter(args, statement)),
        "first_rate": trainer.optimizer.optimizer.defaults["lr"],
        "parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "num_examples": len(data.train),
        "seconds": round(time.perf_counter() - start, 1),
    }


def accuracy_of(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of right predictions."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@functools.cache
def code_digest(folders: tuple[Path, ...] = (Path(doppler_hf.__file__).parent, Path(__file__).parent)) -> str:
    """Return 8 hexadecimal digits for the code of some folders: by default the package and the studies."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def say(line: str) -> None:
    """Write a line of progress, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


class Log:
    """The results of all runs in a file of JSON lines, which nobody else writes to; `train_one` makes those that miss."""

    def __init__(self, path: Path, train_one: Callable[[Run], dict[str, Any]]) -> None:
        self._path, self._train = path, train_one
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            written = file.read()
            end = written.rfind(b"\n") + 1
            file.truncate(end)  # the rest of a line that was cut short
        rows = map(json.loads, written[:end].decode().splitlines())
        self._results = {Run(**{each.name: row[each.name] for each in fields(Run)}): row for row in rows}
        if others := sum(row.get("code") != code_digest() for row in self._results.values()):
            say(
                f"{others} of the {len(self)} runs of {path} are of other code, and are not run again. Give another --out "
                "for runs by this code."
            )

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, run: Run) -> dict[str, Any]:
        """Return a run's result. One that is missing is trained, and written as it ends."""
        if run not in self._results:
            start = time.perf_counter()
            result = self._results[run] = asdict(run) | self._train(run) | {"code": code_digest()}
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            say(
                f"  lr {result['first_rate']:.3g}, seed {run.seed}: {100 * result['report']:.2f} % "
                f"({100 * result['tuning']:.2f} % to choose by), {time.perf_counter() - start:.0f} s"
            )
        return self._results[run]
