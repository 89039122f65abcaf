"""What ends a training before its end leaves a checkpoint and says why."""

import functools
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.run.interruptions import Terminated, raised_if_terminated
from doppler_hf.run.reporting import start_warnings
from doppler_hf.run.resuming.checkpoints import is_whole
from tests.support import processes
from tests.support.printed import flat
from tests.support.tiny import tiny_bert
from tests.support.trainers import On, at, interrupt, trained, trainer_of


def terminate(**_):
    os.kill(os.getpid(), signal.SIGTERM)


def fail(**_):
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        (terminate, Terminated, "Stopped by SIGTERM. Privacy spent"),
        (interrupt, KeyboardInterrupt, "Interrupted. Privacy spent"),
        (fail, OSError, "Stopped by an error (OSError). Privacy spent"),
    ],
)
def test_a_checkpoint_is_saved_and_the_reason_is_said(tmp_path, capsys, end, error, words):
    trainer = trainer_of(tmp_path, max_steps=8, callbacks=[On(step_end=at(3, end))])
    with pytest.raises(error):
        trainer.train()
    assert words in capsys.readouterr().out
    last = get_last_checkpoint(str(tmp_path / "out"))
    assert last.endswith("checkpoint-3")
    assert not PrivacyLedger.load(last).unknown_weights(tmp_path / "out" / "checkpoint-3")
    again = trained(trainer_of(tmp_path, max_steps=8, model=tiny_bert()))  # a new run; its folder is the same
    assert again.state.global_step == 8
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_terminated_run_goes_on(tmp_path):
    options = dict(max_steps=8, noise_multiplier=None, target_epsilon=8.0)
    with pytest.raises(SystemExit) as ended:
        trainer_of(tmp_path, callbacks=[On(step_end=at(3, terminate))], **options).train()
    assert ended.value.code == 143
    again = trainer_of(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step in (7, 8)  # steps that were reserved together count
    assert again.privacy.epsilon() <= 8.0


@pytest.mark.parametrize(("planned", "words"), [(8, "5 of the 6 remaining .* after them"), (4, "1 of the 2 .* after it")])
def test_a_run_that_steps_were_lost_of_says_why_it_ends_early(tmp_path, capsys, planned, words):
    options = dict(max_steps=planned, noise_multiplier=None, target_epsilon=8.0, save_strategy="steps", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, callbacks=[On(step_end=at(3, interrupt))], **options).train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    again = trainer_of(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == planned - 1
    said = capsys.readouterr().out
    assert re.search(rf"The budget allows {words}, before the learning rate has come to the end of its schedule\.", said)
    assert again.lr_scheduler.get_last_lr()[0] > 0.0
    assert "The run ended 1 step early, because steps that were made after the checkpoint count, too." in said
    trained(trainer_of(tmp_path / "whole", **options))
    assert "early" not in capsys.readouterr().out


def test_a_run_whose_round_began_anew_says_why_it_ends_early(tmp_path, capsys, monkeypatch):
    options = dict(max_steps=8, noise_multiplier=None, target_epsilon=8.0, save_strategy="steps", save_steps=1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, callbacks=[On(step_end=at(4, interrupt))], **options).train()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    again = trainer_of(tmp_path, **options)
    with pytest.warns(UserWarning, match="Sampling starts a new round"):
        again.train(resume_from_checkpoint=True)
    assert again.privacy.ledger.steps_run == again.state.global_step < 8
    said = capsys.readouterr().out
    assert "remaining steps, because sampling began a new round, which costs more ε" in " ".join(said.split())
    assert "early, because sampling began a new round" in said


@pytest.mark.parametrize(("end", "words"), [(interrupt, "Interrupted"), (terminate, "Stopped by SIGTERM")])
def test_an_interruption_of_the_checks_says_that_nothing_was_spent(tmp_path, capsys, end, words):
    with pytest.raises((KeyboardInterrupt, Terminated)):
        trainer_of(tmp_path, callbacks=[On(train_begin=end)]).train()
    assert f"{words} before the first step. No ε was spent, and checkpoints are as they were." in capsys.readouterr().out
    assert not (tmp_path / "out" / LEDGER_NAME).exists()


def test_another_handler_stays_and_no_thread_but_the_first_sets_one():
    own = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, own)
    try:
        with raised_if_terminated():
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    found = []

    def elsewhere():
        with raised_if_terminated():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def freeze(model, **_):
    model.classifier.requires_grad_(False)


def replace(model, **_):
    model.classifier = torch.nn.Linear(16, 2)


@pytest.mark.parametrize(("change", "step"), [(freeze, 3), (replace, 2)])
def test_a_layer_that_a_callback_changes_is_refused_at_the_step_and_the_last_covered_checkpoint_stays(
    tmp_path, change, step
):
    options = dict(max_steps=6, save_strategy="steps", save_steps=2)
    trainer = trainer_of(tmp_path, callbacks=[On(step_end=at(3, change))], **options)
    with pytest.raises(ValueError, match=r"classifier"):
        trainer.train()
    assert trainer.state.global_step == 3
    last = get_last_checkpoint(str(tmp_path / "out"))
    assert last.endswith(f"checkpoint-{step}")
    assert (Path(last) / LEDGER_NAME).exists()
    again = trainer_of(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6


@pytest.mark.parametrize(("event", "is_saved"), [("pre_optimizer_step", True), ("optimizer_step", False)])
def test_an_error_of_a_callback_is_saved_before_the_update_and_not_in_the_middle_of_it(tmp_path, capsys, event, is_saved):
    with pytest.raises(OSError, match="no space left"):
        trainer_of(tmp_path, max_steps=8, callbacks=[On(**{event: at(3, fail)})]).train()
    assert ("checkpoint-3, call trainer.train(resume" in " ".join(capsys.readouterr().out.split())) == is_saved
    if is_saved:
        again = trainer_of(tmp_path, max_steps=8)
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 8


def ended_at_3(folder, _processes, *, end, error):
    with pytest.raises(error):
        trainer_of(Path(folder), max_steps=8, callbacks=[On(step_end=at(3, end))]).train()


CASES = {
    "interrupted": functools.partial(ended_at_3, end=interrupt, error=KeyboardInterrupt),
    "terminated": functools.partial(ended_at_3, end=terminate, error=Terminated),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_of_several_processes_the_first_saves(tmp_path, case):
    processes.launch(__file__, tmp_path, 2, case)
    assert is_whole(tmp_path / "out" / "checkpoint-3")
    assert PrivacyLedger.load(tmp_path / "out" / "checkpoint-3").steps_run == 3


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (dict(save_strategy="steps", save_steps=500), True), (dict(save_strategy="epoch"), True),
        (dict(save_strategy="no"), False),
        (dict(save_strategy="steps", save_steps=1), False),
    ],
)  # fmt: skip
def test_a_run_without_a_checkpoint_before_its_end_is_told_of(tmp_path, capsys, options, is_told):
    trained(trainer_of(tmp_path, max_steps=3, **options))
    assert ("no checkpoint is saved before the end of the 3 steps" in capsys.readouterr().out) is is_told


def test_checkpoints_that_cannot_be_continued_are_told_of(tmp_path, capsys):
    options = dict(max_steps=2, save_strategy="steps", save_steps=1)
    told = "save_only_model=True leaves optimizer, filter and schedule out of checkpoints"
    for save_only_model in (True, False):
        trained(trainer_of(tmp_path, save_only_model=save_only_model, **options))
        assert (told in capsys.readouterr().out) is save_only_model


if __name__ == "__main__":
    processes.main(CASES)


class Usage(NamedTuple):
    free: int


def test_a_disk_that_is_too_small_for_the_checkpoints_is_told_of_before_the_first_step(tmp_path, capsys, monkeypatch):
    options = dict(max_steps=4, save_strategy="steps", save_steps=1)
    trainer = trainer_of(tmp_path, **options)
    of_one = sum(each.numel() * each.element_size() for each in trainer.model.parameters())
    monkeypatch.setattr(start_warnings.shutil, "disk_usage", lambda _: Usage(free=3 * of_one))
    trained(trainer)
    said = flat(capsys.readouterr().out)
    assert "the weights of 4 checkpoints need" in said
    assert "set save_total_limit=1" in said
    # The second checkpoint is written before the first one is removed.
    trained(trainer_of(tmp_path / "limited", save_total_limit=1, **options))
    assert "checkpoints need" not in flat(capsys.readouterr().out)


def test_an_interruption_by_a_full_disk_says_so(tmp_path, capsys, monkeypatch):
    def fill(**_):
        monkeypatch.setattr(start_warnings.shutil, "disk_usage", lambda _: Usage(free=0))
        raise RuntimeError("unexpected pos 100224 vs 100112")

    trainer = trainer_of(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, callbacks=[On(save=fill)])
    with pytest.raises(RuntimeError, match="unexpected"):
        trainer.train()
    assert "is full: free some space before you go on." in flat(capsys.readouterr().out)
