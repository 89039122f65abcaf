"""Metrics of `evaluate`, from a local folder: in a training, and for GLUE where its own metric can be loaded."""

import numpy as np
import pytest
from transformers import EvalPrediction

from scripts.training import metrics
from scripts.training.metrics import glue_compute_metrics, load_metric
from tests.support.trainers import checked_trainer_of

METRIC = """
import datasets
import evaluate


class Hits(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references), "is_theirs": 1.0}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a metric, as `evaluate.load` takes it."""
    pytest.importorskip("evaluate", reason="evaluate is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "hits").mkdir()
    (tmp_path / "hits" / "hits.py").write_text(METRIC)
    return str(tmp_path / "hits")


def test_a_training_evaluates_with_a_metric_of_a_local_folder(tmp_path, folder):
    metric = load_metric(folder)

    def compute_metrics(predicted):
        guesses = predicted.predictions.argmax(axis=-1)
        return metric.compute(predictions=guesses, references=predicted.label_ids)

    trainer = checked_trainer_of(tmp_path, compute_metrics=compute_metrics, eval_strategy="steps", eval_steps=2)
    trainer.train()
    found = [logs for logs in trainer.state.log_history if "eval_accuracy" in logs]
    assert len(found) == 2
    assert all(logs["eval_is_theirs"] == 1.0 and "eval_majority_class_accuracy" in logs for logs in found)


def test_glue_takes_the_metric_where_there_is_one(folder, monkeypatch):
    monkeypatch.setattr(metrics, "load_metric", lambda path, name=None: load_metric(folder))
    logits, labels = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), np.array([1, 1, 1])
    assert glue_compute_metrics("sst2")(EvalPrediction(logits, labels)) == {
        "accuracy": pytest.approx(2 / 3),
        "is_theirs": 1.0,
    }


def test_without_the_hub_the_figures_are_our_own(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_EVALUATE_OFFLINE", "1")
    assert load_metric("no/such-metric") is None
    logits, labels = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), np.array([1, 1, 1])
    assert glue_compute_metrics("sst2")(EvalPrediction(logits, labels)) == {"accuracy": pytest.approx(2 / 3)}
