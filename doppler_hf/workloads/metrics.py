"""GLUE's own metric of each task, as an `evaluate.Metric` that needs no network: `evaluate.load` downloads code first."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import EvalPrediction

from doppler_hf.workloads.data_sources import glue_task

if TYPE_CHECKING:
    from evaluate import Metric, MetricInfo


def glue_metric(task_name: str) -> "Metric":
    """Make the metric of a GLUE task, with the names and values of `evaluate.load("glue", task_name)`.

    Raises:
        ValueError: If `task_name` is no GLUE task.
    """
    import evaluate
    from datasets import Features, Value

    task = glue_task(task_name)
    value = Value("float32" if task.is_regression else "int64")  # an integer would round the similarities of stsb

    class GlueMetric(evaluate.Metric):
        def _info(self) -> "MetricInfo":
            features = Features({"predictions": value, "references": value})
            return evaluate.MetricInfo(description=", ".join(task.metrics), citation="", features=features)

        def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
            return {name: _score(name, predictions, references) for name in task.metrics}

    return GlueMetric(task_name)


def glue_compute_metrics(task_name: str) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the `compute_metrics` of a `Trainer` on one GLUE task.

    Args:
        task_name: One of the nine GLUE tasks.

    Returns:
        A function from the logits, shape (examples, classes) or (examples, 1) for stsb, to the scores of the task.

    Raises:
        ValueError: If `task_name` is no GLUE task.
    """
    metric, is_regression = glue_metric(task_name), glue_task(task_name).is_regression

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits = _logits(prediction)
        predicted = logits[:, 0] if is_regression else logits.argmax(axis=-1)
        scores: dict[str, float] = metric.compute(predictions=predicted, references=prediction.label_ids)
        return scores

    return compute_metrics


def accuracy_from_logits(prediction: EvalPrediction) -> dict[str, float]:
    """Score class logits, shape (examples, classes), by accuracy: the `compute_metrics` of image classification."""
    return {"accuracy": _score("accuracy", _logits(prediction).argmax(axis=-1), prediction.label_ids)}


def _logits(prediction: EvalPrediction) -> np.ndarray[Any, np.dtype[Any]]:
    # Some models (BART, T5) return more than their logits. The Trainer then passes a tuple that begins with the logits.
    predictions = prediction.predictions
    return np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)


def _score(name: str, predictions: Any, references: Any) -> float:
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    scores: dict[str, Callable[[], float]] = {
        "accuracy": lambda: accuracy_score(references, predictions),
        "f1": lambda: f1_score(references, predictions),
        "matthews_correlation": lambda: matthews_corrcoef(references, predictions),
        "pearson": lambda: pearsonr(predictions, references)[0],
        "spearmanr": lambda: spearmanr(predictions, references)[0],
    }
    return float(scores[name]())
