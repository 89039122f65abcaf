"""Random weights that are divided by their sum over the batch are refused, whatever generator draws them."""

import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from doppler_hf import DopplerTrainer
from doppler_hf.preflight import examples
from tests.support.trainers import checked_trainer_of, refused_training, trained


def of_numpy(number):
    weights = np.random.rand(number)
    return weights / weights.sum() * number


def of_python(number):
    weights = np.array([random.random() for _ in range(number)])
    return weights / weights.mean()


def of_dirichlet(number):
    return np.random.dirichlet(np.ones(number)) * number


def of_softmax(number):
    return torch.from_numpy(np.random.randn(number)).softmax(0).numpy() * number


def weighted(draw):
    class Weighted(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels")
            losses = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
            return losses * torch.as_tensor(draw(len(losses)), dtype=losses.dtype, device=losses.device)

    return Weighted


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("draw", [of_numpy, of_python, of_dirichlet, of_softmax])
def test_weights_that_add_up_over_the_batch_are_refused(tmp_path, monkeypatch, draw, is_large):
    if is_large:
        monkeypatch.setattr(examples, "_FEW_WEIGHTS", 0)
    refused_training(tmp_path, "depends-on-others", cls=weighted(draw))


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("draw", [np.random.rand, lambda number: [random.random() + 1.0 for _ in range(number)]])
def test_weights_of_each_example_train(tmp_path, monkeypatch, draw, is_large):
    if is_large:
        monkeypatch.setattr(examples, "_FEW_WEIGHTS", 0)
    trainer = trained(checked_trainer_of(tmp_path, cls=weighted(draw)))
    assert trainer.state.global_step == 4
    assert "forward" not in vars(trainer.model)
