"""The results of a training that may be published, out of the logs of its trainer: for the model card and the picture.

Privacy: the logs hold no raw training loss. What they may hold is an evaluation of the training set, which ε does not cover.
It is shown where it is asked for, and left out of what is published.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from doppler_hf.privacy import PrivacyLedger

_CLOCKS: Final = ("_runtime", "_per_second", "_preparation_time")
# What tells how good a result is without being one of the model's.
BASELINES: Final = ("majority_class_accuracy", "mean_label_loss")


@dataclass(frozen=True)
class Evaluation:
    """The results of the evaluations after a step, by their names without "eval_"."""

    step: int
    results: dict[str, float]


def is_training_data(train_dataset: Any, evaluated: Any) -> bool:
    """Return whether what is evaluated is or has the training set, or the same data loaded or prepared once more."""
    sets = evaluated.values() if isinstance(evaluated, Mapping) and not hasattr(evaluated, "column_names") else [evaluated]
    own = getattr(train_dataset, "_fingerprint", None)  # of `datasets`: the same for the same data
    return train_dataset is not None and any(
        each is train_dataset or (own is not None and getattr(each, "_fingerprint", None) == own) for each in sets
    )


def evaluations_of(trainer: Any) -> list[Evaluation]:
    """Return a trainer's evaluations of data that it does not train on, without clocks and ε, one for each step."""
    found: dict[int, dict[str, float]] = {}
    own = trainer.evaluations_of_training_data
    # Privacy: of the whole training set the logs say nothing about where a result comes from.
    if is_training_data(trainer.train_dataset, trainer.eval_dataset):
        return []
    for log in trainer.state.log_history:
        results = {
            name.removeprefix("eval_"): value
            for name, value in log.items()
            if name.startswith("eval_")
            and not name.endswith(_CLOCKS)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        }
        if results and not any(log is each for each in own):
            found.setdefault(int(log.get("step", 0)), {}).update(results)
    return [Evaluation(step, results) for step, results in sorted(found.items())]


def training_losses_of(ledger: PrivacyLedger, log_history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the logged training losses by their steps, if all of them have noise and ε covers them."""
    # Privacy: a raw loss is not kept in the logs. Should one be there, as of a run without noise, it stays out all the same.
    if any(each.statement.train_loss != "private" for each in ledger.runs) or ledger.why_not_private is not None:
        return {}
    return {int(log["step"]): float(log["loss"]) for log in log_history if "loss" in log and "step" in log}


def main_metrics(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the metrics that say most, none of them a loss: accuracies if there are any, or all."""
    names = dict.fromkeys(name for each in evaluations for name in each.results)
    metrics = [name for name in names if not name.endswith(("loss", *BASELINES))]
    return [name for name in metrics if name.endswith("accuracy")] or metrics


def losses(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the names of the losses."""
    names = dict.fromkeys(name for each in evaluations for name in each.results)
    return [name for name in names if name.endswith("loss") and not name.endswith(BASELINES)]
