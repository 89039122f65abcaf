"""Coins stay secret whoever seeds the global generators, and coins of one's own are refused."""

import random

import numpy as np
import pytest
import torch
from transformers import set_seed

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
from tests.support.tiny import OwnGenerator, Rows, hidden, pad
from tests.support.trainers import On, trained
from tests.support.trainers import checked_trainer_of as trainer_of


class Seeding(Rows):
    """The same augmentation of an example in every epoch."""

    def __getitem__(self, index):
        torch.manual_seed(index)
        return super().__getitem__(index)


class Kept(Rows):
    """Draws from the global generators, and keeps what it has drawn."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = hidden(self.rows[index])
        return self.kept[index]


class OfTheClass(Rows):
    """Has the generator of `OwnGenerator` as an attribute of its class."""

    generator = np.random.default_rng(0)

    def __getitem__(self, index):
        return self.rows[int(self.generator.integers(len(self.rows)))]


class OfTheTransform(Rows):
    """Has it as an attribute of its transform's class."""

    def __init__(self):
        super().__init__()
        self.transform = OfTheClass()


class With(Rows):
    """Has some objects as attributes."""

    def __init__(self, *held):
        super().__init__()
        self.__dict__ |= {f"held_{number}": each for number, each in enumerate(held)}


class OwnCollator:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, examples):
        batch = pad(examples)
        hidden = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 4)}


class Drawn(DopplerTrainer):
    """Notes what the three generators would give in each forward pass."""

    def compute_per_sample_loss(self, model, inputs):
        state = torch.get_rng_state().numpy()[24:].tobytes(), np.random.get_state()[1].tobytes()
        self.__dict__.setdefault("states", []).append(state)
        return super().compute_per_sample_loss(model, inputs)


def test_a_seed_reaches_no_forward_pass(tmp_path):
    states = []
    for run in range(2):
        whole = dict(per_device_train_batch_size=24, gradient_accumulation_steps=1)  # a piece is a micro-batch
        seeding = On(step_begin=lambda state, **_: set_seed(state.global_step))
        options = dict(data=Seeding(), callbacks=[seeding], grad_sample_self_check=False)
        trainer = trained(trainer_of(tmp_path / str(run), cls=Drawn, **options, **whole))
        assert len(trainer.states) > 3
        states += trainer.states
    for generator in zip(*states, strict=True):
        assert len(set(generator)) == len(states)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("train_dataset", dict(data=OwnGenerator())), ("train_dataset", dict(data=OfTheClass())),
        ("data_collator", dict(collator=OwnCollator())), ("train_dataset", dict(data=OfTheTransform())),
        ("train_dataset", dict(data=With(torch.default_generator, np.random.default_rng(0)))),
        ("train_dataset", dict(data=With(np.random.PCG64(0)))),
    ],
)  # fmt: skip
def test_data_with_a_generator_of_their_own_are_refused_by_name(tmp_path, what, options):
    with refused("generator-of-its-own", match=what):
        trainer_of(tmp_path, **options).train()


def test_a_data_set_that_keeps_what_it_drew_trains(tmp_path):
    assert trained(trainer_of(tmp_path, data=Kept(), max_steps=1)).state.global_step == 1


def test_a_data_set_that_holds_the_global_generators_trains(tmp_path):
    held = (random, np.random, torch.random, torch.default_generator, np.random.mtrand._rand, random.SystemRandom())
    assert trained(trainer_of(tmp_path, data=With(*held), max_steps=1)).state.global_step == 1
