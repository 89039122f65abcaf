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


def train(folder, checkpoint):
    """What each process does: say when a step has begun, and go on when the file `go` is there."""

    class Wait(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (Path(folder) / f"stepping-{os.getpid()}").touch()
            while not (Path(folder) / "go").exists():
                time.sleep(0.01)

    options = dict(max_steps=6, save_strategy="steps", save_steps=1)
    trainer = trainer_of(Path(folder), callbacks=[Wait()], **options)
    trainer.train(resume_from_checkpoint=checkpoint or None)
    trainer.save_model()


def start(folder, checkpoint=""):
    number = len(list(folder.glob("output-*")))
    with (folder / f"output-{number}").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(checkpoint)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=output,
            stderr=output,
        )
    return process, folder / f"output-{number}"


def wait_for_step(folder, process, output):
    while not (folder / f"stepping-{process.pid}").exists():
        assert process.poll() is None, output.read_text()
        time.sleep(0.05)


def kept(folder):
    return [PrivacyLedger.load(path) for path in folder.glob("privacy_ledger*.json")]


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_two_processes_one_is_refused_and_every_step_is_counted(tmp_path, resume):
    folder, checkpoint = tmp_path / "out", ""
    if resume:
        trainer_of(tmp_path, max_steps=6, save_strategy="steps", save_steps=1).train()
        checkpoint = folder / "checkpoint-2"
    # At the very same time, so that either may be the first.
    runs = [start(tmp_path, checkpoint) for _ in range(2)]
    while all(process.poll() is None for process, _ in runs):
        time.sleep(0.05)
    (refused, words), (other, output) = sorted(runs, key=lambda run: run[0].returncode is None)
    assert refused.returncode == 1
    assert "is the folder of another private run, which is still going on" in words.read_text()
    wait_for_step(tmp_path, other, output)
    (tmp_path / "go").touch()
    assert other.wait(60) == 0, output.read_text()
    (ledger,) = kept(folder)
    assert ledger.steps_run == (6 + 4 if resume else 6)
    assert main(["verify", str(folder)]) == 0


@pytest.mark.slow
def test_a_process_that_was_killed_holds_nothing(tmp_path):
    killed, output = start(tmp_path)
    wait_for_step(tmp_path, killed, output)
    with pytest.raises(ValueError, match="which is still going on"):
        trainer_of(tmp_path, max_steps=1).train()
    killed.kill()
    killed.wait(60)
    trainer_of(tmp_path, max_steps=1).train()
    assert sorted(ledger.steps_run for ledger in kept(tmp_path / "out")) == [1, 1]


if __name__ == "__main__":
    train(*sys.argv[1:])
