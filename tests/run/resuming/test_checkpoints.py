"""A run that is killed while it writes a checkpoint goes on from the last whole one, and no step is lost from the ledger."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from doppler_hf.privacy import PrivacyLedger
from doppler_hf.run.resuming.checkpoints import given_checkpoint
from tests.support.refusals import refused
from tests.support.tiny import tiny_bert
from tests.support.trainers import On, assert_trained_alike, at, interrupt, trained, trainer_of

OPTIONS = dict(max_steps=6, save_strategy="steps", save_steps=2, noise_seed=1)


class Killed(BaseException):
    """No handler of an `Exception` stops it."""


def kill_at(monkeypatch, method, *, call):
    """Let a method of Transformers' be the last that is called."""
    calls, original = [], getattr(Trainer, method)

    def killed(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise Killed
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, method, killed)


def killed_run(tmp_path, monkeypatch, *, call=2):
    with monkeypatch.context() as patched:
        kill_at(patched, "_save_optimizer_and_scheduler", call=call)
        with pytest.raises(Killed):
            trainer_of(tmp_path, **OPTIONS).train()


# A flag of a script is a word.
@pytest.mark.parametrize("given", [True, "true", "last"])
def test_an_interrupted_checkpoint_is_skipped(tmp_path, monkeypatch, given):
    whole = trained(trainer_of(tmp_path / "whole", **OPTIONS))
    killed_run(tmp_path, monkeypatch)
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 4
    resumed = trainer_of(tmp_path, **OPTIONS)
    resumed.train(resume_from_checkpoint=given)
    assert resumed.state.global_step == 6
    assert resumed.privacy.ledger.restarts == [2]
    assert resumed.privacy.ledger.steps_run == 4 + 6 - 2  # steps 3 and 4 twice
    assert_trained_alike(resumed, whole)


def test_a_learning_rate_that_a_resume_does_not_take_is_told(tmp_path, capsys):
    trained(trainer_of(tmp_path, **OPTIONS))
    trainer_of(tmp_path, **OPTIONS | dict(max_steps=7, learning_rate=0.5)).train(resume_from_checkpoint=True)
    assert "(from the checkpoint; learning_rate=0.5 has no effect)" in " ".join(capsys.readouterr().out.split())


def test_a_folder_without_checkpoints_cannot_be_resumed_and_begins_without_the_argument(tmp_path):
    with refused("no-checkpoint", match="Leave resume_from_checkpoint out"):
        trainer_of(tmp_path, **OPTIONS).train(resume_from_checkpoint=True)
    trained(trainer_of(tmp_path, **OPTIONS))


def test_a_word_that_is_false_begins_anew_and_a_folder_of_that_name_is_a_folder(tmp_path, monkeypatch):
    trained(trainer_of(tmp_path / "before", **OPTIONS))
    trainer = trainer_of(tmp_path, **OPTIONS)
    trainer.train(resume_from_checkpoint="False")
    assert trainer.privacy.ledger.restarts == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "true").mkdir()
    assert given_checkpoint("true") == "true"
    assert given_checkpoint("out/checkpoint-2") == "out/checkpoint-2"
    assert given_checkpoint(None) is None


def test_a_checkpoint_that_is_written_again_is_not_whole_until_it_is(tmp_path, monkeypatch):
    """The old state of the trainer would vouch for new weights with an old optimizer."""
    trainer_of(tmp_path, **OPTIONS).train()
    killed_run(tmp_path, monkeypatch, call=3)
    resumed = trainer_of(tmp_path, **OPTIONS)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy.ledger.restarts[-1] == 4


def test_a_checkpoint_that_its_ledger_does_not_cover_is_skipped(tmp_path):
    def model():
        made = tiny_bert()
        made.bert.embeddings.requires_grad_(False)
        return made

    def fill(model, **_):
        model.bert.embeddings.word_embeddings.weight.add_(1.0)

    def fail(**_):
        raise RuntimeError("mine")

    callbacks = [On(step_end=at(2, fill), step_begin=at(2, fail))]
    trainer = trainer_of(tmp_path, model=model(), **OPTIONS | dict(save_steps=1), callbacks=callbacks)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    last = tmp_path / "out" / "checkpoint-2"
    assert last.is_dir()
    assert not (last / "privacy_ledger.json").exists()
    resumed = trainer_of(tmp_path, model=model(), **OPTIONS)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy.ledger.restarts == [1]


@pytest.mark.parametrize(
    ("trainable", "is_new", "save_steps"), [(True, True, 100), (True, False, 100), (False, True, 1), (False, False, 100)]
)
def test_a_callback_that_freezes_or_unfreezes_ends_the_run_with_a_checkpoint(
    tmp_path, capsys, trainable, is_new, save_steps
):
    """The change comes before the next step, so that weights and states are still those of the last one."""

    def model():
        made = tiny_bert()
        made.bert.embeddings.requires_grad_(not trainable)
        return made

    def change(model, **_):
        model.bert.embeddings.requires_grad_(trainable)

    options = OPTIONS | dict(save_steps=save_steps)
    trainer = trainer_of(tmp_path, model=model(), callbacks=[callback := On(step_end=at(2, change))], **options)
    with refused("trained-parameters-changed", match="remove the callback that changes it"):
        trainer.train()
    assert "checkpoint-2, call trainer.train(resume_from_checkpoint=True)." in " ".join(capsys.readouterr().out.split())
    before = {name: value.clone() for name, value in trainer.model.bert.embeddings.named_parameters()}
    resumed = trainer_of(tmp_path, model=model(), **options) if is_new else trainer
    if not is_new:
        resumed.remove_callback(callback)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy.ledger.restarts == [2]
    assert resumed.state.global_step == resumed.privacy.ledger.steps_run == 6
    for name, value in resumed.model.bert.embeddings.named_parameters():
        assert torch.equal(value, before[name]) == trainable  # what was frozen at the start stays so


def test_checkpoints_of_an_earlier_run_in_the_same_folder_are_skipped(tmp_path, capsys):
    trained(trainer_of(tmp_path, **OPTIONS))
    stopped = trainer_of(tmp_path, **OPTIONS | dict(noise_seed=2), callbacks=[On(step_end=at(3, interrupt))])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert f"To continue from {tmp_path / 'out' / 'checkpoint-3'}, call" in " ".join(capsys.readouterr().out.split())
    resumed = trainer_of(tmp_path, **OPTIONS | dict(noise_seed=2))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy.ledger.restarts == [3]
    assert resumed.privacy.ledger.steps_run == 6


def test_a_run_that_has_no_checkpoint_yet_does_not_go_on_from_that_of_an_earlier_run(tmp_path, monkeypatch):
    trained(trainer_of(tmp_path, **OPTIONS))

    def kill(**_):
        raise Killed

    other = OPTIONS | dict(noise_seed=2)
    with pytest.raises(Killed):
        trainer_of(tmp_path, **other, callbacks=[On(step_end=at(1, kill))]).train()
    with refused("no-checkpoint-of-this-run", match="only 3 of an earlier run"):
        trainer_of(tmp_path, **other).train(resume_from_checkpoint=True)
    anew = trained(trainer_of(tmp_path, **other))  # the mend
    assert anew.privacy.ledger.steps_run == 6
    assert (anew.privacy.ledger.restarts, anew.state.global_step) == ([], 6)


def test_without_a_whole_checkpoint_nothing_is_resumed(tmp_path, monkeypatch):
    killed_run(tmp_path, monkeypatch, call=1)
    with refused("interrupted-checkpoint"):
        trainer_of(tmp_path, **OPTIONS).train(resume_from_checkpoint=True)
    with refused("interrupted-checkpoint", match="checkpoint-2"):
        trainer_of(tmp_path, **OPTIONS).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 2


SCRIPT = """
import os, sys
from pathlib import Path
from transformers import TrainerCallback
from tests.support.trainers import trainer_of

folder, steps, save_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Seen(TrainerCallback):
    # What has noise and is about to move the weights, seen from outside of the ledger.
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        os.write(1, f"step {state.global_step + 1}\\n".encode())

trainer = trainer_of(
    folder, max_steps=steps, save_strategy="steps", save_steps=save_steps, save_total_limit=3, callbacks=[Seen()],
    noise_shape="banded:bands=2",
)
print("begin", flush=True)
trainer.train(resume_from_checkpoint=any((folder / "out").glob("checkpoint-*/trainer_state.json")))
print("end", trainer.state.global_step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "save_steps", "kills"), [(2000, 20, 30)])
def test_a_run_that_is_killed_again_and_again_ends_and_counts_every_step(tmp_path, steps, save_steps, kills):
    generator = np.random.default_rng(0)
    root, out, counted, written, ended, seen = Path(__file__).parents[3], tmp_path / "out", 0, "", "", []
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path), str(steps), str(save_steps)]
    while not ended:
        is_resumed = any(out.glob("checkpoint-*/trainer_state.json"))
        run = subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, text=True)
        lines = [run.stdout.readline()]
        assert lines[0].startswith("begin")
        if kills > 0:
            # Mostly between two steps, in one, or while a checkpoint or the ledger is written; now and then before all that.
            if generator.random() < 0.8:
                lines.append(run.stdout.readline())
            time.sleep(generator.uniform(0.0, 2.0))
            run.send_signal(signal.SIGKILL)
            kills -= 1
        lines += run.communicate()[0].splitlines()
        assert run.returncode in (0, -signal.SIGKILL)
        ended = next((line for line in lines if line.startswith("end")), "")
        seen += [[int(line.split()[1]) for line in lines if line.startswith("step")]]
        before, path = written, out / "privacy_ledger.json"
        written = path.read_text() if path.exists() else ""
        if written == before:
            assert not seen[-1]
            continue
        # A run that begins anew, since no checkpoint was whole, has a ledger of its own.
        counted_before, counted = counted if is_resumed else 0, PrivacyLedger.load(out).steps_run
        # Steps are counted a hundredth of the run ahead, before they are computed.
        assert 0 <= counted - counted_before - len(seen[-1]) <= max(1, steps // 100)
        assert counted >= max((int(path.parent.name.split("-")[1]) for path in out.glob("*/trainer_state.json")), default=0)
    # Every run goes on at the step after a checkpoint, and leaves out none.
    assert all(of_run == [*range(of_run[0], of_run[0] + len(of_run))] for of_run in seen if of_run)
    assert all((of_run[0] - 1) % save_steps == 0 for of_run in seen if of_run)
    assert {step for of_run in seen for step in of_run} == {*range(1, steps + 1)}
    assert ended == f"end {steps}"
    assert all(tensor.isfinite().all() for tensor in load_file(out / f"checkpoint-{steps}" / "model.safetensors").values())
    verified = [sys.executable, "-m", "doppler_hf", "verify", str(out)]
    assert "verified" in subprocess.run(verified, cwd=root, capture_output=True, text=True, check=True).stdout.lower()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer_of(folder, **OPTIONS).train()
    return folder / "out"


@pytest.mark.parametrize(
    ("name", "share"), [("model.safetensors", 0.999), ("optimizer.pt", 0.0), ("optimizer.pt", 0.999), ("scheduler.pt", 0.0)]
)
def test_a_checkpoint_with_a_file_that_is_cut_off_is_skipped(tmp_path, name, share, whole_run):
    shutil.copytree(whole_run, tmp_path / "out")
    path = tmp_path / "out" / "checkpoint-6" / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with refused("interrupted-checkpoint", match="checkpoint-6"):
        trainer_of(tmp_path, **OPTIONS).train(resume_from_checkpoint=str(path.parent))
    resumed = trainer_of(tmp_path, **OPTIONS)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy.ledger.restarts == [4]
    assert resumed.privacy.ledger.steps_run == 6 + 6 - 4
