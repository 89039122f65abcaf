"""Coins stay secret whoever seeds the global generators, and coins of one's own are refused."""

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback, set_seed

from doppler_hf import DopplerTrainer
from tests.support.tiers import thorough
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import checked_trainer_of as trainer_of
from tests.support.trainers import trained

# Whole trainings, whose arrays others check.
pytestmark = pytest.mark.usefixtures("usual_trials")


class Seeding(Rows):
    """The same augmentation of an example in every epoch."""

    def __getitem__(self, index):
        torch.manual_seed(index)
        return super().__getitem__(index)


class Own(Rows):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        tokens = [4 if self.generator.random() < 0.5 else token for token in self.rows[index]["input_ids"]]
        return self.rows[index] | {"input_ids": tokens}


class Kept(Rows):
    """Draws from the global generators, and keeps what it has drawn."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            tokens = [4 if np.random.random() < 0.5 else token for token in self.rows[index]["input_ids"]]
            self.kept[index] = self.rows[index] | {"input_ids": tokens}
        return self.kept[index]


def seeding_collator(examples):
    set_seed(42)
    return pad(examples)


class OwnCollator:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, examples):
        batch = pad(examples)
        hidden = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 4)}


RARELY = 1e-9
OF_THE_MODULE = np.random.default_rng(0)


class Rare:
    """Hides the words of one example in a billion, by generators that are kept in several places."""

    of_the_class = random.Random(0)

    def __init__(self, where):
        generator = np.random.default_rng(0)
        self.draw = {
            "attribute": [np.random.RandomState(0)],
            "bound method": generator.random,
            "closure": lambda: generator.random(),
            "partial": functools.partial(torch.rand, 1, generator=torch.Generator().manual_seed(0)),
            "global": lambda: OF_THE_MODULE.random(),
            "class": self.of_itself,
            "global generators": torch.default_generator,
        }[where]

    def of_itself(self):
        return self.of_the_class.random()

    def __call__(self, examples):
        batch = pad(examples)
        for row in batch["input_ids"]:
            number = self.draw() if callable(self.draw) else np.random.random()
            if number < RARELY:
                row[:] = 4
        return batch


class SeedingCallback(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        set_seed(state.global_step)


class Drawn(DopplerTrainer):
    """Notes what the three generators would give in each forward pass."""

    def compute_per_sample_loss(self, model, inputs):
        state = torch.get_rng_state().numpy()[24:].tobytes(), np.random.get_state()[1].tobytes()
        self.__dict__.setdefault("states", []).append(state)
        return super().compute_per_sample_loss(model, inputs)


@pytest.mark.parametrize("seeding", [*thorough("data set", "collator"), "callback"])
def test_a_seed_reaches_no_forward_pass(tmp_path, seeding):
    states = []
    for run in range(2):
        callbacks = [SeedingCallback()] if seeding == "callback" else []
        data = Seeding() if seeding == "data set" else text_data()
        trainer = trainer_of(tmp_path / str(run), cls=Drawn, data=data, callbacks=callbacks, grad_sample_self_check=False)
        if seeding == "collator":
            trainer.data_collator = seeding_collator
        trainer.train()
        assert len(trainer.states) > 4
        states += trainer.states[1:]  # the first is that of the check
    for generator in zip(*states, strict=True):
        assert len(set(generator)) == len(states)


@pytest.mark.parametrize("workers", [0, *thorough(1)])
def test_numbers_of_a_data_set_follow_no_seed_of_a_callback_or_an_earlier_example(tmp_path, workers):
    class Noted(Rows):
        def __getitem__(self, index):
            number = np.random.random()
            np.random.seed(0)
            return super().__getitem__(index) | {"number": number}

    numbers = []

    def collator(examples):
        batch = pad(examples)
        return batch | {"number": torch.tensor([example["number"] for example in examples])}

    class Reading(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            numbers.extend(inputs.pop("number").tolist())
            return super().compute_per_sample_loss(model, inputs)

    options = dict(remove_unused_columns=False, grad_sample_self_check=False, dataloader_num_workers=workers)
    for run in range(2):
        trainer = trainer_of(tmp_path / str(run), cls=Reading, data=Noted(), **options)
        trainer.data_collator = collator
        first = len(numbers)
        trainer.train()
        del numbers[first : first + 3]  # of the check, from a fixed state
    assert len(numbers) > 20
    assert len(set(numbers)) == len(numbers)


class Masked(DopplerTrainer):
    """Has a dropout of its own, which no attribute of the model switches off."""

    kind = "global"

    def compute_per_sample_loss(self, model, inputs):
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        if self.kind == "seeded":
            torch.manual_seed(self.args.seed)
        if self.kind == "forked":
            with torch.random.fork_rng():
                torch.manual_seed(self.args.seed)
                embedded = F.dropout(embedded, 0.3, training=model.training)
        elif self.kind == "own":
            self.__dict__.setdefault("generator", torch.Generator().manual_seed(0))
            embedded = embedded * (torch.rand(embedded.shape, generator=self.generator) < 0.7)
        else:
            embedded = F.dropout(embedded, 0.3, training=model.training)
        logits = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"]).logits
        return F.cross_entropy(logits, inputs["labels"], reduction="none")


def masked_trainer(tmp_path, kind, monkeypatch, *, frozen=True):
    monkeypatch.setattr(Masked, "kind", kind)
    model = tiny_bert(initializer_range=0.3)
    model.get_input_embeddings().requires_grad_(not frozen)  # it is called outside the model's own forward
    return trainer_of(tmp_path, cls=Masked, model=model, max_steps=1)


@pytest.mark.parametrize("kind", ["seeded", "forked", "own"])
def test_a_loss_with_a_seed_or_a_generator_of_its_own_is_refused(tmp_path, monkeypatch, kind):
    trainer = masked_trainer(tmp_path, kind, monkeypatch)
    with pytest.raises(ValueError, match=r"Seed nothing there|generator of its own|changes with the examples beside it"):
        trainer.train()


def test_dropout_that_is_a_number_in_the_code_trains(tmp_path, monkeypatch):
    assert trained(masked_trainer(tmp_path, "global", monkeypatch)).state.global_step == 1


def test_dropout_of_the_config_under_a_seed_is_refused_by_what_it_does(tmp_path):
    class Seeded(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            torch.manual_seed(self.args.seed)
            return super().compute_per_sample_loss(model, inputs)

    trainer = trainer_of(tmp_path, cls=Seeded, model=tiny_bert(hidden_dropout_prob=0.1))
    with pytest.raises(ValueError, match=r"Dropout must follow the secret global generators .* Seed nothing there\."):
        trainer.train()
    assert trained(trainer_of(tmp_path, cls=Seeded, max_steps=1)).state.global_step == 1


@pytest.mark.parametrize("what", ["train_dataset", "data_collator"])
def test_data_with_a_generator_of_their_own_are_refused_by_name(tmp_path, what):
    trainer = trainer_of(tmp_path, data=Own() if what == "train_dataset" else None)
    trainer.data_collator = OwnCollator() if what == "data_collator" else pad
    with pytest.raises(ValueError, match=f"{what} must draw all random numbers from the global generators"):
        trainer.train()


@pytest.mark.parametrize("where", ["attribute", "bound method", "closure", "partial", "global", "class"])
def test_a_generator_that_rarely_acts_is_found_wherever_it_is_kept(tmp_path, monkeypatch, where):
    if where != "class":
        monkeypatch.delattr(Rare, "of_the_class")
    trainer = trainer_of(tmp_path)
    trainer.data_collator = Rare(where)
    with pytest.raises(ValueError, match=r"data_collator must draw .*, got a \w+ of its own\."):
        trainer.train()


def test_a_collator_that_counts_its_calls_is_refused(tmp_path):
    calls = itertools.count()

    def collator(examples):
        batch = pad(examples)
        batch["input_ids"][:, 0] = 5 + next(calls) % 40
        return batch

    trainer = trainer_of(tmp_path)
    trainer.data_collator = collator
    with pytest.raises(ValueError, match=r"data_collator must draw .*, got other numbers from the same state"):
        trainer.train()


def test_one_in_a_transform_is_found_too(tmp_path):
    generator = np.random.default_rng(0)

    def transform(rows):
        ids = [[4] * len(row) if generator.random() < RARELY else row for row in rows["input_ids"]]
        return rows | {"input_ids": ids}

    with pytest.raises(ValueError, match=r"train_dataset must draw .*, got a Generator of its own\."):
        trainer_of(tmp_path, data=text_data().with_transform(transform), remove_unused_columns=False).train()


def test_the_global_generators_may_be_kept(tmp_path, monkeypatch):
    monkeypatch.delattr(Rare, "of_the_class")
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.data_collator = Rare("global generators")
    trainer.train()
    assert trainer.state.global_step == 1


class RareLoss(DopplerTrainer):
    """Leaves out one example in a billion, by a generator of its own."""

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        self.__dict__.setdefault("coins", np.random.default_rng(0))
        return losses * torch.tensor([self.coins.random() >= RARELY for _ in losses])


def test_one_in_the_loss_that_rarely_acts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="from a generator of its own"):
        trainer_of(tmp_path, cls=RareLoss).train()


@pytest.mark.parametrize("data", [Seeding, Kept])
def test_a_data_set_that_seeds_or_keeps_what_it_drew_trains(tmp_path, data):
    assert trained(trainer_of(tmp_path, data=data(), max_steps=1)).state.global_step == 1


class StochasticDepth(nn.Module):
    """Leaves an example out now and then, and scales it otherwise, as vision transformers do."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.02

    def forward(self, hidden):
        if not self.training:
            return hidden
        kept = torch.rand(len(hidden), *[1] * (hidden.ndim - 1)) >= self.drop_prob
        return hidden * kept / (1 - self.drop_prob) if self.drop_prob else hidden


def test_coins_that_seldom_fall_are_not_taken_for_a_seed(tmp_path):
    model = tiny_bert()
    model.classifier = nn.Sequential(StochasticDepth(), model.classifier)
    trainer_of(tmp_path, model=model, max_steps=1).train()
