"""Two processes that train into one folder at once: one of them is refused, and nothing of the other's is lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from doppler_hf.cli import main
from doppler_hf.privacy import PrivacyLedger
from tests.support.trainers import trainer_of


def train(folder, checkpoint, *, may_go_on):
    """What each process does: say when it is ready and when a step has begun; begin, and go on, when the others say so."""

    class Wait(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (folder / f"stepping-{os.getpid()}").touch()
            wait_until(may_go_on)

    options = dict(max_steps=6, save_strategy="steps", save_steps=1)
    trainer = trainer_of(folder, callbacks=[Wait()], **options)
    (folder / f"ready-{os.getpid()}").touch()
    wait_until((folder / "begin").exists)
    trainer.train(resume_from_checkpoint=checkpoint or None)
    trainer.save_model()


def wait_until(condition):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 60, "neither process was refused"
        time.sleep(0.001)


def start(folder, checkpoint=""):
    """Start another process, and return it and its output once it is ready to begin."""
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(checkpoint)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=output,
            stderr=output,
        )
    wait_for("ready", folder, process)
    return process, folder / "output"


def wait_for(what, folder, process):
    while not (folder / f"{what}-{process.pid}").exists():
        assert process.poll() is None, (folder / "output").read_text()
        time.sleep(0.01)


def kept(folder):
    return [PrivacyLedger.load(path) for path in folder.glob("privacy_ledger*.json")]


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_of_two_processes_one_is_refused_and_every_step_is_counted(tmp_path, resume):
    folder, checkpoint = tmp_path / "out", ""
    if resume:
        trainer_of(tmp_path, max_steps=6, save_strategy="steps", save_steps=1).train()
        checkpoint = folder / "checkpoint-2"
    other, output = start(tmp_path, checkpoint)
    refusal = None
    (tmp_path / "begin").touch()  # at the very same time, so that either may be the first
    try:
        train(tmp_path, checkpoint, may_go_on=lambda: other.poll() is not None)
    except ValueError as error:
        refusal = str(error)
        wait_for("stepping", tmp_path, other)
        (tmp_path / "go").touch()
    assert (other.wait(60) == 0) == (refusal is not None), output.read_text()
    assert "is the folder of another private run, which is still going on" in (refusal or output.read_text())
    (ledger,) = kept(folder)
    assert ledger.steps_run == (6 + 4 if resume else 6)
    assert main(["verify", str(folder)]) == 0


@pytest.mark.slow
def test_a_process_that_was_killed_holds_nothing(tmp_path):
    killed, _ = start(tmp_path)
    (tmp_path / "begin").touch()
    wait_for("stepping", tmp_path, killed)
    with pytest.raises(ValueError, match="which is still going on"):
        trainer_of(tmp_path, max_steps=1).train()
    killed.kill()
    killed.wait(60)
    trainer_of(tmp_path, max_steps=1).train()
    assert sorted(ledger.steps_run for ledger in kept(tmp_path / "out")) == [1, 1]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], may_go_on=(Path(sys.argv[1]) / "go").exists)
