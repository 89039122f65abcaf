"""GLUE's metrics against SciPy and counts by hand."""

import numpy as np
import pytest
from transformers import EvalPrediction

from scripts.training.metrics import accuracy_from_logits, glue_compute_metrics

pytestmark = pytest.mark.usefixtures("own_caches")

# 8 examples: 3 true positives, 1 false positive, 2 false negatives, 2 true negatives.
REFERENCES = np.array([1, 1, 1, 1, 1, 0, 0, 0])
LOGITS = np.eye(2)[[1, 1, 1, 0, 0, 1, 0, 0]]
MATTHEWS = (3 * 2 - 1 * 2) / np.sqrt((3 + 1) * (3 + 2) * (2 + 1) * (2 + 2))


@pytest.mark.parametrize(
    ("task", "by_hand"),
    [
        ("sst2", {"accuracy": 5 / 8}),
        ("mrpc", {"accuracy": 5 / 8, "f1": 2 * 3 / (2 * 3 + 1 + 2)}),
        ("cola", {"matthews_correlation": MATTHEWS}),
    ],
)
def test_scores_by_hand(task, by_hand):
    for predictions in (LOGITS, (LOGITS, np.zeros((8, 7)))):  # some models return more than their logits
        prediction = EvalPrediction(predictions=predictions, label_ids=REFERENCES)
        assert glue_compute_metrics(task)(prediction) == pytest.approx(by_hand, rel=1e-12)
        assert accuracy_from_logits(prediction) == {"accuracy": 5 / 8}
