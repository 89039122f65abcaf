"""Per-example losses are what transformers' own heads average, and depend on their own example alone."""

import pytest
import torch

from doppler_hf.losses import classification_losses
from tests.conftest import pad, text_data, tiny_bert


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        (dict(num_labels=3), torch.tensor([0, 1, 2, 0])),
        (dict(num_labels=1), torch.tensor([0.5, -1.0, 2.0, 3.0])),
        (dict(num_labels=2, problem_type="regression"), torch.randn(4, 2)),
        (dict(num_labels=3), torch.tensor([[1.0, 0.0, 1.0]] * 4)),
    ],
)
def test_mean_equals_the_models_own_loss(overrides, labels):
    model = tiny_bert(**overrides)
    inputs = pad(text_data(4)) | {"labels": labels}
    with torch.no_grad():
        outputs = model(**inputs)
    losses = classification_losses(outputs.logits, labels, problem_type=overrides.get("problem_type"))
    assert losses.shape == (4,)
    torch.testing.assert_close(losses.mean(), outputs.loss)


def test_an_example_does_not_see_its_neighbours():
    model = tiny_bert()
    short = {"input_ids": [9, 8, 7], "attention_mask": [1] * 3, "labels": 0}
    long = {"input_ids": [7] * 12, "attention_mask": [1] * 12, "labels": 1}

    def first_gradient(examples):
        inputs = pad(examples)
        labels = inputs.pop("labels")
        loss = classification_losses(model(**inputs).logits, labels)[0]
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    alone, with_long = first_gradient([short]), first_gradient([short, long])
    torch.testing.assert_close(alone, with_long, atol=1e-6, rtol=1e-4)


def test_half_precision_logits_give_float32_losses():
    losses = classification_losses(torch.zeros(2, 3, dtype=torch.bfloat16), torch.tensor([0, 1]))
    assert losses.dtype == torch.float32


@pytest.mark.parametrize(
    ("logits", "labels", "problem_type", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), None, r"labels of shape \(2,\), got \(2, 3\)"),
        (torch.zeros(2, 3), torch.zeros(2), None, r"labels of shape \(2, 3\), got \(2,\)"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), "ranking", "got 'ranking'"),
    ],
)
def test_what_does_not_fit_is_refused(logits, labels, problem_type, message):
    with pytest.raises(ValueError, match=message):
        classification_losses(logits, labels, problem_type=problem_type)
