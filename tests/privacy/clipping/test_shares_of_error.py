"""What an example contributes under automatic clipping shrinks with its error, and never exceeds C."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from doppler_hf import DopplerTrainer
from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping.clipped_gradients import shares_of_error
from doppler_hf.privacy.losses import has_one_label
from tests.support.per_example import gradients_of_each, norm_of
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import Recorder, trained, trainer_of

SMALL = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
TEXT = dict(vocab_size=50, max_position_embeddings=20, **SMALL)
GPT2 = hf.GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2)


def test_shares_are_1_at_even_odds_and_0_at_no_loss():
    odds = torch.tensor([0.0, 0.1, 0.5, 0.75, 0.9, 1.0])
    torch.testing.assert_close(shares_of_error(-odds.log()), torch.tensor([1.0, 1.0, 1.0, 0.5, 0.2, 0.0]))
    odd = torch.tensor([-1e-7, torch.nan, torch.inf, -torch.inf])
    torch.testing.assert_close(shares_of_error(odd), torch.tensor([0.0, 1.0, 1.0, 0.0]))


@pytest.mark.parametrize("granularity", ["flat", "per_layer"])
@pytest.mark.parametrize("views", [1, 2])
def test_each_contributes_its_share_of_the_clip_norm(granularity, views):
    torch.manual_seed(0)
    model, bound = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), 0.7
    x, y, weights = torch.randn(8, 6), torch.randint(3, (8,)), torch.linspace(0.1, 1, 8 // views)
    with torch.no_grad():
        model[2].weight.mul_(8.0)

    def losses(rows):
        return F.cross_entropy(model(x[rows]), y[rows], reduction="none")

    of_rows = gradients_of_each(model, losses, 8)
    shares = (2 - 2 * (-losses(slice(0, 8)).detach()).exp()).clamp(max=1).view(-1, views).mean(dim=1)
    assert shares.min() < 0.8
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index, share in enumerate(shares * weights):
        views_of = of_rows[index * views : (index + 1) * views]
        mean = {name: sum(of[name] for of in views_of) / views for name in expected}
        for layer in ("0", "2"):
            names = [name for name in mean if granularity == "flat" or name.startswith(layer)]
            norm = norm_of(mean[name] for name in names)
            for name in (name for name in names if name.startswith(layer)):
                expected[name] += share * bound / (norm if granularity == "flat" else norm * 2**0.5) * mean[name]
    options = dict(max_grad_norm=bound, clipping="automatic", granularity=granularity)
    with ClippedGradients(model, **options) as clipped:
        clipped.backward(losses(slice(0, 8)), weights=weights, views=views, is_cross_entropy=True)
        for name, total in clipped.sums.items():
            torch.testing.assert_close(total, expected[name], rtol=2e-3, atol=1e-5)
    with ClippedGradients(model, **options) as clipped:
        for index in range(8):
            clipped.reset()
            clipped.backward(losses(slice(index, index + 1)), is_cross_entropy=True)
            assert norm_of(clipped.sums.values()) <= bound


def test_one_label_is_a_whole_number_of_a_classifier():
    one, several = torch.tensor([0, 1]), torch.zeros(2, 3)
    classifier = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3))
    assert has_one_label(classifier, one)
    assert not any(has_one_label(classifier, labels) for labels in (several, one.float(), one[:, None], None))
    classifier.config.problem_type = "multi_label_classification"
    assert not has_one_label(classifier, one)
    assert not has_one_label(hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=1)), one)

    class Own(hf.BertForSequenceClassification):
        pass

    image = hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, **SMALL))
    assert all(
        has_one_label(model, one)
        for model in (Own(hf.BertConfig(**TEXT)), hf.BertForMultipleChoice(hf.BertConfig(**TEXT)), image)
    )
    others = hf.BertForTokenClassification(hf.BertConfig(**TEXT)), hf.GPT2LMHeadModel(GPT2), nn.Linear(2, 2)
    assert not any(has_one_label(model, one) for model in others)


@pytest.mark.parametrize("checked", [True, False])
def test_a_training_weighs_its_own_model_s_loss_alone_whoever_returns_it(tmp_path, checked):
    class Inherited(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            return super().compute_per_sample_loss(model, inputs)

    class OwnLoss(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            return 1.0 * super().compute_per_sample_loss(model, inputs)

    def first_gradient(cls):
        torch.manual_seed(0)
        model = tiny_bert()
        with torch.no_grad():  # all examples have the same loss, -log p with p = 0.8
            model.classifier.weight.zero_()
            model.classifier.bias.copy_(torch.tensor([0.8, 0.2]).log())
        recorder = Recorder()
        data = text_data().map(lambda row: {"labels": 0})
        run = dict(noise_multiplier=0.0, noise_seed=7, max_steps=1, clipping="automatic", grad_sample_self_check=checked)
        trained(trainer_of(tmp_path / cls.__name__, model=model, cls=cls, data=data, callbacks=[recorder], **run))
        return recorder.gradients[0]

    of_stock = first_gradient(DopplerTrainer)
    assert of_stock.any()
    assert torch.equal(of_stock, first_gradient(Inherited))
    torch.testing.assert_close(of_stock, 0.4 * first_gradient(OwnLoss), rtol=1e-4, atol=1e-7)
