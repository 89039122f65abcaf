"""The results of a training that may be published, out of the logs of its trainer: for the model card and the picture.

Privacy: the logs hold no raw training loss. What they may hold is an evaluation of the training set, which ε does not cover.
It is shown where it is asked for, and left out of what is published.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.batching.shared_rows import training_rows_in

CLOCKS: Final = ("_runtime", "_per_second", "_preparation_time")
# What an evaluation gets besides the user's metrics: what one answer for all rows reaches. These show how good a result is,
# and are no results themselves.
MAJORITY: Final = "majority_class_accuracy"
MEAN_LABEL: Final = "mean_label_loss"
MOST_FREQUENT_PREDICTED: Final = "most_frequent_predicted_share"
MOST_FREQUENT_RIGHT: Final = "most_frequent_right_share"
BASELINES: Final = (MAJORITY, MEAN_LABEL, MOST_FREQUENT_PREDICTED, MOST_FREQUENT_RIGHT)
# Before the name of a metric: over how many users its mean was taken, where some were left out.
USERS_WITH: Final = "users_with_"
_OF_THE_END: Final = "total_flos"  # Transformers logs this once, at the end of a training.


@dataclass(frozen=True)
class Evaluation:
    """The results of the evaluations after a step, by their names without "eval_"."""

    step: int
    results: dict[str, float]


@dataclass(frozen=True)
class PublishedResults:
    """The evaluations of a trainer, as far as they may be published.

    Attributes:
        evaluations: The evaluations while the model trained, one for each step.
        of_weights: The evaluations of the trainer's weights, at their step and after the training; None if there are none.
        best_by: The metric for the best model, without "eval_"; None if there is none.
        is_chosen: Whether the weights are those of the best checkpoint.
    """

    evaluations: Sequence[Evaluation] = ()
    of_weights: Evaluation | None = None
    best_by: str | None = None
    is_chosen: bool = False

    def main_metrics(self) -> list[str]:
        """Return the metrics that say most: that for the best model, and then accuracies if there are any, or all."""
        metrics = [name for name in self._names() if not name.endswith(("loss", *BASELINES)) and USERS_WITH not in name]
        main = [name for name in metrics if name.endswith("accuracy")] or metrics
        return [*self._best_of(metrics), *(name for name in main if name != self.best_by)]

    def losses(self) -> list[str]:
        """Return the names of the losses, first that for the best model."""
        found = [
            name
            for name in self._names()
            if name.endswith("loss") and not name.endswith(BASELINES) and USERS_WITH not in name
        ]
        return [*self._best_of(found), *(name for name in found if name != self.best_by)]

    @property
    def curve(self) -> Sequence[Evaluation]:
        """The evaluations to draw: those while the model trained, or else the one after it."""
        return self.evaluations or ([] if self.of_weights is None else [self.of_weights])

    def _names(self) -> list[str]:
        return [*dict.fromkeys(name for each in self.curve for name in each.results)]

    def _best_of(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name == self.best_by]


def published_results(trainer: Any) -> PublishedResults:
    """Return a trainer's evaluations of data that it does not train on, without clocks and ε."""
    own = trainer.evaluations_of_training_data
    # Privacy: the logs do not say which evaluation set a result comes from, so all results are left out.
    if trainer.sets_with_training_rows or training_rows_in(trainer.train_dataset, trainer.eval_dataset):
        return PublishedResults()
    during: dict[int, dict[str, float]] = {}
    after: dict[str, float] = {}
    has_ended, last = False, 0
    for log in trainer.state.log_history:
        has_ended |= _OF_THE_END in log
        results = _results_in(log)
        if results and not any(log is each for each in own):
            last = int(log.get("step", 0))
            (after if has_ended else during.setdefault(last, {})).update(results)
    chosen = None if trainer._run is None else trainer._run.chosen_step
    step = last if chosen is None else chosen
    of_weights = during.get(step, {}) | after
    best_by = trainer.args.metric_for_best_model
    return PublishedResults(
        [Evaluation(step, results) for step, results in sorted(during.items())],
        Evaluation(step, of_weights) if of_weights else None,
        best_by=None if best_by is None else best_by.removeprefix("eval_"),
        is_chosen=chosen is not None,
    )


def _results_in(log: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix("eval_"): value
        for name, value in log.items()
        if name.startswith("eval_")
        and not name.endswith(CLOCKS)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def training_losses_of(ledger: PrivacyLedger, log_history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the logged training losses by their steps, if all of them have noise and ε covers them."""
    # Privacy: the logs do not keep a raw loss. If there is one all the same, for example from a run without noise, it is
    # left out here.
    if any(each.statement.train_loss != "private" for each in ledger.runs) or ledger.why_not_private is not None:
        return {}
    return {int(log["step"]): float(log["loss"]) for log in log_history if "loss" in log and "step" in log}
