"""A hyperparameter search: its ε, what it publishes, what it refuses, and what an interruption costs."""

import copy
import functools
import importlib
import itertools
import json
import logging
import math
import os
import random
import re
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import norm
from transformers import BertForSequenceClassification, EarlyStoppingCallback, TrainerCallback

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main
from doppler_hf.errors import Failure
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Spent
from doppler_hf.privacy.accounting.composition import gaussian_delta, gaussian_epsilon
from doppler_hf.privacy.accounting.selection import NumberOfTrials, selection_of
from doppler_hf.privacy.ledger.file import WriterLock
from doppler_hf.privacy.ledger.ledger import SEARCH_NOTE_NAME
from doppler_hf.privacy.ledger.terms import claim_in_words
from doppler_hf.run.planning.learning_rate import automatic_learning_rate
from doppler_hf.run.reporting import other_runs
from doppler_hf.run.search import interrupted_searches, search
from doppler_hf.run.search.interrupted_searches import RunningSearch, SearchState, interrupted_in
from doppler_hf.run.search.search import another_trial
from doppler_hf.run.search.search_space import SEARCHED, Draw, arguments_of_trial
from doppler_hf.run.weights import lineage
from tests.support.power import Disk
from tests.support.printed import flat
from tests.support.refusals import refused
from tests.support.search import NO_CALL, Mechanism, best_of, files_below, make_trials, space, trainer_of_search
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, arguments, at, interrupt

pytestmark = pytest.mark.filterwarnings("ignore")


def searched(tmp_path, monkeypatch, *, trials, resume=None, **options):
    make_trials(monkeypatch, trials)
    trainer = trainer_of_search(tmp_path, **options)
    return trainer, trainer.hyperparameter_search(space, n_trials=3, resume_from_checkpoint=resume)


def test_the_best_trial_is_published_with_the_epsilon_of_the_search_and_verify_recomputes_it(tmp_path, monkeypatch, capsys):
    seen = []
    watching = On(evaluate=lambda metrics, **_: seen.append(metrics["eval_loss"]))
    watching.__deepcopy__ = lambda memo: watching  # the test sees all trials
    trainer, best = searched(tmp_path, monkeypatch, trials=3, callbacks=[watching])
    _, *losses = seen
    assert len(losses) == 3
    assert best.objective == min(losses)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best.objective)
    assert best.hyperparameters == {name: getattr(trainer.args, name) for name in best.hyperparameters}
    assert trainer.args.output_dir == str(tmp_path / "out")
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert ledger.run_id == best.run_id
    terms = ledger.statement.search
    assert (terms.expected_trials, terms.first_delta) == (3, pytest.approx(ledger.statement.target_delta / 3))
    assert ledger.epsilon() == pytest.approx(3.0, rel=1e-9)
    assert ledger.epsilon_of_trial < terms.first_epsilon < 3.0
    assert ledger.spent.epsilon == pytest.approx(3.0, rel=1e-9)
    assert ledger.claims[-1].epsilon == pytest.approx(3.0, rel=1e-9)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "VERIFIED: (3, " in said
    assert "3 expected" in said
    assert "1970" not in said
    words = claim_in_words(ledger)
    assert "This ε is that of a whole search, of which only the best trial was published" in words
    delta = ledger.statement.target_delta
    assert f"The published trial alone would cost ε = {ledger.epsilon_of_trial:.4g} at δ = {delta:.3g}." in words
    # A ledger that states less for its trials does not pass, though its hashes fit.
    path = tmp_path / "out" / "privacy_ledger.json"
    entries = json.loads(path.read_text("utf-8"))["entries"]
    entries[0]["statement"]["search"]["first_epsilon"] /= 2
    rewritten(path, entries)
    assert main(["verify", str(tmp_path / "out")]) == 1


def test_the_budget_is_divided_for_the_shape_of_the_noise(tmp_path, monkeypatch):
    """Divided for white noise, trials with shaped noise would need more noise: 1.34 instead of 1.09 for SST-2, by `plan`."""
    make_trials(monkeypatch, 1)
    divided_for, divide = [], search.divide_budget

    def noted(trials, *, single_run, **terms):
        divided_for.append(single_run)
        return divide(trials, single_run=single_run, **terms)

    monkeypatch.setattr(search, "divide_budget", noted)
    trainer = trainer_of_search(tmp_path, noise_shape="banded:bands=4", max_steps=8)
    trainer.hyperparameter_search(lambda trial: {"per_sample_max_grad_norm": 1.0}, n_trials=10)
    (releases,) = divided_for
    assert releases.strategy == NoiseShape.banded(4).c
    assert releases.strategy == NoiseShape.parse(PrivacyLedger.load(tmp_path / "out").statement.noise_shape).c


def rewritten(path, entries):
    from doppler_hf.privacy.ledger.file import ORIGIN, digest, write_entries

    before = ORIGIN
    for entry in entries:
        entry.pop("hash")
        entry["previous_hash"] = before
        entry["hash"] = before = digest(entry)
    write_entries(path, entries)


def test_a_search_whose_delta_is_not_divided_is_no_ledger(tmp_path, monkeypatch):
    searched(tmp_path, monkeypatch, trials=1)
    path = tmp_path / "out" / "privacy_ledger.json"
    entries = json.loads(path.read_text("utf-8"))["entries"]
    entries[0]["statement"]["search"]["first_delta"] *= 3
    rewritten(path, entries)
    with refused("impossible-entry"):
        PrivacyLedger.load(path)


def test_a_user_in_both_sets_is_refused(tmp_path):
    train, evaluated = (
        data.add_column("user", [first + row // 2 for row in range(len(data))])
        for data, first in ((text_data(48), 0), (text_data(8, seed=1), 23))
    )
    trainer = trainer_of_search(tmp_path, evaluated=evaluated, privacy_unit_column="user")
    trainer.train_dataset = train
    with refused("search-on-users", match="'user'"):
        trainer.hyperparameter_search(space, n_trials=3)
    trainer.eval_dataset = evaluated.map(lambda row: {"user": row["user"] + 1})
    assert trainer.hyperparameter_search(space, n_trials=3).run_id


def test_only_the_best_model_is_left_for_callbacks(tmp_path, monkeypatch):
    """And none of the locks of the folders of trials."""
    trainer, _ = searched(tmp_path, monkeypatch, trials=3)
    handler = trainer.callback_handler
    assert handler.model is trainer.model
    assert handler.optimizer is handler.lr_scheduler is None
    assert [*trainer._locks] == [(tmp_path / "out").resolve()]


def test_what_the_space_prints_is_not_shown_for_the_trials(tmp_path, monkeypatch, capsys):
    make_trials(monkeypatch, 3)

    def loud(trial):
        print("drawn")
        return space(trial)

    trainer_of_search(tmp_path).hyperparameter_search(loud, n_trials=3)
    assert capsys.readouterr().out.count("drawn") == 300  # by the checks before the search


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformers", "PrinterCallback"),
        ("transformers", "ProgressCallback"),
        ("transformers.utils.notebook", "NotebookProgressCallback"),
        ("trl.trainer.callbacks", "RichProgressCallback"),
    ],
)
def test_a_trial_has_no_callback_that_only_shows_something(module, name, monkeypatch):
    if module.startswith("trl"):
        pytest.importorskip("trl", reason="the extra trl is not installed")
    display = types.SimpleNamespace(HTML=str, display=print)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    shown, own = object.__new__(getattr(importlib.import_module(module), name)), On(log=lambda **_: None)
    assert [type(each) for each in search.copied_callbacks([shown, own])] == [On]


def test_a_search_finds_the_ledgers_of_folders_beside_its_own(tmp_path, monkeypatch):
    before = trainer_of_search(tmp_path, output_dir=str(tmp_path / "first"), noise_multiplier=1.0, target_epsilon=None)
    before.train()
    before.save_model()
    weights = {name: value.clone() for name, value in before.model.state_dict().items()}
    monkeypatch.setattr(lineage, "_OF_PROCESS", {})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))

    def loaded():
        model = tiny_bert()
        model.load_state_dict({name: value.clone() for name, value in weights.items()})
        return model

    make_trials(monkeypatch, 2)
    trainer_of_search(tmp_path, output_dir=str(tmp_path / "second"), model_init=loaded).hyperparameter_search(
        space, n_trials=3
    )
    ledger = PrivacyLedger.load(tmp_path / "second")
    assert ledger.spent.epsilon == pytest.approx(3.0 + before.privacy.ledger.epsilon(), rel=1e-6)


def test_the_default_objective_is_the_loss_or_the_sum_of_the_users_metrics():
    metrics = {
        "eval_other_loss": 3.0,
        "eval_loss": 0.5,
        "eval_accuracy": 0.75,
        "eval_f1": 0.5,
        "eval_majority_class_accuracy": 0.6,
        "eval_runtime": 2.0,
    }
    assert search.default_objective(metrics | {"eval_most_frequent_predicted_share": 1.0}, direction="maximize") == 1.25
    assert search.default_objective(metrics, direction="minimize") == 0.5


class Loud(TrainerCallback):
    """Shows every evaluation in each way that a program has."""

    def on_evaluate(self, args, state, control, **_):
        print("printed")
        sys.stderr.write("written")
        warnings.warn("warned", stacklevel=1)
        logging.getLogger("of_the_user").error("logged")


def measured_in(logs):
    """Return what logs tell of a clock, which depends on the trials that ran before."""
    assert any("eval_loss" in log for log in logs)
    words = ("runtime", "per_second", "_time")
    return [name for log in logs for name in log if any(word in name for word in words)]


def test_nothing_that_is_left_or_shown_depends_on_the_number_of_trials(tmp_path, monkeypatch, capfd, caplog):
    """All that a search leaves, anywhere, is that of its best trial: no file of a loser, no time and no line."""
    found = {}
    for trials in (1, 4):
        place = tmp_path / str(trials)
        for name in ("temporary", "states"):
            (place / name).mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place / "temporary"))
        monkeypatch.setenv("XDG_STATE_HOME", str(place / "states"))
        monkeypatch.setattr(other_runs, "_OF_PROCESS", {})  # the second search would name the first
        caplog.clear()
        capfd.readouterr()
        trainer, best = searched(
            place, monkeypatch, trials=trials, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
            plot_training_curve=True, disable_tqdm=False, callbacks=[Loud()],
        )  # fmt: skip
        shown = capfd.readouterr()
        folder = place / "out"
        assert len({path.stat().st_mtime for path in [folder, *folder.rglob("*")]}) == 1, "times tell when the search ended"
        entries = PrivacyLedger.load(folder).entries
        assert {entry["time"] for entry in entries} == {"1970-01-01T00:00:00+00:00"}, "times tell when the search was made"
        trainer.save_state()
        assert not measured_in(json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"])
        assert not any(str(place / "temporary") in str(value) for value in vars(trainer.args).values())
        # The lengths of trials differ, and so do the losses.
        found[trials] = (
            [name.replace(best.run_id, "RUN") for name in files_below(place)],
            sorted({entry["event"] for entry in entries}),
            shown.out.count("\n"),
            [shown.out.count(word) + shown.err.count(word) for word in ("printed", "written", "warned", "eval_loss")],
            len(caplog.records),
        )
        assert not [*(place / "temporary").iterdir()], "files of trials are left"
    assert found[1] == found[4]
    names, _, _, counts, _ = found[1]
    assert counts[:2] == [1, 1], "the untrained model's evaluation is shown, and no other"
    assert SEARCH_NOTE_NAME not in {Path(name).name for name in names}
    assert [name for name in names if name.startswith("out/checkpoint")] == []


def test_a_trial_that_fails_is_the_worst_one_and_is_not_shown(tmp_path, monkeypatch, capsys):
    calls = []

    def objective(metrics):
        calls.append(metrics["eval_loss"])
        if len(calls) in (2, 3):  # the first call is that of the untrained model
            raise KeyError("nothing")
        return math.nan if len(calls) == 4 else metrics["eval_loss"]

    make_trials(monkeypatch, 4)
    best = trainer_of_search(tmp_path).hyperparameter_search(space, objective, n_trials=3, direction="maximize")
    assert best.objective == calls[4]
    shown = capsys.readouterr()
    assert "KeyError" not in shown.out + shown.err


def test_a_search_without_a_result_is_an_error_and_its_epsilon_is_spent(tmp_path, monkeypatch):
    calls = []

    def fails(metrics):
        calls.append(0)
        if len(calls) == 3:
            raise KeyError("nothing")
        return 0.0 if len(calls) == 1 else math.nan

    make_trials(monkeypatch, 2)
    trainer = trainer_of_search(tmp_path)
    with pytest.raises(Failure, match="KeyError: 'nothing'") as failure:
        trainer.hyperparameter_search(space, fails, n_trials=3)
    assert failure.value.code == "search-failed"
    assert interrupted_in(tmp_path / "out")
    assert trainer.args.output_dir == str(tmp_path / "out")
    trainer.train()  # the trainer is as it was before the search
    assert trainer.privacy.ledger.earlier.epsilon == pytest.approx(3.0)


def test_an_error_before_the_first_step_costs_nothing_and_is_passed_on(tmp_path, monkeypatch):
    trainer = trainer_of_search(tmp_path)
    make_trials(monkeypatch, 3)
    with refused("batch-out-of-range"):
        trainer.hyperparameter_search(lambda trial: {"per_device_train_batch_size": 48}, n_trials=3)
    assert not interrupted_in(tmp_path / "out")


def test_an_interrupted_search_counts_in_another_one_of_its_folder(tmp_path, monkeypatch, capsys):
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, monkeypatch, trials=2, callbacks=[On(step_end=at(2, interrupt))])
    said = capsys.readouterr().out
    assert "Other private runs in" in said
    assert "add its ε = 3 at δ = 0.0141 to theirs" in said
    out = tmp_path / "out"
    (note,) = json.loads((out / SEARCH_NOTE_NAME).read_text("utf-8"))["searches"]
    assert note["epsilon"] == 3.0
    assert [path.name for path in out.iterdir()] == [SEARCH_NOTE_NAME]
    assert main(["verify", str(out)]) == 2
    assert "a hyperparameter search was begun there and has not ended. Its ε counts all the same" in capsys.readouterr().err
    trainer, _ = searched(tmp_path, monkeypatch, trials=1, resume=False)
    ledger = PrivacyLedger.load(out)
    assert ledger.spent.epsilon == pytest.approx(6.0)
    assert ledger.spent.delta == pytest.approx(2 * ledger.statement.target_delta)
    words = claim_in_words(ledger)
    assert "the sum of this run (ε = 3) and an interrupted search (ε = 3)" in words
    assert "The ε of an interrupted search in the same folder is included. It published nothing" in words
    assert "trained these weights" not in words
    assert not (out / SEARCH_NOTE_NAME).exists()
    capsys.readouterr()
    assert main(["verify", str(out)]) == 0
    assert "The ε of the others is as this ledger states it. Verify their ledgers, too." in flat(capsys.readouterr().out)
    # A model that is trained further counts the whole search, and the ledger of a search has no continuation.
    further = DopplerTrainer(
        trainer.model, arguments(tmp_path / "further", max_steps=2), pad, text_data(48), text_data(8, seed=1)
    )
    further.train()
    assert further.privacy.ledger.earlier.epsilon == pytest.approx(6.0)
    model = trainer.model
    with refused("search-continued"):
        trainer.train()
    assert trainer.model is model, "the best model is still there"


def test_the_note_of_a_running_search_is_on_the_disk_before_its_first_trial(tmp_path, monkeypatch):
    disk, seen = Disk(monkeypatch), []

    def look(**_):
        seen.extend(path for _, path in disk.lost if path.name == SEARCH_NOTE_NAME or path == tmp_path / "out")

    callback = On(train_begin=look)
    searched(tmp_path, monkeypatch, trials=1, callbacks=[callback])
    assert not seen
    assert [path for _, path in disk.lost if path.parent == tmp_path / "out"] == []


def failing(trainer, fault):
    """Let the trainer fail once while it saves the best model, after some files were written."""
    save = trainer.save_model

    def fails(*args, **kwargs):
        trainer.save_model = save
        fault(save)

    trainer.save_model = fails
    return trainer


def disk_is_full(save):
    raise OSError(28, "No space left on device")


def disk_is_full_after_saving(save):
    save()
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fault", [disk_is_full, disk_is_full_after_saving])
def test_a_search_whose_model_cannot_be_saved_counts_until_it_is_saved(tmp_path, monkeypatch, capsys, fault):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, monkeypatch, trials=2, callbacks=[On(step_end=at(2, interrupt))])
    trainer = failing(trainer_of_search(tmp_path), fault)
    with pytest.raises(OSError, match="No space"):
        trainer.hyperparameter_search(space, n_trials=3, resume_from_checkpoint=False)
    said = capsys.readouterr().out
    is_saved = fault is disk_is_full_after_saving
    assert ("could not be saved. The trainer has this model" in said) is not is_saved
    assert len(interrupted_in(out)) == (1 if is_saved else 2), "the search counts, and the one before it"
    # Nothing tells when the search ended, although it failed.
    assert len({path.stat().st_mtime for path in [out, *out.rglob("*")] if path.name != SEARCH_NOTE_NAME}) == 1
    trainer.save_model()
    ledger = PrivacyLedger.load(out)
    assert ledger.spent.epsilon == pytest.approx(6.0)
    assert main(["verify", str(out)]) == 0
    assert len(interrupted_in(out)) == 1
    # The next one counts the interrupted search alone, and leaves no note.
    again, _ = searched(tmp_path, monkeypatch, trials=1, resume=False)
    assert again.privacy.ledger.spent.epsilon == pytest.approx(6.0)
    assert not (out / SEARCH_NOTE_NAME).exists()


def test_a_search_whose_ledger_is_in_another_folder_keeps_its_note(tmp_path, monkeypatch, capsys):
    class Elsewhere(DopplerTrainer):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(str(tmp_path / "elsewhere"), _internal_call)

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, monkeypatch, trials=2, callbacks=[On(step_end=at(2, interrupt))])
    trainer, _ = searched(tmp_path, monkeypatch, trials=1, cls=Elsewhere, resume=False)
    assert trainer.privacy.ledger.spent.epsilon == pytest.approx(6.0)
    assert PrivacyLedger.load(tmp_path / "elsewhere").spent.epsilon == pytest.approx(6.0)
    assert "has no ledger of this search" in capsys.readouterr().out
    assert len(interrupted_in(tmp_path / "out")) == 2
    # It has ended, so the next one is another one.
    trainer, _ = searched(tmp_path, monkeypatch, trials=1)
    assert trainer.privacy.ledger.spent.epsilon == pytest.approx(9.0)


def test_a_folder_that_another_run_uses_keeps_its_times(tmp_path):
    trainer = trainer_of_search(tmp_path)
    with WriterLock(tmp_path / "out"):
        files = [tmp_path / "out" / "theirs", tmp_path / "out"]
        files[0].write_text("being written")
        os.utime(files[0], (2e9, 2e9))
        with refused("folder-in-use"):
            trainer.hyperparameter_search(space, n_trials=3)
        assert files[0].stat().st_mtime == 2e9


def test_times_that_cannot_be_changed_are_told(tmp_path, monkeypatch, capsys):
    def refuses(path, *times, **options):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuses)
    (tmp_path / "a").write_text("")
    search._date_back(tmp_path, to=0.0)
    assert f"does not let the search change the times of a, {tmp_path.name} in" in capsys.readouterr().out


def test_what_a_kill_has_left_is_counted_by_an_ordinary_run_and_removed_by_another_search(tmp_path):
    left, other = tmp_path / "doppler-hf-search-left", tmp_path / "mine"
    for each in (left, other):
        each.mkdir(parents=True)
        (each / "weights").write_text("of a loser")
    out = tmp_path / "out"
    out.mkdir()
    notes = [
        {"name": name, "epsilon": 2.0, "delta": 1e-3, "trials": str(each)} for name, each in (("a", left), ("b", other))
    ]
    interrupted_searches._write_notes(out, notes)
    trainer = trainer_of_search(tmp_path)
    trainer.train()
    assert trainer.privacy.ledger.earlier.epsilon == pytest.approx(4.0)
    with (
        pytest.raises(ZeroDivisionError),
        interrupted_searches.noted_search(out, NO_CALL, spent=Spent(1.0, 1e-3), resume=False),
    ):
        raise ZeroDivisionError
    assert not left.exists()
    assert other.exists(), "the note may have been edited, and names a folder that is no search's"
    assert interrupted_in(out).keys() == {"search-a", "search-b"}, "a search that spent nothing leaves no note"
    (out / SEARCH_NOTE_NAME).write_text("{")
    with refused("search-note-damaged"):
        interrupted_in(out)


def test_a_chain_of_runs_adds_up(tmp_path, monkeypatch):
    first = trainer_of_search(tmp_path / "first", target_epsilon=2.0)
    first.train()
    first.save_model()
    folder = tmp_path / "first" / "out"
    trainer, _ = searched(
        tmp_path, monkeypatch, trials=2, model_init=lambda: BertForSequenceClassification.from_pretrained(folder)
    )
    assert trainer.privacy.ledger.earlier.epsilon == pytest.approx(2.0, rel=1e-2)
    assert trainer.privacy.ledger.spent.epsilon == pytest.approx(5.0, rel=1e-2)
    assert main(["verify", str(tmp_path / "out")]) == 0


ONE = tiny_bert()
WEIGHTS = tiny_bert().state_dict()
TABLE = torch.arange(16.0)


def with_table(set_table):
    def model_init():
        model = tiny_bert()
        set_table(model)
        return model

    return model_init


MODELS_THAT_SHARE = {
    "buffer": with_table(lambda model: model.bert.register_buffer("table", TABLE)),
    "part of a buffer": with_table(lambda model: model.bert.register_buffer("table", TABLE[4:8], persistent=False)),
    "attribute": with_table(lambda model: setattr(model.bert, "table", TABLE)),
    "layer": with_table(lambda model: setattr(model.bert, "pooler", ONE.bert.pooler)),
    "weights": with_table(lambda model: model.load_state_dict(WEIGHTS, assign=True)),
    "array": with_table(lambda model: model.bert.register_buffer("table", torch.from_numpy(TABLE.numpy()))),
}


@pytest.mark.parametrize("shared", MODELS_THAT_SHARE)
def test_models_that_share_memory_are_refused(tmp_path, shared):
    trainer = trainer_of_search(tmp_path, model_init=MODELS_THAT_SHARE[shared])
    with refused("search-same-model", match="share the memory of"):
        trainer.hyperparameter_search(space, n_trials=3)


def test_models_of_equal_values_share_nothing(tmp_path):
    """The refusal says how: a copy of each value."""

    def copied(model):
        model.load_state_dict({name: value.clone() for name, value in WEIGHTS.items()}, assign=True)
        model.bert.register_buffer("table", TABLE.clone(), persistent=False)

    assert trainer_of_search(tmp_path, model_init=with_table(copied)).hyperparameter_search(space, n_trials=1.01).run_id


class Locked(TrainerCallback):
    """A callback with an object that cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()


def test_a_callback_that_no_trial_can_have_a_copy_of_is_refused_and_removed(tmp_path):
    trainer = trainer_of_search(tmp_path, callbacks=[Locked()])
    with refused("search-callbacks", match="cannot be copied .TypeError"):
        trainer.hyperparameter_search(space, n_trials=1.01)
    trainer.remove_callback(Locked)
    assert trainer.hyperparameter_search(space, n_trials=1.01).run_id


REFUSED = {
    "search-backend": (dict(), dict(backend="optuna")),
    "search-direction": (dict(), dict(direction=["minimize", "maximize"])),
    "search-without-target": (dict(target_epsilon=None, noise_multiplier=1.0), dict()),
    "search-with-seed": (dict(noise_seed=1), dict()),
    "search-reports": (dict(report_train_loss="raw"), dict()),
    "search-same-model": (dict(model_init=lambda: ONE), dict()),
    "search-on-training-data": (dict(evaluated=text_data(48)), dict()),
    "search-on-copies": (dict(evaluated=Dataset.from_list(text_data(48).to_list()[5:25])), dict()),
    "search-space": (dict(), dict(hp_space=None)),
    "search-setting": (dict(), dict(hp_space=lambda trial: {"target_epsilon": 8.0})),
    "search-objective": (dict(), dict(compute_objective=lambda metrics: metrics["eval_accuracy"])),
    "out-of-range": (dict(), dict(n_trials=1)),
}


@pytest.mark.parametrize("n_trials", [None, "10", True, math.nan, math.inf, 0])
def test_a_number_of_trials_that_is_none_is_refused_before_anything_is_computed(tmp_path, n_trials):
    trainer = trainer_of_search(tmp_path)
    trainer.model_init = None  # a later check
    with refused("out-of-range"):
        trainer.hyperparameter_search(space, n_trials=n_trials)


@pytest.mark.parametrize(
    ("options", "direction", "said"),
    [
        (dict(), "maximize", "Give the trainer compute_metrics"),
        (dict(evaluated={"a": text_data(8, seed=1), "b": text_data(8, seed=2)}), "maximize", "Give the trainer"),
        (dict(evaluated={"a": text_data(8, seed=1), "b": text_data(8, seed=2)}), "minimize", "from these metrics: e"),
    ],
)
def test_a_search_without_an_objective_that_fits_its_direction_is_refused(tmp_path, options, direction, said):
    """Transformers would make the loss as large as possible, if there are no metrics to be made large."""
    trainer = trainer_of_search(tmp_path, **options)
    with refused("search-objective", match=said):
        trainer.hyperparameter_search(space, n_trials=3, direction=direction)
    # The refusals say what to do.
    if direction == "minimize":
        assert trainer.hyperparameter_search(space, lambda metrics: metrics["eval_a_loss"], n_trials=1.01).run_id
    else:
        trainer.compute_metrics = lambda predictions: {"accuracy": 1.0}
        sets = len(options.get("evaluated", "a"))
        assert trainer.hyperparameter_search(space, n_trials=1.01, direction=direction).objective == sets


def counted_off(numbers):
    return lambda trial: {"learning_rate": next(numbers)}


SPACES_OF_THEIR_OWN = {
    "random": lambda: lambda trial: {"learning_rate": random.choice([1e-3, 1e-2])},
    "numpy": lambda: lambda trial: {"learning_rate": float(np.random.default_rng(time.perf_counter_ns()).uniform(1, 2))},
    "grid": lambda: counted_off(itertools.cycle([1e-3, 1e-2])),
    "beside": lambda: lambda trial: space(trial) | {"seed": random.randrange(10**6)},
}


@pytest.mark.parametrize("name", SPACES_OF_THEIR_OWN)
def test_settings_that_are_not_drawn_by_the_trial_are_refused(tmp_path, name):
    with refused("search-space", match="other settings although trial drew the same numbers"):
        trainer_of_search(tmp_path).hyperparameter_search(SPACES_OF_THEIR_OWN[name](), n_trials=3)


@pytest.mark.parametrize(
    ("call", "mended"),
    [
        (lambda trial: trial.suggest_loguniform("a", 1e-3, 1e-2), "suggest_float(name, low, high, log=True)"),
        (lambda trial: trial.suggest_uniform("a", 1e-3, 1e-2), "suggest_float(name, low, high)"),
        (lambda trial: trial.suggest_discrete_uniform("a", 1e-3, 1e-2, 1e-3), "suggest_float(name, low, high, step=step)"),
        (lambda trial: [1e-3, 1e-2][trial.number % 2], "Draw the settings with suggest_float"),
    ],
)
def test_other_methods_of_optunas_trials_are_refused_with_what_to_call(tmp_path, call, mended):
    with refused("search-space", match=re.escape(mended)):
        trainer_of_search(tmp_path).hyperparameter_search(lambda trial: {"learning_rate": call(trial)}, n_trials=3)
    terms = dict(name="a", low=1e-3, high=1e-2, step=1e-3)
    if mended.startswith("suggest_float("):
        assert 1e-3 <= eval(f"Draw().{mended}", {"Draw": Draw} | terms) <= 1e-2


def test_a_learning_rate_of_0_is_refused_before_the_search(tmp_path, capsys):
    trainer = trainer_of_search(tmp_path, rehearse=True)
    with refused("rate-far-off", match=r"hp_space drew settings .*: learning_rate=0 trains nothing"):
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [0.0, 0.01])}, n_trials=3
        )
    assert "Search:" not in capsys.readouterr().out


@pytest.mark.parametrize(("low", "high"), [(1e-6, 1e-4), (1e-3, 1e6)])
def test_learning_rates_far_from_the_automatic_one_are_refused_before_the_search(tmp_path, low, high, capsys):
    """Such as the space that Transformers takes by default, whose trials would learn nothing, and nobody would know."""

    def rates(high):
        return lambda trial: {"learning_rate": trial.suggest_float("learning_rate", low, high, log=True)}

    trainer = trainer_of_search(tmp_path, rehearse=True)
    with refused("rate-far-off", match="hp_space drew settings .*learning_rate.* than the automatic value"):
        trainer.hyperparameter_search(rates(high), n_trials=3)
    assert "Search:" not in capsys.readouterr().out
    trainer.args.allow_any_learning_rate = True
    # With a still larger rate the weights may overflow, and then no trial has a model to publish.
    assert trainer.hyperparameter_search(rates(min(high, 1.0)), n_trials=1.01).run_id


def test_a_learning_rate_that_is_far_off_only_with_other_settings_is_refused_before_the_search(tmp_path, capsys):
    """A rate that a run of 3 steps accepts is too large for 300 steps."""
    trainer = trainer_of_search(tmp_path, rehearse=True)
    rule = automatic_learning_rate(trainer.args, trainer.privacy.statement, model=trainer.model)

    def rates(most):
        def space(trial):
            large = trial.suggest_categorical("large", [1.0, 80.0])
            return {"learning_rate": large * rule, "max_steps": trial.suggest_categorical("steps", [3, most])}

        return space

    with refused("rate-far-off", match="'max_steps': 300"):
        trainer.hyperparameter_search(rates(300), n_trials=3)
    assert "Search:" not in capsys.readouterr().out
    assert trainer.hyperparameter_search(rates(2), n_trials=1.01).run_id


NOT_BEGUN = {
    "batch-out-of-range": dict(per_device_train_batch_size=49),
    "too-few-units": dict(noise_shape="banded:bands=8"),  # of batches of 8 records, 6 of which are in the data
    "out-of-range": dict(num_train_epochs=0.0, max_steps=-1),
    "no-effect": dict(num_train_epochs=2.0),  # the trainer has max_steps
    "rate-never-arrives": dict(warmup_steps=100),
    "search-setting-fails": dict(lr_scheduler_type="cosine_with_min_lr"),  # which has no rate without lr_scheduler_kwargs
}


@pytest.mark.parametrize("code", NOT_BEGUN)
def test_settings_that_a_trial_would_refuse_when_it_begins_are_refused_before_the_search(tmp_path, capsys, code):
    trainer = trainer_of_search(tmp_path, rehearse=True)

    def space(trial):
        return {"seed": 1} | (NOT_BEGUN[code] if trial.suggest_categorical("refused", [True, False]) else {})

    with refused(code, match="with which a trial would (be refused|fail)"):
        trainer.hyperparameter_search(space, n_trials=3)
    assert "Search:" not in capsys.readouterr().out


def test_early_stopping_without_a_metric_says_so_and_with_one_stops_trials(tmp_path, capsys):
    trainer = trainer_of_search(tmp_path, callbacks=[EarlyStoppingCallback(1)])
    with refused("early-stopping-alone"):
        trainer.hyperparameter_search(space, n_trials=3)
    assert not interrupted_in(tmp_path / "out")
    best = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
    trainer = trainer_of_search(
        tmp_path, callbacks=[EarlyStoppingCallback(1)], metric_for_best_model="eval_loss", learning_rate=1e-9,
        greater_is_better=True, rehearse=False, **best,
    )  # fmt: skip
    found = trainer.hyperparameter_search(lambda trial: {"max_steps": 9}, n_trials=1.01)
    said = "With EarlyStoppingCallback, the time that the search takes depends on the training records"
    assert said in capsys.readouterr().out
    assert PrivacyLedger.load(tmp_path / "out").steps_run < 9
    trainer.create_model_card()
    # After the training come the evaluation for the objective and no others.
    *during, _ = [log for log in trainer.state.log_history if "eval_loss" in log]
    best_log = max(during, key=lambda log: log["eval_loss"])
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert f"The weights are those of step {best_log['step']}, chosen by `loss`" in card
    assert card.count("\n| ") == 1 + len(during)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found.objective)


def test_a_number_in_steps_is_never_beyond_its_range():
    """In floating point, 1e-3 + 9·1e-3 is above 1e-2."""
    drawn = {Draw().suggest_float("a", 1e-3, 1e-2, step=1e-3) for _ in range(300)}
    assert len(drawn) == 10
    assert max(drawn) == 1e-2


def test_a_trial_can_be_asked_what_it_has():
    assert hasattr(Draw(), "suggest_int")
    assert not hasattr(Draw(), "number")
    assert copy.deepcopy(Draw()).params == {}


def test_numbers_of_numpy_are_settings(tmp_path, monkeypatch):
    make_trials(monkeypatch, 1)

    def numbers(trial):
        sizes = np.array([2, 4])
        return {
            "per_device_train_batch_size": trial.suggest_categorical("a", sizes),
            "max_steps": np.int64(trial.suggest_int("b", 2, 3)),
            "per_sample_max_grad_norm": np.float32(0.5),
        }

    best = trainer_of_search(tmp_path).hyperparameter_search(numbers, n_trials=3)
    assert {type(value) for value in best.hyperparameters.values()} == {int, float}
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_trainer_that_takes_no_model_init_says_so(tmp_path):
    class Theirs(DopplerTrainer):
        def __init__(self, model, args, train_dataset, eval_dataset):
            super().__init__(model, args, pad, train_dataset, eval_dataset)

    args = arguments(tmp_path, noise_multiplier=None, target_epsilon=3.0)
    with refused("search-takes-no-model-init", match="Theirs takes no model_init"):
        Theirs(tiny_bert(), args, text_data(48), text_data(8, seed=1)).hyperparameter_search(space, n_trials=3)


@pytest.mark.parametrize("code", REFUSED)
def test_a_search_that_would_break_its_guarantee_is_refused_before_anything_is_spent(tmp_path, code, monkeypatch):
    options, call = REFUSED[code]
    trainer = trainer_of_search(tmp_path, **options)
    with refused(code):
        trainer.hyperparameter_search(**dict(hp_space=space, n_trials=3) | call)
    assert not (tmp_path / "out" / SEARCH_NOTE_NAME).exists()
    assert not (tmp_path / "out" / "privacy_ledger.json").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rat": 1e-3},
        {"base_optimizer": "adamw"},
        {"per_sample_max_grad_norm": -1.0},
        {"adam_beta2": 1.0},
        {"adam_epsilon": 0.0},
        {"weight_decay": math.nan},
        {"warmup_ratio": 0.1},
        {"lr_scheduler_type": "linaer"},
        {"learning_rate": [1e-3, 1e-2]},
        3,
    ],
)
def test_settings_that_no_trial_could_have_are_refused(tmp_path, settings):
    with refused("search-setting" if isinstance(settings, dict) else "search-space"):
        trainer_of_search(tmp_path).hyperparameter_search(lambda trial: settings, n_trials=3)


def test_a_search_without_a_function_that_makes_models_or_without_evaluation_data_is_refused(tmp_path):
    given = DopplerTrainer(
        tiny_bert(), arguments(tmp_path, noise_multiplier=None, target_epsilon=3.0), pad, text_data(48), text_data(8, seed=1)
    )
    with refused("search-without-model-init"):
        given.hyperparameter_search(space, n_trials=3)
    trainer = trainer_of_search(tmp_path)
    trainer.eval_dataset = None
    with refused("search-without-evaluation"):
        trainer.hyperparameter_search(space, n_trials=3)


def test_a_search_on_several_processes_is_refused(tmp_path, monkeypatch):
    trainer = trainer_of_search(tmp_path)
    monkeypatch.setattr(DopplerTrainingArguments, "world_size", 2)
    with refused("search-processes"):
        trainer.hyperparameter_search(space, n_trials=3)


@pytest.mark.parametrize("name", sorted(SEARCHED))
def test_every_argument_that_may_be_searched_reaches_the_run_of_a_trial(tmp_path, name):
    values = {
        "learning_rate": 0.5, "num_train_epochs": 2, "max_steps": 7, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 3, "per_sample_max_grad_norm": 0.5, "clipping": "automatic",
        "clipping_granularity": "per_layer", "augmentation_multiplicity": 2, "noise_shape": "banded:bands=2",
        "low_pass_filter": "momentum:beta=0.8", "base_optimizer": "sgd", "adam_bc_floor": 0.1, "weight_decay": 0.1,
        "adam_beta2": 0.9, "adam_epsilon": 1e-6, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "seed": 3,
    }  # fmt: skip
    args = trainer_of_search(tmp_path).args
    before = getattr(args, name)
    of_trial = arguments_of_trial(args, {name: values[name]})
    assert getattr(of_trial, name) == values[name] or str(getattr(of_trial, name)) == values[name]
    assert getattr(args, name) == before


def test_a_trial_trains_with_its_own_settings(tmp_path, monkeypatch):
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4, "noise_shape": "banded:bands=2",
        "low_pass_filter": "momentum:beta=0.8", "base_optimizer": "sgd", "learning_rate": 0.01, "seed": 7,
    }  # fmt: skip
    make_trials(monkeypatch, 1)
    trainer = trainer_of_search(tmp_path)
    best = trainer.hyperparameter_search(lambda trial: settings, n_trials=3)
    assert best.hyperparameters == settings
    ledger = PrivacyLedger.load(tmp_path / "out")
    statement = ledger.statement
    assert (statement.expected_batch_size, statement.noise_shape, ledger.steps_run) == (6, "banded:bands=2", 4)
    assert ledger.epsilon() == pytest.approx(3.0, rel=1e-9)
    assert trainer.args.seed == 7


def published_scores(tmp_path, trials, *, number):
    generator = np.random.default_rng(0)
    for _ in range(number):
        trainer, running = Mechanism(generator), RunningSearch("", tmp_path, SearchState(NO_CALL))
        running.give_up_resuming()
        yield best_of(trainer, running, trials).objective


def test_the_published_trial_has_the_distribution_that_the_theorem_assumes(tmp_path):
    # With a fixed number of trials, half as many searches would have no score above 0.7.
    trials, number = NumberOfTrials(3.0), 500
    scores = np.array([*published_scores(tmp_path, trials, number=number)])
    for score in (0.3, 0.5, 0.7, 0.9):
        expected = trials.generating(score)
        assert np.mean(scores <= score) == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / number))


def drawn_number(trials):
    return next(begun for begun in itertools.count(1) if not another_trial(trials, begun))


@functools.cache
def numbers_of_trials():
    return np.array([drawn_number(NumberOfTrials(10.0)) for _ in range(2500)])


def largest_delta(numbers, *, mu, epsilon):
    """δ at ε of searches with these numbers of trials, whose objective prefers what a record makes rare.

    A trial releases x from N(µ, 1) with the record and from N(0, 1) without it. The trial of least x is published.
    """
    thresholds = np.linspace(-5, 5, 400)
    with_record, without = (
        np.mean(np.power(norm.sf(thresholds - shift)[:, None], numbers[None, :]), axis=1) for shift in (mu, 0.0)
    )
    return float(np.max(with_record - math.exp(epsilon) * without))


def test_searches_of_a_gaussian_mechanism_keep_their_epsilon_and_a_fixed_number_of_trials_would_not():
    mean, mu, delta = 10, 0.5, 0.01
    trials = NumberOfTrials(mean)
    terms = dict(
        epsilon_at=lambda share: gaussian_epsilon(mu, delta=share),
        deltas_at=lambda epsilons: gaussian_delta(mu, np.maximum(epsilons, 1e-12)),
    )
    epsilon = selection_of(trials, delta=delta, **terms).epsilon
    assert largest_delta(numbers_of_trials(), mu=mu, epsilon=epsilon) < delta
    assert largest_delta(np.array([mean]), mu=mu, epsilon=epsilon) > 2 * delta


def test_a_search_spends_the_delta_of_all_its_trials():
    # A trial gives its record away with probability δ₁, and the objective prefers that. So δ of the search is E K·δ₁.
    trials, delta = NumberOfTrials(10.0), 0.01
    numbers = numbers_of_trials()

    def given_away(of_trial):
        return float(np.mean(1.0 - (1.0 - of_trial) ** numbers))

    selection = selection_of(trials, delta=delta, epsilon_at=lambda share: 0.0, deltas_at=np.zeros_like)
    assert given_away(selection.first.delta) < 1.3 * delta
    assert given_away(delta) > 3 * delta, "each trial would have the δ of the whole search"


def test_the_number_of_trials_has_its_distribution():
    # The logarithmic distribution of mean 3. A fixed number of trials would fail both.
    distribution = NumberOfTrials(3.0)
    numbers = [drawn_number(distribution) for _ in range(4000)]
    first = sum(number == 1 for number in numbers) / len(numbers)
    expected = 1.0 - distribution.another_after(1)
    assert first == pytest.approx(expected, abs=6 * math.sqrt(expected * (1 - expected) / len(numbers)))
    assert sum(numbers) / len(numbers) == pytest.approx(3.0, abs=0.5)


def test_settings_are_drawn_from_their_ranges_and_once_for_each_name():
    draws = [Draw() for _ in range(300)]
    wide = [draw.suggest_float("a", 1e-4, 1.0, log=True) for draw in draws]
    assert all(1e-4 <= value <= 1.0 for value in wide)
    assert 0.3 < sum(value < 1e-2 for value in wide) / 300 < 0.7
    assert [draw.suggest_float("a", 5.0, 6.0) for draw in draws] == wide
    assert {draw.suggest_float("b", 0.0, 1.0, step=0.5) for draw in draws} == {0.0, 0.5, 1.0}
    assert {draw.suggest_int("c", 1, 5, step=2) for draw in draws} == {1, 3, 5}
    assert {draw.suggest_int("d", 1, 3, log=True) for draw in draws} == {1, 2, 3}
    assert {draw.suggest_categorical("e", "xy") for draw in draws} == {"x", "y"}
    assert {draw.suggest_int("g", 1.0, 2.0) for draw in draws} == {1, 2}
    for wrong in (
        lambda draw: draw.suggest_float("f", 0.0, 1.0, log=True),
        lambda draw: draw.suggest_float("f", 0.0, math.inf),
        lambda draw: draw.suggest_int("f", 0.5, 2),
        lambda draw: draw.suggest_categorical("f", []),
    ):
        with refused("out-of-range"):
            wrong(Draw())
