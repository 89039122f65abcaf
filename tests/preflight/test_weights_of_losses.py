"""Weights that come with losses multiply clipped gradients, and a factor that clipping cancels is told of."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from doppler_hf import DopplerTrainer
from doppler_hf.audit.neighbours import neighbour_distances
from doppler_hf.audit.trainer import AuditTrainer
from doppler_hf.errors import Refusal
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, arguments, trained, trainer_of

OF_CLASSES = torch.tensor([0.25, 1.0, 0.5])


class Weighted(DopplerTrainer):
    """Class weights that are applied behind clipping."""

    of_classes = OF_CLASSES

    def compute_per_sample_loss(self, model, inputs):
        self.seen = {name: value.clone() for name, value in inputs.items()}
        labels = inputs.pop("labels")
        losses = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return losses, self.of_classes[labels]


def clipped_alone(trainer, *, bound):
    """Return the weighted sum of clipped gradients of the examples that were seen last, by plain autograd, one by one."""
    model = trainer.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    labels, total = trainer.seen["labels"], [torch.zeros_like(p) for p in parameters]
    for row in range(len(labels)):
        inputs = {name: value[row : row + 1] for name, value in trainer.seen.items() if name != "labels"}
        loss = F.cross_entropy(model(**inputs).logits, labels[row : row + 1])
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        factor = OF_CLASSES[labels[row]] * min(1.0, bound / float(norm))
        total = [a + factor * g for a, g in zip(total, gradients, strict=True)]
    return total


def test_clipped_gradients_are_multiplied_by_the_weights(tmp_path):
    found = []

    def look(model, **_):
        found.append([p.grad.clone() for p in model.parameters()])

    options = dict(
        noise_multiplier=0.0, clipping="vanilla", per_sample_max_grad_norm=0.5, max_steps=1, report_train_loss="raw"
    )
    model = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    trainer = trainer_of(
        tmp_path, cls=Weighted, model=model, callbacks=[On(pre_optimizer_step=look)], per_device_train_batch_size=8,
        gradient_accumulation_steps=1, noise_seed=1, learning_rate=0.0, rehearse=False, **options,
    )  # fmt: skip
    trainer.train()
    expected = clipped_alone(trainer, bound=0.5)
    size = trainer.privacy.statement.expected_batch_size
    assert sum(len(g) for g in found) > 0
    for sum_of_one, gradient in zip(expected, found[0], strict=True):
        torch.testing.assert_close(gradient * size, sum_of_one, rtol=3e-3, atol=1e-5)


def test_without_privacy_weights_are_those_of_losses(tmp_path):
    trainer = trainer_of(tmp_path, cls=Weighted, disable_dp=True, noise_multiplier=None)
    inputs = dict(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    torch.manual_seed(0)
    found = trainer.compute_loss(trainer.model, dict(inputs))
    torch.manual_seed(0)
    losses, weights = trainer.compute_per_sample_loss(trainer.model, dict(inputs))
    assert found == (losses * weights).mean()
    trainer.model.eval()
    losses, _ = trainer.compute_per_sample_loss(trainer.model, dict(inputs))
    assert trainer.compute_loss(trainer.model, dict(inputs)) == losses.mean()


def test_a_record_moves_the_sum_by_at_most_c_whatever_its_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(Weighted, "of_classes", torch.tensor([7.0, float("nan")]))
    result = neighbour_distances(trainer_of(tmp_path, cls=Weighted), pairs=4)
    assert not result.contradicts_claim


def test_canaries_of_an_audit_have_the_weight_1(tmp_path):
    class Audited(AuditTrainer, Weighted):
        pass

    options = dict(args=arguments(tmp_path, max_steps=2), train_dataset=text_data(), data_collator=pad, num_canaries=20)
    trainer = Audited(model=tiny_bert(), **options)
    inputs = trainer.data_collator([dict(trainer.train_dataset[row]) for row in (0, 1, len(trainer.train_dataset) - 1)])
    _, weights = trainer.compute_per_sample_loss(trainer.model, dict(inputs))
    assert weights.tolist()[:2] == OF_CLASSES[inputs["labels"][:2]].tolist()
    assert weights[2] == 1.0 or not trainer.included.any()
    assert trainer.audit().claimed_epsilon > 0


class OfCounts(Weighted):
    def compute_per_sample_loss(self, model, inputs):
        losses, _ = super().compute_per_sample_loss(model, dict(inputs))
        counts = torch.bincount(inputs["labels"], minlength=2)
        return losses, 1.0 / counts[inputs["labels"]]


class OfRanks(Weighted):
    def compute_per_sample_loss(self, model, inputs):
        losses, _ = super().compute_per_sample_loss(model, inputs)
        return losses, (losses >= losses.median()).float()


class OfOneNumber(Weighted):
    def compute_per_sample_loss(self, model, inputs):
        losses, weights = super().compute_per_sample_loss(model, inputs)
        return losses, weights.mean()


class Elsewhere(Weighted):
    def compute_per_sample_loss(self, model, inputs):
        losses, weights = super().compute_per_sample_loss(model, inputs)
        return losses, weights.to("meta")


class OfThree(Weighted):
    def compute_per_sample_loss(self, model, inputs):
        return *super().compute_per_sample_loss(model, inputs), None


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (OfCounts, "weights-of-others"), (OfRanks, "weights-of-others"), (OfOneNumber, "weights-of-losses"),
        (OfThree, "weights-of-losses"), (Elsewhere, "weights-of-losses"),
    ],
)  # fmt: skip
def test_weights_of_the_batch_are_refused_before_the_first_step(tmp_path, cls, code):
    trainer = trainer_of(tmp_path, cls=cls, grad_sample_self_check=True)
    with pytest.raises(Refusal) as refusal:
        trainer.train()
    assert refusal.value.code == code
    assert trainer.privacy.ledger is None


class Noisy(Weighted):
    """Its losses draw random numbers, and its weights are those of another class."""

    of = Weighted

    def compute_per_sample_loss(self, model, inputs):
        losses, weights = self.of.compute_per_sample_loss(self, model, inputs)
        return losses * (1 + 0.1 * torch.rand_like(losses)), weights


class Above(Weighted):
    of_classes = OF_CLASSES * 10


@pytest.mark.parametrize(
    ("cls", "code"),
    [(OfCounts, "weights-of-others"), (OfRanks, "weights-of-others"), (Above, "weights-out-of-range"), (Weighted, None)],
)
def test_random_losses_hide_no_weights_of_the_batch(tmp_path, cls, code):
    noisy = type("Noisy", (Noisy, cls), {"of": cls})
    trainer = trainer_of(
        tmp_path, cls=noisy, model=tiny_bert(), data=text_data(48), max_steps=1, grad_sample_self_check=True
    )
    if code is None:
        trained(trainer)
        return
    with pytest.raises(Refusal) as refusal:
        trainer.train()
    assert refusal.value.code == code
    assert trainer.privacy.ledger is None


class OfClasses(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, weight=torch.tensor([1.0, 9.0, 1.0]), reduction="none")


class Focal(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return (1 - torch.exp(-losses)) ** 2 * losses


class Halved(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return 0.5 * super().compute_per_sample_loss(model, inputs)


class Smoothed(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, label_smoothing=0.2, reduction="none")


def test_the_logged_loss_has_no_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(Weighted, "of_classes", torch.zeros(3))
    options = dict(
        noise_multiplier=1e-6,
        max_steps=3,
        logging_steps=3,
        learning_rate=0.0,
        allow_any_learning_rate=True,
        per_sample_max_loss=20.0,
    )
    trainer = trained(trainer_of(tmp_path, cls=Weighted, rehearse=False, **options))
    (logged,) = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged > 0.3  # of an untrained model with two classes, divided by the expected size of a batch


def test_a_loss_that_is_set_on_the_trainer_is_looked_at_too(tmp_path, capsys):
    model = tiny_bert(num_labels=3)
    with torch.no_grad():
        model.classifier.weight.mul_(100.0)
    trainer = trainer_of(tmp_path, model=model, max_steps=1, grad_sample_self_check=True)
    trainer.compute_per_sample_loss = lambda model, inputs: OfClasses.compute_per_sample_loss(trainer, model, inputs)
    trainer.train()
    assert "these factors have no effect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cls", "clipping", "is_told"),
    [
        (OfClasses, "automatic", True), (OfClasses, "vanilla", False), (Focal, "automatic", True),
        (Halved, "automatic", False), (Smoothed, "automatic", False), (Weighted, "automatic", False),
        (DopplerTrainer, "automatic", False),
    ],
)  # fmt: skip
def test_factors_that_automatic_clipping_cancels_are_told_of(tmp_path, capsys, cls, clipping, is_told):
    model = tiny_bert(num_labels=3)  # of two classes all gradients are parallel
    with torch.no_grad():  # an untrained head gives every example nearly the same probability
        model.classifier.weight.mul_(100.0)
    trained(trainer_of(tmp_path, cls=cls, model=model, clipping=clipping, max_steps=1, grad_sample_self_check=True))
    assert ("these factors have no effect" in capsys.readouterr().out) is is_told


class Own(nn.Module):
    """A module of one's own; `form` makes its output of the logits."""

    def __init__(self, form):
        super().__init__()
        self.words, self.head, self.form = nn.Embedding(100, 8), nn.Linear(8, 3), form
        with torch.no_grad():
            self.head.weight.mul_(20.0)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.form(self.head(self.words(input_ids[:, 0])))


FORMS = {
    "tensor": (lambda logits: logits, lambda outputs: outputs),
    "tuple": (lambda logits: (logits, logits.sum()), lambda outputs: outputs[0]),
    "dictionary": (lambda logits: {"logits": logits}, lambda outputs: outputs["logits"]),
    "ModelOutput": (lambda logits: SequenceClassifierOutput(logits=logits), lambda outputs: outputs.logits),
}


def with_labels(dtype):
    """Return a collator whose labels have another type."""

    def collate(rows):
        batch = pad(rows)
        return batch | {"labels": batch["labels"].to(dtype)}

    return collate


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.int64) for form in FORMS), *(("tensor", dtype) for dtype in (torch.int32, torch.uint8, torch.bool))],
    ids=str,
)
@pytest.mark.parametrize("power", [0, 2])
def test_factors_for_a_module_of_ones_own_are_told_of_whatever_it_returns(tmp_path, capsys, form, dtype, power):
    made, logits_of = FORMS[form]

    class OfOwn(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            losses = F.cross_entropy(logits_of(model(**inputs)), inputs["labels"].long(), reduction="none")
            return (1 - torch.exp(-losses.detach())) ** power * losses

    options = dict(cls=OfOwn, model=Own(made), collator=with_labels(dtype), grad_sample_self_check=True)
    trained(trainer_of(tmp_path, max_steps=1, **options))
    assert ("these factors have no effect" in capsys.readouterr().out) is (power == 2)


def test_losses_that_a_module_of_ones_own_returns_are_not_taken_for_its_output(tmp_path, capsys):
    class Squared(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            return model(**inputs)["loss"] ** 2

    model = Own(lambda logits: {"loss": logits.pow(2).mean(dim=1, keepdim=True)[:, 0]})
    trained(trainer_of(tmp_path, cls=Squared, model=model, max_steps=1, grad_sample_self_check=True))
    assert "factors" not in capsys.readouterr().out


@pytest.mark.parametrize("weights", [OF_CLASSES * 10, OF_CLASSES - 0.5, torch.tensor([1.0, 1.5, 1.0])], ids=str)
def test_weights_that_would_be_cut_off_are_refused_and_divided_by_their_largest_they_train(tmp_path, weights):
    class Outside(Weighted):
        of_classes = weights

    options = dict(model=tiny_bert(), data=text_data(48), grad_sample_self_check=True)
    with pytest.raises(Refusal) as refusal:
        trained(trainer_of(tmp_path, cls=Outside, **options, max_steps=1))
    assert refusal.value.code == "weights-out-of-range"
    Outside.of_classes = weights.clamp(min=0.0) / weights.max()
    trained(trainer_of(tmp_path / "mended", cls=Outside, **options, max_steps=1))


def of_one_output(factor):
    class OfOne(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels").float()
            logits = model(**inputs).logits.flatten()
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            return factor(losses, labels)

    return OfOne


@pytest.mark.parametrize(
    ("factor", "is_told"),
    [
        (lambda losses, labels: losses, False),
        (lambda losses, labels: 0.5 * losses, False),
        (lambda losses, labels: losses * (1.0 + 9.0 * labels), True),
        (lambda losses, labels: losses * (1.0 - (-losses.detach()).exp()) ** 2, True),
        (lambda losses, labels: (losses, (0.1 + 0.9 * labels).clamp(0.0, 1.0)), False),
    ],
)
def test_factors_for_a_model_with_one_output_are_told_of(tmp_path, capsys, factor, is_told):
    model = tiny_bert(num_labels=1)
    with torch.no_grad():
        model.classifier.weight.mul_(100.0)
    options = dict(model=model, cls=of_one_output(factor), max_steps=1, grad_sample_self_check=True)
    trained(trainer_of(tmp_path, **options))
    assert ("the model has one output" in capsys.readouterr().out) is is_told


def of_amounts(loss):
    class OfAmounts(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            amounts = inputs.pop("labels").float()
            return loss(model(**inputs).logits.flatten(), amounts)

    return OfAmounts


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (lambda found, amounts: (found - amounts).square(), False),
        (lambda found, amounts: (found - amounts).abs(), False),
        (lambda found, amounts: F.huber_loss(found, amounts, reduction="none", delta=1.5), False),
        (lambda found, amounts: F.smooth_l1_loss(found, amounts, reduction="none", beta=2.5), False),
        (lambda found, amounts: (found - amounts).cosh().log(), False),
        # Factors: of rare amounts, of an error relative to the amount, and of errors to one side.
        (lambda found, amounts: (found - amounts).square() * (1.0 + 9.0 * (amounts == 4)), True),
        (lambda found, amounts: (found - amounts).abs() / (amounts + 0.1), True),
        (lambda found, amounts: torch.maximum(0.9 * (amounts - found), 0.1 * (found - amounts)), True),
    ],
)
def test_losses_of_amounts_are_told_of_if_they_have_factors(tmp_path, capsys, loss, is_told):
    model = tiny_bert(num_labels=1)
    with torch.no_grad():
        model.classifier.bias.fill_(2.0)
    data = text_data(48, labels=6)
    options = dict(model=model, data=data, cls=of_amounts(loss), max_steps=1, grad_sample_self_check=True)
    trained(trainer_of(tmp_path, **options))
    assert ("the model has one output" in capsys.readouterr().out) is is_told
