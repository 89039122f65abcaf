"""The typical norm of a classifier's gradients: near that of real ones, and of use where one class is frequent."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping.clip_factors import SMALLEST_TYPICAL_NORM
from doppler_hf.run import private_run
from doppler_hf.run.typical_norm import typical_norm
from tests.support.trainers import Recorder, trained, trainer_of

SMALL = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=3)
TEXT = dict(vocab_size=50, max_position_embeddings=20, **SMALL)
GPT2 = GPT2Config(vocab_size=50, n_embd=64, n_layer=1, n_head=2, num_labels=3, pad_token_id=0)


def inputs_of(model):
    if isinstance(model, ViTForImageClassification):
        return {"pixel_values": torch.randn(8, 3, 16, 16)}
    return {"input_ids": torch.randint(2, 50, (8, 10)), "attention_mask": torch.ones(8, 10, dtype=torch.long)}


@pytest.mark.parametrize(
    "model_of",
    [
        lambda: BertForSequenceClassification(BertConfig(**TEXT)),
        lambda: RobertaForSequenceClassification(RobertaConfig(**TEXT)),
        lambda: GPT2ForSequenceClassification(GPT2),
        lambda: ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **SMALL)),
    ],
)
def test_the_norm_is_near_that_of_real_gradients_of_the_head(model_of):
    torch.manual_seed(0)
    model = model_of()
    head = model.score if hasattr(model, "score") else model.classifier
    head = getattr(head, "out_proj", head)
    model.requires_grad_(False)
    head.requires_grad_(True)
    with ClippedGradients(model) as clipped:
        logits = model(**inputs_of(model)).logits
        norms = clipped.backward(F.cross_entropy(logits, torch.randint(3, (8,)), reduction="none"))
    assert 0.5 < norms.median() / typical_norm(model, has_own_loss=False) < 3
    assert typical_norm(model, has_own_loss=False) == typical_norm(model.train(), has_own_loss=False)
    assert model.training


def test_a_head_of_small_inputs_has_a_small_norm():
    model = BertForSequenceClassification(BertConfig(**TEXT))
    large = typical_norm(model, has_own_loss=False)
    with torch.no_grad():
        model.bert.pooler.dense.weight.mul_(0.1)
        model.bert.pooler.dense.bias.zero_()
    assert typical_norm(model, has_own_loss=False) == pytest.approx(0.1 * large, rel=0.05)


def test_nothing_is_said_of_other_models_losses_and_heads():
    classifier = BertForSequenceClassification(BertConfig(**TEXT))
    assert typical_norm(classifier, has_own_loss=True) == SMALLEST_TYPICAL_NORM
    for model in (BertForTokenClassification(BertConfig(**TEXT)), GPT2LMHeadModel(GPT2), classifier.requires_grad_(False)):
        assert typical_norm(model, has_own_loss=False) == SMALLEST_TYPICAL_NORM
    several = BertForSequenceClassification(BertConfig(**TEXT, problem_type="multi_label_classification"))
    one = BertForSequenceClassification(BertConfig(**TEXT | {"num_labels": 1}))
    for model in (several, one):
        assert typical_norm(model, has_own_loss=False) == SMALLEST_TYPICAL_NORM
    factors = get_peft_model(classifier, LoraConfig(r=3, target_modules=["query"]))  # whose outputs are as many as classes
    assert typical_norm(factors, has_own_loss=False) == SMALLEST_TYPICAL_NORM
    adapted = get_peft_model(factors.unload(), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    assert typical_norm(adapted, has_own_loss=False) > 0.1


def test_a_model_that_takes_no_made_up_inputs_is_clipped_as_others():
    class Own(BertForSequenceClassification):
        def forward(self, input_ids, marks):
            raise AssertionError

    assert typical_norm(Own(BertConfig(**TEXT)), has_own_loss=False) == SMALLEST_TYPICAL_NORM
    broken = BertForSequenceClassification(BertConfig(**TEXT))
    torch.nn.init.constant_(broken.bert.pooler.dense.weight, torch.nan)
    assert typical_norm(broken, has_own_loss=False) == SMALLEST_TYPICAL_NORM


def test_automatic_clipping_of_a_training_is_vanilla_at_the_typical_norm(tmp_path, monkeypatch):
    norm = 100.0  # longer than any gradient here
    monkeypatch.setattr(private_run, "typical_norm", lambda model, *, has_own_loss: norm)

    def first_gradient(name, **clipping):
        torch.manual_seed(0)
        trainer = trainer_of(
            tmp_path / name, callbacks=[recorder := Recorder()], noise_multiplier=0.0, noise_seed=0, max_steps=1, **clipping
        )
        trained(trainer)
        return recorder.gradients[0]

    automatic = first_gradient("automatic", clipping="automatic")
    assert automatic.norm() > 0
    torch.testing.assert_close(
        automatic * norm, first_gradient("vanilla", clipping="vanilla", per_sample_max_grad_norm=norm)
    )
