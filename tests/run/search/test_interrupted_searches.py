"""A search that is interrupted: it goes on at no further cost, as if nothing had happened, or says why it cannot."""

import copy
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertForSequenceClassification

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.errors import Failure
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.accounting.selection import NumberOfTrials
from doppler_hf.privacy.ledger.file import WriterLock
from doppler_hf.privacy.ledger.ledger import SEARCH_NOTE_NAME
from doppler_hf.run.search import interrupted_searches, search
from doppler_hf.run.search.interrupted_searches import RunningSearch, SearchState, interrupted_in
from tests.support.refusals import refused
from tests.support.search import NO_CALL, Mechanism, best_of, files_below, make_trials, space, trainer_of_search
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, arguments, interrupt

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def states(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    return tmp_path / "states" / "doppler_hf"


class Interrupted(On):
    """Interrupts the trial of this number, at its second step, and counts the steps that trials make."""

    def __init__(self, number):
        super().__init__(train_begin=self.begin, step_end=self.end)
        self.number, self.trials, self.steps, self.seen = number, 0, [], []

    def begin(self, args, **_):
        self.trials += 1
        self.seen.append({"max_steps": args.max_steps, "per_sample_max_grad_norm": args.per_sample_max_grad_norm})
        self.steps.append(0)

    def end(self, **kwargs):
        self.steps[-1] += 1
        if self.trials == self.number and self.steps[-1] == 2:
            interrupt()

    def __deepcopy__(self, memo):
        return self  # the test sees all trials


def falling(calls):
    """Return an objective by which each trial is worse than the one before; the untrained model's comes first."""

    def objective(metrics):
        calls.append(metrics["eval_loss"])
        return float(len(calls))

    return objective


def interrupted(tmp_path, monkeypatch, *, at, trials=3, objective=None, **options):
    make_trials(monkeypatch, trials)
    with pytest.raises(KeyboardInterrupt):
        trainer_of_search(tmp_path, callbacks=[Interrupted(at)], **options).hyperparameter_search(
            space, objective, n_trials=3
        )
    (state,) = [SearchState.read(path) for path in (tmp_path / "states" / "doppler_hf").glob("doppler-hf-search-*")]
    return state


def with_adapter():
    torch.manual_seed(0)
    return get_peft_model(tiny_bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


@pytest.mark.parametrize("model_init", [tiny_bert, with_adapter], ids=["all weights", "LoRA"])
def test_an_interrupted_search_goes_on_and_publishes_its_best_trial(tmp_path, monkeypatch, capsys, model_init):
    calls = []
    state = interrupted(tmp_path, monkeypatch, at=2, objective=falling(calls), model_init=lambda: model_init())
    assert (state.begun, state.is_complete) == (2, False)
    assert (len(calls), state.best["objective"]) == (2, 2.0)
    of_first = calls[-1]
    later = Interrupted(0)
    trainer = trainer_of_search(tmp_path, callbacks=[later], model_init=lambda: model_init())
    best = trainer.hyperparameter_search(space, falling([0.0] * 8), n_trials=3)
    assert "continues. Its ε is spent only once" in capsys.readouterr().out
    assert len(later.steps) == 2, "the second of three trials is made again"
    assert later.seen[0] == {name: state.settings[name] for name in later.seen[0]}, "with the settings drawn for it"
    # The first trial, which another trainer made, is published: its settings, weights, logs and ledger.
    assert (best.objective, best.hyperparameters) == (2.0, state.best["settings"])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(of_first, abs=1e-6)
    assert trainer.state.global_step == best.hyperparameters["max_steps"]
    out = tmp_path / "out"
    ledger = PrivacyLedger.load(out)
    assert ledger.spent.epsilon == trainer.privacy.epsilon() == pytest.approx(3.0)
    assert ledger.run_id == best.run_id
    assert ledger.steps_run == best.hyperparameters["max_steps"]
    assert main(["verify", str(out)]) == 0
    assert not (out / SEARCH_NOTE_NAME).exists()
    assert not interrupted_in(out)
    assert not [*(tmp_path / "states" / "doppler_hf").glob("doppler-hf-search-*")], "what was kept is removed"
    with refused("search-continued"):
        trainer.train()


def test_a_better_trial_after_the_interruption_is_published(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch, at=2)
    trainer = trainer_of_search(tmp_path)
    best = trainer.hyperparameter_search(space, lambda metrics: -1.0, n_trials=3, resume_from_checkpoint=True)
    assert best.objective == -1.0
    assert PrivacyLedger.load(tmp_path / "out").spent.epsilon == pytest.approx(3.0)


def masked(text, run):
    """Return a text without its numbers and hashes, which noise makes different in every run."""
    return re.sub(r"\b[0-9a-f]{4,}\b|-?\d+(\.\d+)?(e-?\d+)?", "#", text.replace(run, "RUN"))


def published(tmp_path, monkeypatch, *, at, model_init):
    """Return all files of a search that was interrupted in this trial, and how the first of three trials is the best."""
    metrics = dict(compute_metrics=lambda predictions: {"zeta": 0.5, "alpha": 0.25})
    terms = dict(
        plot_training_curve=True, report_train_loss="private", eval_strategy="steps", eval_steps=1, model_init=model_init,
    )  # fmt: skip

    def trainer_with(callbacks):
        trainer = trainer_of_search(tmp_path, callbacks=callbacks, **terms)
        trainer.compute_metrics = metrics["compute_metrics"]
        return trainer

    def fixed(trial):
        return {"max_steps": trial.suggest_int("max_steps", 3, 3)}

    make_trials(monkeypatch, 3)
    if at:
        with pytest.raises(KeyboardInterrupt):
            trainer_with([Interrupted(at)]).hyperparameter_search(fixed, falling([]), n_trials=3)
    goes_on = time.time()
    best = trainer_with(None).hyperparameter_search(fixed, falling([0.0] * 8 * at), n_trials=3)
    assert best.objective == 2.0
    out = tmp_path / "out"
    times = {path.stat().st_mtime for path in [out, *out.rglob("*")]}
    assert len(times) == 1
    assert at == 0 or times.pop() < goes_on, "they have the time at which the search began"
    return {
        name.replace(best.run_id, "RUN"): masked((tmp_path / name).read_text("utf-8"), best.run_id)
        if Path(name).suffix in (".json", ".md")
        else ""
        for name in files_below(tmp_path)
    }


@pytest.mark.parametrize("model_init", [tiny_bert, with_adapter], ids=["all weights", "LoRA"])
def test_nothing_that_is_published_tells_of_the_interruption(tmp_path, monkeypatch, model_init):
    """Whoever knows when it was, and that the published trial was made before it, would know that there were more."""
    found = []
    for at in (2, 0):
        folder = tmp_path / str(at)
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "states"))
        found.append(published(folder, monkeypatch, at=at, model_init=lambda: model_init()))
    interrupted_one, whole = found
    assert interrupted_one.keys() == whole.keys()
    for name in whole:
        assert interrupted_one[name].splitlines() == whole[name].splitlines(), name


def test_a_model_of_a_search_that_went_on_is_recognised(tmp_path, monkeypatch):
    """Its ε is the start of what later runs cost, also without the saved model."""
    interrupted(tmp_path, monkeypatch, at=2, objective=falling([]))
    trainer = trainer_of_search(tmp_path)
    trainer.hyperparameter_search(space, falling([0.0] * 8), n_trials=3)
    assert not trainer.model.training
    for name, model in (("object", trainer.model), ("copy", copy.deepcopy(trainer.model))):
        further = DopplerTrainer(model, arguments(tmp_path / name, max_steps=2), pad, text_data(48), text_data(8, seed=1))
        further.train()
        assert further.privacy.ledger.earlier.epsilon == pytest.approx(3.0)


def test_a_trial_that_has_ended_is_not_made_again(tmp_path, monkeypatch):
    make_trials(monkeypatch, 2)
    with monkeypatch.context() as patch:
        patch.setattr(
            search, "_free_memory", lambda trainer: interrupt()
        )  # after the trial is kept, and before the next coin
        with pytest.raises(KeyboardInterrupt):
            trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3)
    later = Interrupted(0)
    trainer_of_search(tmp_path, callbacks=[later]).hyperparameter_search(space, n_trials=3)
    assert len(later.steps) == 1


def test_the_coin_that_ends_a_search_is_not_tossed_again(tmp_path, monkeypatch, capsys):
    """If the best model cannot be saved, the search has ended all the same: with another coin it would go on."""
    tossed = []

    def another(trials, begun):
        tossed.append(begun)
        return begun < 2

    monkeypatch.setattr(search, "another_trial", another)
    trainer = trainer_of_search(tmp_path)
    monkeypatch.setattr(trainer, "save_model", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        trainer.hyperparameter_search(space, n_trials=3)
    assert "and call hyperparameter_search again" in capsys.readouterr().out
    assert tossed == [1, 2]
    later = Interrupted(0)
    best = trainer_of_search(tmp_path, callbacks=[later]).hyperparameter_search(space, n_trials=3)
    assert tossed == [1, 2]
    assert not later.steps
    assert PrivacyLedger.load(tmp_path / "out").run_id == best.run_id
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_search_goes_on_with_the_same_call_only(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch, at=2)
    before = (tmp_path / "out" / SEARCH_NOTE_NAME).read_text("utf-8")

    def call(hp_space=space, trainer=None, n_trials=3, **terms):
        return (trainer or trainer_of_search(tmp_path)).hyperparameter_search(hp_space, n_trials=n_trials, **terms)

    def wider(trial):
        return space(trial) | {"max_steps": trial.suggest_int("max_steps", 2, 5)}

    with refused("search-changed", match="the division of ε was .*mean=3.* and is .*mean=4"):
        call(n_trials=4)
    with refused("search-changed", match="direction was minimize and is maximize"):
        call(direction="maximize", compute_objective=lambda metrics: 0.0)
    with refused("search-changed", match="hp_space was .*max_steps from \\(2, 4\\).* and is .*max_steps from \\(2, 5\\)"):
        call(wider)
    with refused("search-changed", match="learning_rate was 0.01 and is 0.001"):
        call(trainer=trainer_of_search(tmp_path, learning_rate=1e-3))
    other = trainer_of_search(tmp_path)
    other.train_dataset = text_data(48, seed=2)
    with refused("search-changed", match="seed was 42 and is 7"):
        call(trainer=trainer_of_search(tmp_path, seed=7))
    with refused("search-changed", match="untrained model's digest"):
        call(trainer=trainer_of_search(tmp_path, model_init=lambda: tiny_bert(intermediate_size=8)))
    with refused("search-changed", match="hp_space"):
        call(lambda trial: space(trial) | {"weight_decay": 0.1})
    with refused("search-changed", match="train_dataset has other rows or another order. Use the arguments"):
        call(trainer=other)
    with refused("search-changed", match="eval_dataset one has other rows"):
        call(trainer=trainer_of_search(tmp_path, evaluated={"one": text_data(8, seed=1)}), compute_objective=lambda _: 0.0)
    with refused("search-changed", match="eval_dataset has other rows"):
        call(trainer=trainer_of_search(tmp_path, evaluated=text_data(8, seed=3)))
    assert (tmp_path / "out" / SEARCH_NOTE_NAME).read_text("utf-8") == before, "a refusal changes nothing"
    assert call().run_id


def test_what_a_search_needs_may_be_missing(tmp_path, monkeypatch, states):
    make_trials(monkeypatch, 3)
    with refused("no-search-to-resume"):
        trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3, resume_from_checkpoint=True)
    assert not (tmp_path / "out" / SEARCH_NOTE_NAME).exists()
    interrupted(tmp_path, monkeypatch, at=2)
    (folder,) = states.glob("doppler-hf-search-*")
    folder.rename(states / "away")
    with refused("search-state-missing", match="resume_from_checkpoint=False: the ε of both then add up"):
        trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3)
    (states / "away").rename(folder)
    for path in folder.glob("trial-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    trainer = trainer_of_search(tmp_path)
    before = trainer.args.output_dir
    with refused("search-not-restored"):
        trainer.hyperparameter_search(space, n_trials=3)
    assert trainer.args.output_dir == before
    trainer.hyperparameter_search(space, n_trials=3, resume_from_checkpoint=False)
    assert trainer.privacy.ledger.spent.epsilon == pytest.approx(6.0)
    assert not [*states.glob("doppler-hf-search-*")]


def test_a_search_does_not_go_on_with_another_base_of_an_adapter(tmp_path, monkeypatch):
    """It is not saved with the trial, so it has to be the same."""
    interrupted(tmp_path, monkeypatch, at=2, model_init=with_adapter)

    def other():
        model = with_adapter()
        model.base_model.model.bert.embeddings.word_embeddings.weight.data.add_(1.0)
        return model

    with refused("search-changed", match="untrained model"):
        trainer_of_search(tmp_path, model_init=other).hyperparameter_search(space, n_trials=3)


def test_only_the_user_can_read_what_is_kept(tmp_path, monkeypatch, states):
    interrupted(tmp_path, monkeypatch, at=2)
    (folder,) = states.glob("doppler-hf-search-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not [*(tmp_path / "out").glob("trial*")]
    assert json.loads((tmp_path / "out" / SEARCH_NOTE_NAME).read_text("utf-8"))["searches"][0].keys() == {
        "name", "epsilon", "delta", "unit", "trials",
    }  # fmt: skip


def test_a_full_disk_ends_no_search_but_it_cannot_go_on_then(tmp_path, monkeypatch, states, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device")

    make_trials(monkeypatch, 2)
    later = Interrupted(0)
    trainer = trainer_of_search(tmp_path, callbacks=[later])
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_save", lambda *_: full(None, None))
        with pytest.raises(OSError, match="No space"):  # the best model, at the end
            trainer.hyperparameter_search(space, n_trials=3)
    assert len(later.steps) == 2
    said = capsys.readouterr().out
    assert "and call trainer.save_model(). Until then" in said
    assert not [*states.glob("doppler-hf-search-*")]
    trainer.save_model()
    assert main(["verify", str(tmp_path / "out")]) == 0
    # And if the process ends in between.
    out = tmp_path / "another"
    trainer = trainer_of_search(tmp_path, callbacks=[Interrupted(2)], output_dir=str(out))
    monkeypatch.setattr(trainer, "_save", lambda *_: full(None, None))
    with pytest.raises(KeyboardInterrupt):
        trainer.hyperparameter_search(space, n_trials=3)
    assert "It cannot continue, because its trials could not be written" in capsys.readouterr().out
    assert not [*states.glob("doppler-hf-search-*")]
    assert interrupted_in(out)


def test_a_space_that_fails_during_the_search_is_a_trial_that_fails(tmp_path, monkeypatch):
    """And costs no other trial."""
    make_trials(monkeypatch, 3)
    later, failed = Interrupted(0), []

    def fails(trial):
        if len(later.steps) == 1 and not failed:
            failed.append(0)
            raise KeyError("nothing")
        return space(trial)

    assert trainer_of_search(tmp_path, callbacks=[later]).hyperparameter_search(fails, n_trials=3).run_id
    assert failed
    assert len(later.steps) == 2


def test_a_search_whose_trials_all_failed_does_not_go_on(tmp_path, monkeypatch, states):
    make_trials(monkeypatch, 1)
    values = iter([0.0, float("nan")])
    with pytest.raises(Failure, match="All trials of the search failed"):
        trainer_of_search(tmp_path).hyperparameter_search(space, lambda metrics: next(values), n_trials=3)
    assert not [*states.glob("doppler-hf-search-*")]
    with refused("search-state-missing", match="Perhaps all of them failed"):
        trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3)


def test_other_runs_in_the_folder_count_the_search_and_leave_it_as_it_is(tmp_path, monkeypatch, states):
    interrupted(tmp_path, monkeypatch, at=2)
    with refused("batch-out-of-range"):
        trainer_of_search(tmp_path, per_device_train_batch_size=49).train()
    trainer = trainer_of_search(tmp_path)
    trainer.train()
    assert trainer.privacy.ledger.spent.epsilon == pytest.approx(6.0, rel=1e-3)
    best = trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3, resume_from_checkpoint=True)
    assert PrivacyLedger.load(tmp_path / "out").run_id == best.run_id


def test_a_search_goes_on_only_once(tmp_path, monkeypatch, states):
    """Also if its folder was copied: two published models would cost the ε of two searches."""
    interrupted(tmp_path, monkeypatch, at=2)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    (folder,) = states.glob("doppler-hf-search-*")
    (folder / "trial of the other process").mkdir()
    with WriterLock(folder), refused("folder-in-use"):
        trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3)
    assert (folder / "trial of the other process").exists()

    class AfterTheOther(WriterLock):
        """Gets the lock when the other process has published its best trial, and removed the state."""

        def __enter__(self):
            shutil.rmtree(folder)
            super().__enter__()

    shutil.copytree(folder, tmp_path / "state")
    with monkeypatch.context() as patch:
        patch.setattr(interrupted_searches, "WriterLock", AfterTheOther)
        with refused("search-state-missing"):
            trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3)
    shutil.copytree(tmp_path / "state", folder, dirs_exist_ok=True)
    with WriterLock(folder):
        interrupted_searches.remove_leftovers(tmp_path / "copy")
    assert folder.exists(), "another process makes its trials there"
    assert trainer_of_search(tmp_path).hyperparameter_search(space, n_trials=3).run_id
    with refused("search-state-missing"):
        trainer_of_search(tmp_path, output_dir=str(tmp_path / "copy")).hyperparameter_search(space, n_trials=3)


def test_an_adapter_of_another_name_is_kept_too(tmp_path, monkeypatch):
    """PEFT saves it in a folder of its name."""

    def named():
        torch.manual_seed(0)
        adapter = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
        return get_peft_model(tiny_bert(), adapter, adapter_name="mine")

    state = interrupted(tmp_path, monkeypatch, at=2, model_init=named)
    assert state is not None
    assert trainer_of_search(tmp_path, model_init=named).hyperparameter_search(space, n_trials=3).run_id
    assert PrivacyLedger.load(tmp_path / "out").spent.epsilon == pytest.approx(3.0)


def test_a_search_that_is_killed_once_its_model_is_saved_counts_once(tmp_path, monkeypatch):
    make_trials(monkeypatch, 1)
    trainer = trainer_of_search(tmp_path)
    with monkeypatch.context() as patch:
        # What a kill would leave: nothing is written any more once the model is saved.
        patch.setattr(interrupted_searches, "_is_saved", lambda folder, run: interrupt() if run else False)
        with pytest.raises(KeyboardInterrupt):
            trainer.hyperparameter_search(space, n_trials=3)
    out = tmp_path / "out"
    assert (out / SEARCH_NOTE_NAME).exists()
    assert not interrupted_in(out)
    again = trainer_of_search(tmp_path)
    again.hyperparameter_search(space, n_trials=3)
    assert again.privacy.ledger.spent.epsilon == pytest.approx(3.0)
    assert not (out / SEARCH_NOTE_NAME).exists()


def test_a_model_that_cannot_be_loaded_again_is_published_from_memory(tmp_path, monkeypatch):
    make_trials(monkeypatch, 2)
    trainer = trainer_of_search(tmp_path)
    monkeypatch.setattr(trainer, "_load_from_checkpoint", lambda place: (_ for _ in ()).throw(ValueError("unknown format")))
    trainer.hyperparameter_search(space, n_trials=3)
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_base_with_random_weights_is_made_again(tmp_path, monkeypatch):
    def random_base():
        config = tiny_bert().config  # and whoever made the model before has moved the generator
        return get_peft_model(
            BertForSequenceClassification(config), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
        )

    interrupted(tmp_path, monkeypatch, at=2, objective=falling([]), model_init=random_base)
    best = trainer_of_search(tmp_path, model_init=random_base).hyperparameter_search(space, falling([0.0] * 8), n_trials=3)
    assert best.objective == 2.0


def test_what_a_kill_has_left_of_other_trials_is_removed(tmp_path):
    state = SearchState(NO_CALL, best={"folder": "trial-2"})
    for name in ("trial-1", "trial-2", "tmp-of-a-trial"):
        (tmp_path / name).mkdir()
    (tmp_path / "search.json").write_text("")
    RunningSearch("", tmp_path, state).remove_others()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["search.json", "trial-2"]


def test_what_nobody_goes_on_with_is_removed_after_half_a_year(tmp_path, monkeypatch, states):
    old, young = (states / f"doppler-hf-search-{name}" for name in ("old", "young"))
    for path, days in ((old, 190), (young, 170)):
        path.mkdir(parents=True)
        os.utime(path, (time.time() - days * 86400,) * 2)
    interrupted_searches._new_folder()
    assert not old.exists()
    assert young.exists()


def test_worse_trials_are_written_like_better_ones(tmp_path, monkeypatch):
    """If only better trials were written, they alone would be interrupted while they are, and made again."""
    make_trials(monkeypatch, 20)
    written = []
    monkeypatch.setattr(search, "_write_trial", lambda trainer, running: written.append(running.state.begun))
    monkeypatch.setattr(search, "_in_words", lambda trainer, result: {})
    monkeypatch.setattr(search, "_loaded", lambda trainer, running, args: search._Result(1.0, 0.0, 1.0, {}, {"_run": None}))
    running = RunningSearch("", tmp_path, SearchState(NO_CALL), is_spent=True)
    best_of(Mechanism(np.random.default_rng(0)), running, NumberOfTrials(20.0))
    assert written == [*range(1, 21)]


class Fragile(Mechanism):
    """Is interrupted in some trials. What it writes and loads of a trial is its score alone."""

    def interrupted(self, share):
        if self.random.random() < share:
            raise KeyboardInterrupt

    def train(self):
        super().train()
        self.interrupted(0.3)


def test_interruptions_do_not_change_what_is_published(tmp_path, monkeypatch):
    """If the trial that was interrupted were left out, or a coin tossed again, the scores would have other frequencies."""
    trials, number, random, found = NumberOfTrials(3.0), 800, np.random.default_rng(0), []
    monkeypatch.setattr(search, "_write_trial", lambda trainer, running: trainer.interrupted(0.2))
    monkeypatch.setattr(search, "_in_words", lambda trainer, result: {"result": result[:4]})
    monkeypatch.setattr(
        search, "_loaded", lambda trainer, running, args: search._Result(*running.state.best["result"], {"_run": None})
    )
    for name in range(number):
        running = RunningSearch("", tmp_path / str(name), SearchState(NO_CALL), is_spent=True)
        running.folder.mkdir()
        while True:
            try:
                found.append(best_of(Fragile(random), running, trials).objective)
                break
            except KeyboardInterrupt:
                state = SearchState.read(running.folder)
                running = RunningSearch("", running.folder, state, is_spent=True)
    for score in (0.3, 0.5, 0.7, 0.9):
        expected = trials.generating(score)
        error = 5 * math.sqrt(expected * (1 - expected) / number)
        assert np.mean(np.array(found) <= score) == pytest.approx(expected, abs=error)


KILLED = """
import os, signal, sys
from pathlib import Path
from doppler_hf.run.search import search
from tests.support.search import make_trials, space, trainer_of_search
from tests.support.trainers import On

steps = []
def end(**_):
    steps.append(0)
    if len(steps) > 4:  # in the second trial, or in the third: each has 2 to 4 steps
        os.kill(os.getpid(), signal.SIGKILL)
killing = On(step_end=end)
killing.__class__.__deepcopy__ = lambda self, memo: self
search.another_trial = lambda trials, begun: begun < 4
trainer_of_search(Path(sys.argv[1]), callbacks=[killing]).hyperparameter_search(space, n_trials=3)
"""


def test_a_search_that_was_killed_goes_on(tmp_path, monkeypatch):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=os.environ | {"PYTHONPATH": str(Path.cwd())}, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    make_trials(monkeypatch, 4)
    later = Interrupted(0)
    trainer_of_search(tmp_path, callbacks=[later]).hyperparameter_search(space, n_trials=3)
    assert len(later.steps) in (2, 3), "the third trial, or the second, is made again"
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert ledger.spent.epsilon == pytest.approx(3.0)
    assert main(["verify", str(tmp_path / "out")]) == 0
