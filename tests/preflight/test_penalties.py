"""A penalty on the weights in the loss is refused with weight_decay in its place, wherever the penalty is."""

import pytest
import torch
from torch.nn import functional as F
from transformers import BertForSequenceClassification

from doppler_hf import DopplerTrainer
from tests.support.tiny import tiny_bert
from tests.support.trainers import checked_trainer_of, refused_training, trained


class Squares(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        losses = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return losses + 1e-2 * sum(weight.pow(2).sum() for weight in model.parameters())


class Sizes(DopplerTrainer):
    """An L1 penalty on one layer, on top of the inherited losses."""

    def compute_per_sample_loss(self, model, inputs):
        return super().compute_per_sample_loss(model, inputs) + 1e-4 * self.model.classifier.weight.abs().sum()


@pytest.mark.parametrize("cls", [Squares, Sizes])
def test_a_penalty_in_the_losses_is_refused_with_weight_decay(tmp_path, cls):
    refused_training(tmp_path, "no-per-sample-gradient", cls=cls, match="weight_decay")


def test_a_penalty_in_compute_loss_is_refused_with_weight_decay(tmp_path):
    class OfBatches(DopplerTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs) + 1e-2 * sum(weight.norm() for weight in model.parameters())

    with pytest.raises(ValueError, match="weight_decay") as refusal:
        checked_trainer_of(tmp_path, cls=OfBatches)
    assert refusal.value.code == "method-without-effect"


def test_a_penalty_in_the_forward_is_refused_with_weight_decay(tmp_path):
    class Penalised(BertForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            outputs = super().forward(input_ids, attention_mask, labels=labels)
            if labels is not None:
                outputs.loss = outputs.loss + 1e-2 * sum(weight.pow(2).sum() for weight in self.parameters())
            return outputs

    refused_training(tmp_path, "another-loss", model=Penalised(tiny_bert().config), match="weight_decay")


def test_weight_decay_trains_and_makes_weights_smaller(tmp_path):
    sizes = []
    for decay in (0.0, 0.5):
        options = dict(base_optimizer="sgd", learning_rate=0.1, weight_decay=decay, noise_multiplier=0.0, max_steps=8)
        trainer = trained(checked_trainer_of(tmp_path / str(decay), **options))
        sizes.append(float(torch.linalg.norm(trainer.model.bert.encoder.layer[0].output.dense.weight.detach())))
    assert sizes[1] < 0.8 * sizes[0]
