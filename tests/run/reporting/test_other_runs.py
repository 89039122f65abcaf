"""Several private runs of a process on the same data say that their ε add up if they are compared or published."""

import gc
import weakref

import pytest
from datasets import Dataset

from doppler_hf.run.reporting import other_runs
from tests.support.ledgers import said
from tests.support.search import make_trials, space, trainer_of_search
from tests.support.tiers import thorough
from tests.support.tiny import Rows, text_data, tiny_bert
from tests.support.trainers import On, at, interrupt, trained, trainer_of

NOTE = "on the same data"


def rows(seed=3):
    return [dict(row) for row in text_data(24, seed=seed)]


@pytest.mark.parametrize("kind", [Dataset.from_list, *thorough(Rows, list)])
def test_a_loop_over_learning_rates_says_that_epsilon_adds_up(tmp_path, capsys, kind):
    epsilons = []
    for number, rate in enumerate((0.01, 0.02, 0.01, 0.02, 0.01)):
        # The data are made anew, as by a function that trains.
        trainer = trained(trainer_of(tmp_path / str(number), data=kind(rows()), learning_rate=rate, max_steps=1))
        shown = said(capsys)
        assert (NOTE in shown) == (number > 0)
        epsilons.append(trainer.privacy.epsilon())
        if number in (1, 4):
            folder = tmp_path / str(number - 1) / "out"
            assert f"made {number} private run{'s' * (number > 1)} on the same data" in shown
            assert f"ε = {epsilons[-2]:.4g} in {folder}" in shown
            assert f"their ε add up (to {sum(epsilons):.4g} with this one)" in shown
        assert str(tmp_path / "0" / "out") not in shown or number < 4  # only the latest are named


def test_other_data_and_what_the_ledger_includes_are_left_out(tmp_path, capsys):
    first = trained(trainer_of(tmp_path / "first", max_steps=1))
    trained(trainer_of(tmp_path / "other", data=Dataset.from_list(rows()), max_steps=1))
    trained(trainer_of(tmp_path / "open", disable_dp=True, noise_multiplier=None, learning_rate=0.1, max_steps=1))
    first.train()  # in the same ledger
    trained(trainer_of(tmp_path / "further", model=first.model, max_steps=1))  # its ledger includes the first one
    assert NOTE not in said(capsys)
    trained(trainer_of(tmp_path / "anew", model=tiny_bert(), max_steps=1))
    assert "made 2 private runs" in said(capsys)


def test_an_interrupted_run_counts_unless_it_goes_on(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, max_steps=6, callbacks=[On(step_begin=at(3, interrupt))]).train()
    trainer_of(tmp_path, max_steps=6).train(resume_from_checkpoint=True)
    assert NOTE not in said(capsys)
    trained(trainer_of(tmp_path / "second", max_steps=1))
    assert "made 1 private run on" in said(capsys)


def test_no_data_set_is_kept_in_memory(tmp_path):
    data = Rows(rows())
    kept = weakref.ref(data)
    trained(trainer_of(tmp_path, data=data, max_steps=1))
    del data
    gc.collect()
    assert kept() is None
    assert len(other_runs._OF_PROCESS) == 1


def test_a_search_counts_as_one_and_says_nothing_of_its_trials(tmp_path, monkeypatch, capsys):
    make_trials(monkeypatch, 3)
    trainer = trainer_of_search(tmp_path)
    best = trainer.hyperparameter_search(space, n_trials=2)
    assert NOTE not in said(capsys)
    spent = trainer.privacy.epsilon()
    retrained = trainer_of(tmp_path / "again", data=trainer.train_dataset, **best.hyperparameters)
    retrained.train()
    shown = said(capsys)
    assert f"made 1 private run on the same data, with ε = {spent:.4g} in" in shown
    trainer_of_search(tmp_path / "second").hyperparameter_search(space, n_trials=2)
    assert "made 2 private runs on the same data" in said(capsys)
