"""Layers that do something at random in training mode only: what mixes rows is refused, and what is a row's own trains."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.tiers import further
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import checked_trainer_of as trainer_of
from tests.support.trainers import refused_training, trained

DATA = dict(data=text_data(96), gradient_accumulation_steps=1, per_device_train_batch_size=16)


class InTraining(nn.Module):
    """Changes its input at random in training mode, and returns it as it is in evaluation mode."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x) if self.training else x


def model_with(change):
    model = tiny_bert()
    model.dropout = InTraining(change)
    return model


def by_a_beta(x):
    share = float(torch.distributions.Beta(0.4, 0.4).sample())
    return share * x + (1.0 - share) * x[torch.randperm(len(x))]


MIXED = {
    "Mixup": by_a_beta,
    "Mixup with the reversed batch": lambda x: torch.lerp(x, x.flip(0), torch.rand(())),
    "Mixup of fixed shares": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
    "Mixup with the next row, by Python": lambda x: torch.lerp(x, x.roll(1, 0), random.random()),
    "CutMix": lambda x: torch.where(torch.rand(x.shape[1]) < 0.5, x, x[torch.randperm(len(x))]),
    "with others that are detached": lambda x: x + torch.rand(()) * x.detach().mean(0, keepdim=True),
    "noise as large as the batch's": lambda x: x + 5.0 * x.detach().std() * torch.randn_like(x),
    "a random half of the batch": lambda x: x * (torch.randperm(len(x)) < len(x) // 2)[:, None],
}


@pytest.mark.parametrize("name", further([*MIXED], quick=["Mixup", "with others that are detached"]))
def test_what_mixes_rows_in_training_mode_only_is_refused(tmp_path, name):
    refused_training(tmp_path, "depends-on-others", model=model_with(MIXED[name]), **DATA)


def left_out_as(chance):
    return lambda x: x if chance() < 0.5 else x * 0.5


OF_ITS_OWN = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of NumPy": lambda x: x + torch.as_tensor(np.random.normal(size=(*x.shape,))).to(x),
    "stochastic depth": lambda x: x * (torch.rand(len(x), 1) < 0.7),
    "a row's own size of noise": lambda x: x + x.detach().std(1, keepdim=True) * torch.randn_like(x),
    "a layer left out": left_out_as(lambda: float(torch.rand(()))),
    "a layer left out, by Python": left_out_as(random.random),
    "one mask for all rows": lambda x: x * (torch.rand(x.shape[1]) < 0.7),
    "one factor for all rows": lambda x: x * (0.5 + torch.rand(())),
    "permuted features": lambda x: x[:, torch.randperm(x.shape[1])],
}


@pytest.mark.parametrize("dtype", further([torch.float32, torch.bfloat16], quick=[torch.float32]))
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_what_is_a_row_s_own_trains(tmp_path, name, dtype):
    trainer = trainer_of(tmp_path, model=model_with(OF_ITS_OWN[name]).to(dtype), max_steps=1, **DATA)
    assert trained(trainer).state.global_step == 1
