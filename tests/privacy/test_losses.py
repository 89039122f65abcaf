"""Per-example losses are what transformers' own heads average, and depend on their own example alone."""

import pytest
import torch
from transformers.loss.loss_utils import ForQuestionAnsweringLoss

from doppler_hf.privacy.losses import answer_losses, classification_losses
from doppler_hf.privacy.token_losses import next_labels, token_losses
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert


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


@pytest.mark.parametrize(
    ("logits", "labels", "problem_type", "code", "found"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3).long(), None, "wrong-shape", r"\(batch,\); .*2 and 2 "),
        (torch.zeros(2, 3), torch.zeros(2), None, "wrong-shape", r"\(batch, num_labels\); .*2 and 1 "),
        (torch.zeros(2, 3), torch.zeros(2).long(), "ranking", "unknown-value", "'ranking'"),
    ],
)
def test_what_does_not_fit_is_refused(logits, labels, problem_type, code, found):
    with refused(code, match=found):
        classification_losses(logits, labels, problem_type=problem_type)


def token_batch(lengths, *, classes=7, dtype=torch.float64):
    """Random logits, and random labels in which the last tokens of each row have none."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(lengths), max(lengths), classes, generator=generator, dtype=dtype)
    labels = torch.randint(classes, logits.shape[:2], generator=generator)
    return logits, labels.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], -100)


@pytest.mark.parametrize("shift", [True, False])
def test_an_example_without_labelled_tokens_has_no_loss_and_no_gradient(shift):
    logits, labels = token_batch([5, 1, 3])
    labels[1] = -100
    logits.requires_grad_()
    losses = token_losses(logits, next_labels(labels) if shift else labels)
    assert losses[1] == 0.0
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert torch.all(gradient[1] == 0.0)
    assert torch.all(gradient[[0, 2]].abs().sum(dim=(1, 2)) > 0)
    assert gradient.isfinite().all()


def test_half_precision_logits_give_float32_losses():
    logits, labels = token_batch([5, 3], dtype=torch.bfloat16)
    for losses_of in (lambda x: token_losses(x, labels), lambda x: classification_losses(x[:, 0], labels[:, 0])):
        assert losses_of(logits).dtype == torch.float32
        torch.testing.assert_close(losses_of(logits), losses_of(logits.float()), atol=0, rtol=0)


@pytest.mark.parametrize("shift", [True, False])
def test_one_tensor_of_the_size_of_the_logits_is_kept_for_the_backward_pass(shift):
    logits, labels = token_batch([50, 50], classes=1000, dtype=torch.float32)
    logits.requires_grad_()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.numel()}) or t, lambda t: t):
        token_losses(logits, next_labels(labels) if shift else labels)
    assert logits.numel() <= sum(kept.values()) < 1.01 * logits.numel()


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(
    ("logits", "labels", "code", "found"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 4).long(), "wrong-shape", "3 and 2 .*pad"),
        (torch.zeros(2, 4), torch.zeros(2, 4).long(), "wrong-shape", "2 and 2 "),
        (torch.zeros(2, 3, 4), torch.zeros(2).long(), "wrong-shape", "3 and 1 "),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), "labels-not-indices", r"torch\.float32.*torch\.long"),
    ],
)
def test_token_labels_that_do_not_fit_are_refused(logits, labels, code, found):
    with refused(code, match=found):
        token_losses(logits, labels)


@pytest.mark.parametrize("positions", [[2, 5], [7, 8], [-1, 100]])
@pytest.mark.parametrize("one", [(), (1,)])
def test_an_answers_loss_is_transformers_of_that_example_alone(positions, one):
    torch.manual_seed(0)
    start, end = torch.randn(2, 3, 8)
    first, last = torch.tensor([[1, *positions], [4, *positions]]).view(2, 3, *one)
    losses = answer_losses((start, end), (first, last))
    for row, loss in enumerate(losses):
        # Transformers takes the mean over the examples whose position is inside, of which there may be none here.
        inside = [
            ForQuestionAnsweringLoss(x[row, None], x[row, None], p[row : row + 1], p[row : row + 1])
            for x, p in ((start, first), (end, last))
        ]
        torch.testing.assert_close(loss, torch.stack(inside).nan_to_num().mean())


def test_an_answers_loss_does_not_follow_the_padding():
    torch.manual_seed(0)
    logits = torch.randn(2, 2, 9, requires_grad=True)
    mask = (torch.arange(9) < torch.tensor([[5], [9]])).long()
    positions = torch.tensor([3, 8]), torch.tensor([4, 7])
    losses = answer_losses((logits[0], logits[1]), positions, mask=mask)
    torch.testing.assert_close(
        losses[:1], answer_losses((logits[0, :1, :5], logits[1, :1, :5]), (positions[0][:1], positions[1][:1]))
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert not gradient[:, 0, 5:].any()
    assert gradient[:, 0, :5].all()
    assert gradient[:, 1].all()


def test_an_answer_in_the_padding_adds_nothing():
    logits = torch.randn(1, 6, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]])
    for positions, expected in (((4, 5), 0.0), ((1, 5), 0.5)):
        first, last = (torch.tensor([position]) for position in positions)
        loss = answer_losses((logits, logits), (first, last), mask=mask)
        torch.testing.assert_close(loss, expected * answer_losses((logits[:, :3],) * 2, (torch.tensor([1]),) * 2))
    (gradient,) = torch.autograd.grad(answer_losses((logits, logits), (last, last), mask=torch.zeros(1, 6)), logits)
    assert not gradient.any()


@pytest.mark.usefixtures("unchecked_arrays")
def test_several_answers_of_an_example_are_refused():
    with refused("wrong-shape"):
        answer_losses((torch.zeros(2, 4),) * 2, (torch.zeros(2, 3, dtype=torch.long),) * 2)
