"""Weights that were trained without privacy on the same data begin no private run, nor is a model trained by two runs."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from tests.support.models import with_adapters
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, at, interrupt, trained, trainer_of
from tests.support.unspent import refusal_unspent

OPEN = dict(disable_dp=True, noise_multiplier=None, learning_rate=1e-2)


class OwnRows(Dataset):
    """A data set that is no table."""

    def __init__(self, rows):
        self.rows = [dict(row) for row in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def after_a_baseline(tmp_path, model, data, **options):
    return trained(trainer_of(tmp_path / "baseline", model=model, data=data, **OPEN | options))


SAME = {
    "the same object": lambda data: data,
    "prepared a second time": lambda data: text_data(24),
    "a part": lambda data: data.select(range(12)),
    "a data set of one's own": None,
    "a list": None,
}


@pytest.mark.parametrize("same", SAME)
def test_a_private_run_does_not_begin_with_a_baseline_on_the_same_data(tmp_path, same):
    model, data = tiny_bert(), text_data(24)
    data = {"a data set of one's own": OwnRows(data), "a list": [dict(row) for row in data]}.get(same, data)
    start = copy.deepcopy(model.state_dict())
    after_a_baseline(tmp_path, model, data)
    again = data if SAME[same] is None else SAME[same](data)
    message = refusal_unspent(trainer_of(tmp_path, model=model, data=again), "trained-without-privacy")
    assert "Load or create a fresh model" in message
    # The mends: another model, or the weights from before.
    trained(trainer_of(tmp_path / "new", model=tiny_bert(), data=again, max_steps=1))
    model.load_state_dict(start)
    trained(trainer_of(tmp_path / "loaded", model=model, data=again, max_steps=1))


def test_a_run_between_two_private_ones_counts_too(tmp_path):
    model, data = tiny_bert(), text_data(24)
    trained(trainer_of(tmp_path / "first", model=model, data=data, max_steps=1))
    after_a_baseline(tmp_path, model, data)
    refusal_unspent(trainer_of(tmp_path, model=model, data=data), "trained-without-privacy")


FURTHER = {
    "on other data": lambda path, model: after_a_baseline(path, model, text_data(24, seed=9)),
    "on other data, privately": lambda path, model: trained(
        trainer_of(path / "between", model=model, data=text_data(24, seed=9), max_steps=2)
    ),
    "on the same data, slowly": lambda path, model: after_a_baseline(path, model, text_data(24), learning_rate=1e-7),
    "rounded": lambda path, model: model.to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("further", FURTHER)
def test_what_was_learnt_stays_in_weights_that_are_trained_further_or_rounded(tmp_path, further):
    model, data = tiny_bert(), text_data(24)
    after_a_baseline(tmp_path, model, data)
    FURTHER[further](tmp_path / "further", model)
    refusal_unspent(trainer_of(tmp_path, model=model, data=data), "trained-without-privacy")


def test_an_evaluation_in_half_precision_does_not_hide_it(tmp_path):
    model, data = tiny_bert(), text_data(24)
    trainer_of(tmp_path / "baseline", model=model, data=data, bf16_full_eval=True, **OPEN).train()
    baseline = trainer_of(tmp_path / "baseline", model=model, data=data, bf16_full_eval=True, **OPEN)
    baseline.evaluate(text_data(8, seed=3))
    refusal_unspent(trainer_of(tmp_path, model=model.float(), data=data), "trained-without-privacy")


def test_weights_that_were_reset_after_a_slow_training_begin_a_private_run(tmp_path):
    """In half precision they are the same before and after it."""
    model, data = tiny_bert(), text_data(24)
    start = copy.deepcopy(model.state_dict())
    after_a_baseline(tmp_path, model, data, learning_rate=1e-7)
    refusal_unspent(trainer_of(tmp_path, model=model, data=data), "trained-without-privacy")
    model.load_state_dict(start)
    trained(trainer_of(tmp_path / "reset", model=model, data=data, max_steps=1))


TENSORS = [torch.tensor([row["input_ids"][:3] for row in text_data(24)]), torch.tensor(text_data(24)["labels"])]
ARRAYS = [each.numpy().copy() for each in TENSORS]
WRAPPED = {
    "Subset": lambda rows: Subset(rows, range(4, 20)),
    "random_split": lambda rows: random_split(rows, [20, 4], generator=torch.Generator().manual_seed(0))[0],
    "ConcatDataset": lambda rows: ConcatDataset([Subset(rows, range(12)), Subset(rows, range(14, 24))]),
    "TensorDataset": lambda rows: TensorDataset(*TENSORS),
    "slices of tensors": lambda rows: TensorDataset(*(each[2:22] for each in TENSORS)),
    "tensors around arrays": lambda rows: TensorDataset(*map(torch.from_numpy, ARRAYS)),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_data_that_a_function_wraps_for_each_training_are_recognised(tmp_path, wrapped):
    model, rows = tiny_bert(), OwnRows(text_data(24))

    def collate(rows):
        if isinstance(rows[0], dict):
            return pad(rows)
        return dict(zip(("input_ids", "labels"), map(torch.stack, zip(*rows, strict=True)), strict=True))

    def trainer(**options):
        return trainer_of(tmp_path, model=model, data=WRAPPED[wrapped](rows), collator=collate, **options)

    trained(trainer(**OPEN))
    gc.collect()
    refusal_unspent(trainer(), "trained-without-privacy")


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: Subset(rows, range(20))], ids=["as they are", "a part"])
def test_data_that_nobody_holds_any_more_are_forgotten(tmp_path, wrap):
    model = tiny_bert()
    after_a_baseline(tmp_path, model, wrap(OwnRows(text_data(24))))
    gc.collect()
    trained(trainer_of(tmp_path, model=model, data=text_data(24), max_steps=1))


@dataclasses.dataclass
class Records(Dataset):
    """A data set that compares values, and so has no hash."""

    rows: list

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_a_data_set_without_a_hash_is_recognised_and_another_one_is_not_taken_for_it(tmp_path):
    model, data = tiny_bert(), Records([*text_data(24)])
    after_a_baseline(tmp_path, model, data)
    refusal_unspent(trainer_of(tmp_path, model=model, data=data), "trained-without-privacy")
    trained(trainer_of(tmp_path, model=model, data=Records([*text_data(24, seed=5)]), max_steps=1))


def test_a_finished_baseline_that_is_resumed_has_learnt_its_data(tmp_path):
    data, saves = text_data(24), dict(save_strategy="steps", save_steps=2)
    after_a_baseline(tmp_path, tiny_bert(), data, **saves)
    model = tiny_bert()
    baseline = trainer_of(tmp_path / "baseline", model=model, data=data, **OPEN | saves)
    baseline.train(resume_from_checkpoint=True)  # no step is left
    refusal_unspent(trainer_of(tmp_path, model=model, data=data), "trained-without-privacy")


class Experiment:
    """A model and its data, whose transform is a method."""

    def __init__(self):
        self.model, self.data = tiny_bert(), text_data(24)
        self.data.set_transform(self.transform)

    def transform(self, rows):
        return rows


def test_a_transform_that_leads_to_the_model_does_not_keep_it(tmp_path):
    experiment = Experiment()
    after_a_baseline(tmp_path, experiment.model, experiment.data, max_steps=1, remove_unused_columns=False)
    refusal_unspent(
        trainer_of(tmp_path, model=experiment.model, data=experiment.data, remove_unused_columns=False),
        "trained-without-privacy",
    )
    model = weakref.ref(experiment.model)
    del experiment
    gc.collect()
    assert model() is None


def test_a_baseline_that_was_stopped_counts_and_a_base_below_new_adapters_too(tmp_path):
    model, data = tiny_bert(), text_data(24)
    with pytest.raises(KeyboardInterrupt):
        after_a_baseline(tmp_path, model, data, callbacks=[On(step_end=at(1, interrupt))])
    adapted = with_adapters(model, targets=["query"])
    refusal_unspent(trainer_of(tmp_path, model=adapted, data=data), "trained-without-privacy")


def test_what_learnt_nothing_of_these_data_trains(tmp_path):
    model = tiny_bert()
    after_a_baseline(tmp_path, model, text_data(24, seed=5))  # other data, which may be public
    trained(trainer_of(tmp_path / "other", model=model, data=text_data(24), max_steps=1))
    model = tiny_bert()
    after_a_baseline(tmp_path / "still", model, text_data(24), learning_rate=0.0)
    trained(trainer_of(tmp_path / "unmoved", model=model, data=text_data(24), max_steps=1))
    # The message's own way for weights that are public all the same.
    model = tiny_bert()
    after_a_baseline(tmp_path / "public", model, text_data(24)).save_model(str(tmp_path / "saved"))
    loaded = type(model).from_pretrained(tmp_path / "saved")
    trained(trainer_of(tmp_path / "again", model=loaded, data=text_data(24), max_steps=1))


@pytest.mark.parametrize("inner", [OPEN, dict(noise_multiplier=1.0)], ids=["without privacy", "private"])
def test_a_model_that_a_run_trains_is_not_trained_by_another(tmp_path, inner):
    outcomes = []

    def train_again(model, **_):
        with refused("model-in-a-run"):
            trainer_of(tmp_path / "inner", model=model, max_steps=1, **inner).train()
        copied = trainer_of(
            tmp_path / "copied", model=copy.deepcopy(model), data=text_data(24, seed=7), max_steps=1, **inner
        )
        outcomes.append(trained(copied).state.global_step)

    outer = trained(trainer_of(tmp_path, callbacks=[On(step_end=at(2, train_again))], max_steps=3))
    assert outcomes == [1]
    assert outer.state.global_step == outer.privacy.ledger.steps_run == 3
