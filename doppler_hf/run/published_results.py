"""The results of a training that may be published, out of the logs of its trainer: for the model card and the picture.

Privacy: the logs hold no raw training loss. What they may hold is an evaluation of the training set, which ε does not cover.
It is shown where it is asked for, and left out of what is published.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.batching.shared_rows import SharedRows, shared_rows

CLOCKS: Final = ("_runtime", "_per_second", "_preparation_time")
# What an evaluation gets besides the user's metrics: what one answer for all rows reaches. These show how good a result is,
# and are no results themselves.
MAJORITY: Final = "majority_class_accuracy"
MEAN_LABEL: Final = "mean_label_loss"
MOST_FREQUENT_PREDICTED: Final = "most_frequent_predicted_share"
MOST_FREQUENT_RIGHT: Final = "most_frequent_right_share"
BASELINES: Final = (MAJORITY, MEAN_LABEL, MOST_FREQUENT_PREDICTED, MOST_FREQUENT_RIGHT)


@dataclass(frozen=True)
class Evaluation:
    """The results of the evaluations after a step, by their names without "eval_"."""

    step: int
    results: dict[str, float]


def evaluation_sets(evaluated: Any) -> dict[str, Any]:
    """Return the evaluation sets by their names; a single set has the name ""."""
    if isinstance(evaluated, Mapping) and not isinstance(getattr(evaluated, "column_names", None), list):
        return {str(name): each for name, each in evaluated.items()}
    return {"": evaluated}


def is_same_data(train_dataset: Any, evaluated: Any) -> bool:
    """Return whether an evaluation set is the training set, or the same data loaded or prepared a second time."""
    own = getattr(train_dataset, "_fingerprint", None)  # `datasets` gives equal data the same fingerprint
    return evaluated is train_dataset or (own is not None and getattr(evaluated, "_fingerprint", None) == own)


def training_rows_in(train_dataset: Any, evaluated: Any) -> dict[str, SharedRows]:
    """Return the evaluation sets that have rows of the training set, by their names.

    # Privacy: objects, fingerprints and places of rows decide, which are chosen by the user's code. No row is read.
    """
    found = {}
    for name, each in evaluation_sets(evaluated).items():
        if train_dataset is None or each is None or isinstance(each, str):
            continue
        if is_same_data(train_dataset, each):
            found[name] = SharedRows(len(train_dataset), len(train_dataset), True)
        elif shared := shared_rows(train_dataset, each):
            found[name] = shared
    return found


def evaluations_of(trainer: Any) -> list[Evaluation]:
    """Return a trainer's evaluations of data that it does not train on, without clocks and ε, one for each step."""
    found: dict[int, dict[str, float]] = {}
    own = trainer.evaluations_of_training_data
    # Privacy: the logs do not say which evaluation set a result comes from, so all results are left out.
    if trainer.sets_with_training_rows or training_rows_in(trainer.train_dataset, trainer.eval_dataset):
        return []
    for log in trainer.state.log_history:
        results = {
            name.removeprefix("eval_"): value
            for name, value in log.items()
            if name.startswith("eval_")
            and not name.endswith(CLOCKS)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        }
        if results and not any(log is each for each in own):
            found.setdefault(int(log.get("step", 0)), {}).update(results)
    return [Evaluation(step, results) for step, results in sorted(found.items())]


def training_losses_of(ledger: PrivacyLedger, log_history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the logged training losses by their steps, if all of them have noise and ε covers them."""
    # Privacy: the logs do not keep a raw loss. If there is one all the same, for example from a run without noise, it is
    # left out here.
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
