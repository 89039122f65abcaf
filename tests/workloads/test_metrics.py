"""GLUE's metrics against scikit-learn, SciPy and counts by hand."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk
from transformers import EvalPrediction

from doppler_hf.workloads.metrics import accuracy_from_logits, glue_compute_metrics, glue_metric

# 8 examples: 3 true positives, 1 false positive, 2 false negatives, 2 true negatives.
REFERENCES = [1, 1, 1, 1, 1, 0, 0, 0]
PREDICTIONS = [1, 1, 1, 0, 0, 1, 0, 0]


pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.mark.parametrize("task", ["sst2", "mnli", "qnli", "rte", "wnli"])
def test_accuracy_by_hand(task):
    assert glue_metric(task).compute(predictions=PREDICTIONS, references=REFERENCES) == {"accuracy": 5 / 8}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_accuracy_and_f1_by_hand(task):
    scores = glue_metric(task).compute(predictions=PREDICTIONS, references=REFERENCES)
    assert scores == pytest.approx({"accuracy": 5 / 8, "f1": 2 * 3 / (2 * 3 + 1 + 2)}, rel=1e-12)


def test_matthews_correlation_by_hand():
    scores = glue_metric("cola").compute(predictions=PREDICTIONS, references=REFERENCES)
    by_hand = (3 * 2 - 1 * 2) / np.sqrt((3 + 1) * (3 + 2) * (2 + 1) * (2 + 2))
    assert scores == pytest.approx({"matthews_correlation": by_hand}, rel=1e-12)


def test_correlations_against_scipy_and_numpy():
    generator = np.random.default_rng(0)
    references = generator.uniform(0, 5, 50).astype(np.float32)
    predictions = references + generator.normal(0, 1, 50).astype(np.float32)
    scores = glue_metric("stsb").compute(predictions=predictions, references=references)
    assert set(scores) == {"pearson", "spearmanr"}
    assert scores["pearson"] == pytest.approx(np.corrcoef(predictions, references)[0, 1], rel=1e-5)
    ranks = stats.rankdata(predictions), stats.rankdata(references)
    assert scores["spearmanr"] == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=1e-9)


def test_similarities_are_not_rounded():
    scores = glue_metric("stsb").compute(predictions=[0.1, 0.2, 0.4], references=[0.0, 0.3, 0.4])
    assert scores["pearson"] == pytest.approx(stats.pearsonr([0.1, 0.2, 0.4], [0.0, 0.3, 0.4])[0], rel=1e-5)


def test_batches_accumulate():
    metric = glue_metric("mrpc")
    metric.add_batch(predictions=PREDICTIONS[:3], references=REFERENCES[:3])
    metric.add_batch(predictions=PREDICTIONS[3:], references=REFERENCES[3:])
    scores = metric.compute()
    assert scores["f1"] == pytest.approx(sk.f1_score(REFERENCES, PREDICTIONS), rel=1e-12)


def test_unknown_task_lists_the_nine():
    with pytest.raises(ValueError, match=r"task_name must be one of cola, mnli, .*wnli, got 'sst-2'\."):
        glue_metric("sst-2")


@pytest.mark.parametrize("as_tuple", [False, True])
def test_compute_metrics_takes_logits(as_tuple):
    logits = np.array([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    predictions = (logits, np.zeros((3, 7))) if as_tuple else logits
    prediction = EvalPrediction(predictions=predictions, label_ids=np.array([1, 1, 1]))
    assert glue_compute_metrics("sst2")(prediction) == pytest.approx({"accuracy": 2 / 3})
    assert accuracy_from_logits(prediction) == pytest.approx({"accuracy": 2 / 3})


def test_compute_metrics_of_a_regression():
    prediction = EvalPrediction(predictions=np.array([[0.5], [1.0], [4.0]]), label_ids=np.array([0.0, 2.0, 3.0]))
    scores = glue_compute_metrics("stsb")(prediction)
    assert scores["spearmanr"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(stats.pearsonr([0.5, 1.0, 4.0], [0.0, 2.0, 3.0])[0], rel=1e-5)
