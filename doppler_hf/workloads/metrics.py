"""GLUE's own metric for each task, as an `evaluate.Metric` that needs no network.

`evaluate.load("glue", task)` downloads its code from the hub before it computes anything; the scores themselves are
five functions of scikit-learn and SciPy. Which task has which: Wang et al., *GLUE* (ICLR 2019), Table 1.
"""

from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
from transformers import EvalPrediction

GLUE_METRICS: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation",),
    "mnli": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "qnli": ("accuracy",),
    "qqp": ("accuracy", "f1"),
    "rte": ("accuracy",),
    "sst2": ("accuracy",),
    "stsb": ("pearson", "spearmanr"),
    "wnli": ("accuracy",),
}

_DESCRIPTION = "The metric of one GLUE task: accuracy, F1, Matthews correlation, or Pearson and Spearman correlation."
_INPUTS = """
Args:
    predictions: the predicted classes, or for stsb the predicted similarities.
    references: the true classes, or for stsb the true similarities.
Returns:
    The scores of the task by name: accuracy, f1, matthews_correlation, pearson, spearmanr.
"""


class GlueMetric(evaluate.Metric):
    """The metric of the GLUE task `config_name`; same names and values as `evaluate.load("glue", config_name)`.

    Raises:
        ValueError: If `config_name` is no GLUE task.

    Example:
        >>> GlueMetric("sst2").compute(predictions=[1, 0, 1], references=[1, 1, 1])
        {'accuracy': 0.6666666666666666}
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in GLUE_METRICS:
            raise ValueError(f"no GLUE task {self.config_name!r}; choose one of {', '.join(GLUE_METRICS)}")
        # evaluate casts what it stores: an int feature would round the similarities of stsb.
        value = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {name: _SCORES[name](predictions, references) for name in GLUE_METRICS[self.config_name]}


def glue_compute_metrics(task_name: str) -> Callable[[EvalPrediction], dict[str, float]]:
    """Make the `compute_metrics` of a `Trainer` on one GLUE task.

    Args:
        task_name: One of the nine GLUE tasks.

    Returns:
        A function from the logits, shape (examples, classes) or (examples, 1) for stsb, to the scores of the task.

    Raises:
        ValueError: If `task_name` is no GLUE task.
    """
    metric = GlueMetric(task_name)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits = _logits(prediction)
        predicted = logits[:, 0] if task_name == "stsb" else logits.argmax(axis=-1)
        scores: dict[str, float] = metric.compute(predictions=predicted, references=prediction.label_ids)
        return scores

    return compute_metrics


def accuracy_from_logits(prediction: EvalPrediction) -> dict[str, float]:
    """Score class logits, shape (examples, classes), by accuracy: the `compute_metrics` of image classification."""
    return {"accuracy": _accuracy(_logits(prediction).argmax(axis=-1), prediction.label_ids)}


def _logits(prediction: EvalPrediction) -> np.ndarray[Any, np.dtype[Any]]:
    # Some models (BART, T5) return more than their logits; the Trainer then hands over a tuple that begins with these.
    predictions = prediction.predictions
    return np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)


def _accuracy(predictions: Any, references: Any) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions))


def _f1(predictions: Any, references: Any) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(references, predictions))


def _matthews_correlation(predictions: Any, references: Any) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(references, predictions))


def _pearson(predictions: Any, references: Any) -> float:
    from scipy.stats import pearsonr

    return float(pearsonr(predictions, references)[0])


def _spearmanr(predictions: Any, references: Any) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(predictions, references)[0])


_SCORES: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews_correlation,
    "pearson": _pearson,
    "spearmanr": _spearmanr,
}
