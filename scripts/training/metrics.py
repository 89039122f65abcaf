"""GLUE's own scores of each task: by `evaluate` where its metric can be loaded, or by scikit-learn and SciPy.

Names and values are the same. `evaluate.load` downloads the code of a metric, for which the hub must answer.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import EvalPrediction

from scripts.training.data_sources import glue_task


def glue_compute_metrics(task_name: str) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the `compute_metrics` of a `Trainer` on one GLUE task, with the names and values of `evaluate`'s.

    The logits have shape (examples, classes), or (examples, 1) for stsb.
    """
    task = glue_task(task_name)
    metric = load_metric("glue", task_name)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits = _logits(prediction)
        predicted = logits[:, 0] if task.is_regression else logits.argmax(axis=-1)
        if metric is not None:
            return dict(metric.compute(predictions=predicted, references=prediction.label_ids))
        return {name: _score(name, predicted, prediction.label_ids) for name in task.metrics}

    return compute_metrics


def load_metric(path: str, name: str | None = None) -> Any:
    """Return a metric of `evaluate`, by its name on the hub or a local folder; None without the package or the metric."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # OSError: no connection, or no such metric
        import evaluate

        return evaluate.load(path, name)
    return None


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

    scores: dict[str, Callable[[Any, Any], Any]] = {
        "accuracy": accuracy_score,
        "f1": f1_score,
        "matthews_correlation": matthews_corrcoef,
        "pearson": lambda *pair: pearsonr(*pair)[0],
        "spearmanr": lambda *pair: spearmanr(*pair)[0],
    }
    return float(scores[name](references, predictions))
