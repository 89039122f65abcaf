"""Weights that were trained without privacy on the same data begin no private run, nor is a model trained by two runs."""

import copy

import pytest
from torch.utils.data import Dataset

from tests.support.models import with_adapters
from tests.support.refusals import refused
from tests.support.tiny import text_data, tiny_bert
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
