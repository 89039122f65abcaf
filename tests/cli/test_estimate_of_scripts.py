"""`doppler-hf estimate --script`: time, memory and ε of a script's own run, without training."""

import json
import re

import pytest
import torch

from doppler_hf import DopplerTrainer
from doppler_hf.cli import estimate, main
from doppler_hf.cli.measured_run import _Steps, measured_run
from tests.support.printed import flat
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import text_data
from tests.support.trainers import trained, trainer_of, weights

SCRIPT = """
import sys
from pathlib import Path
import torch
from doppler_hf import DopplerTrainer
from tests.support.tiny import text_data
from tests.support.trainers import trainer_of


class Mine(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return float(sys.argv[2]) * super().compute_per_sample_loss(model, inputs)


baseline = trainer_of(Path(sys.argv[1]) / "baseline", disable_dp=True, noise_multiplier=None, max_steps=1)
assert baseline.train().global_step == 1
terms = dict(noise_multiplier=None, target_epsilon=3.0, learning_rate=None, max_steps=12)
if "users" in sys.argv:
    terms |= dict(privacy_unit_column="user")
if "not private" in sys.argv:
    terms = dict(noise_multiplier=None, disable_dp=True, max_steps=1)
data = text_data(80).add_column("user", [row // 2 for row in range(80)])
trainer = trainer_of(Path(sys.argv[1]), cls=Mine, data=data, **terms)
if "refused" in sys.argv:
    trainer.neftune_noise_alpha = 5.0
try:
    trainer.train()
finally:
    print("the script goes on")
print("trained")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my_train.py"
    path.write_text(SCRIPT)
    return str(path)


def estimated(script, folder, *more, capsys):
    assert main(["estimate", "--json", "--script", script, str(folder), "0.5", *more]) == 0
    shown = capsys.readouterr().out
    assert "trained" not in shown.replace("trainable", "")
    return json.loads(next(line for line in shown.splitlines() if line.startswith('{"step')))


@pytest.mark.parametrize("of", ["records", *thorough("users")])
def test_a_script_is_estimated_in_place_of_its_training(script, tmp_path, capsys, of):
    folder = tmp_path / "mine"
    found = estimated(script, folder, of, capsys=capsys)
    assert not list((folder / "out").glob("*")), "nothing is written"
    assert (found["steps"], found["batch_size"], found["measured_batch_size"]) == (12, 8, 8)
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["peak_bytes"] == pytest.approx(sum(found["bytes"].values()))
    assert found["run_seconds"] == pytest.approx(found["start_seconds"] + 12 * found["step_seconds"])
    assert min(found["seconds"]["passes, noise and optimizer"], found["bytes"]["a pass"], found["start_seconds"]) > 0
    # The same terms train with this ε.
    data = text_data(80).add_column("user", [row // 2 for row in range(80)])
    unit = dict(privacy_unit_column="user") if of == "users" else {}
    terms = dict(noise_multiplier=None, target_epsilon=3.0, learning_rate=None, max_steps=12)
    trainer = trained(trainer_of(tmp_path / "trained", data=data, **terms, **unit))
    assert found["epsilon"] == pytest.approx(trainer.privacy.epsilon(), rel=1e-9)
    size = sum(each.numel() for each in trainer.model.parameters())
    assert found["bytes"]["clipped sums"] == 4 * size
    states = trainer.optimizer.optimizer.state.values()
    held = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
    assert found["bytes"]["optimizer"] == held
    assert found["bytes"]["earlier noise"] == 4 * size * (trainer.privacy.statement.groups - 1)


def test_the_text_says_what_is_spent_and_what_is_not(script, tmp_path, capsys):
    assert main(["estimate", "--script", script, str(tmp_path / "mine"), "0.5"]) == 0
    shown = flat(capsys.readouterr().out)
    assert "peak memory" in shown
    assert "whole step" in shown
    assert re.search(r"The run: 12 steps in [\d.]+ ", shown)
    assert re.search(r"It will spend ε = [\d.]+, δ = [\d.]+ for one record. This estimate has spent nothing", shown)
    assert "do not publish" in shown


def test_an_estimate_changes_neither_weights_nor_the_trainer(tmp_path):
    trainer = trainer_of(tmp_path, data=text_data(60), noise_multiplier=None, target_epsilon=3.0, max_steps=5)
    before, state = weights(trainer), dict(trainer.args.to_dict())
    found = measured_run(trainer)
    assert found.measured_rows == 8
    assert torch.equal(weights(trainer), before)
    assert trainer.args.to_dict() == state
    assert (trainer.state.global_step, trainer.privacy.ledger, trainer.optimizer) == (0, None, None)
    assert trained(trainer).privacy.epsilon() == pytest.approx(found.epsilon, rel=1e-9)  # and not a second time as much


@pytest.mark.parametrize(
    ("flags", "arguments", "said"),
    [
        (["--micro-batch=4"], [], "--micro-batch has no effect"),
        (["--bf16"], [], "--bf16 has no effect"),
        (["--model=x"], [], "--model has no effect"),
        ([], ["not private"], "trains without privacy only"),
        ([], ["refused"], "neftune_noise_alpha"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(script, tmp_path, capsys, flags, arguments, said):
    words = ["estimate", *flags, "--script", script, str(tmp_path / "mine"), "0.5", *arguments]
    assert main(words) == 2 or "not private" in arguments
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("missing", ["--model", "--task", "--batch-size"])
def test_what_a_model_needs_is_named(missing, capsys):
    words = {"--model": "x", "--task": "causal-lm", "--batch-size": "8"}
    assert main(["estimate", *(f"{flag}={value}" for flag, value in words.items() if flag != missing)]) == 2
    assert f"{missing} is missing" in capsys.readouterr().err
    assert main(["estimate", "--no-such-flag=1"]) == 2
    assert "--no-such-flag=1" in capsys.readouterr().err


@pytest.mark.parametrize("given", thorough("--per_device_train_batch_size=20"))
def test_a_recipe_is_estimated(recipe, tmp_path, capsys, given):
    assert main(["estimate", str(recipe), given]) == 0
    assert "A step: 20 records" in flat(capsys.readouterr().out)
    assert not list((tmp_path / "out").glob("*"))


def test_a_run_without_privacy_is_refused(tmp_path):
    with refused("no-privacy-to-estimate"):
        measured_run(trainer_of(tmp_path, noise_multiplier=None, disable_dp=True))


def test_a_run_of_several_processes_is_refused(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with refused("several-processes", match="Start it without torchrun or accelerate"):
        measured_run(trainer)


def test_batches_that_take_too_long_are_extrapolated(tmp_path):
    trainer = trainer_of(tmp_path, data=text_data(200), per_device_train_batch_size=4, gradient_accumulation_steps=25)
    steps = _Steps(trainer)
    steps.seconds = [9.0, 0.5]
    small = [steps._size(1), steps._size(2)]
    steps.seconds.append(1.0)  # for four records
    large = [steps._size(3), steps._size(4), steps._size(5)]
    assert (small, large) == ([4, 4], [20, 20, 20]), "five seconds are five times as long"
    # 0.5 s a step and 0.1 s a record: the line through both sizes, for 100 records.
    assert steps.for_whole_batch([9.0, 0.9, 0.9, 2.5, 2.5, 2.5]) == pytest.approx(10.5)
    steps.seconds[2] = 0.01
    steps.sizes[2:] = [steps._size(3), steps._size(4), steps._size(5)]
    assert steps.for_whole_batch([9.0, 0.9, 0.9, 2.5, 2.5, 2.5]) == 2.5, "whole batches are as measured"


def test_a_time_is_shown_in_its_unit():
    assert [estimate.in_hours(each) for each in (2.34, 754, 40_000)] == ["2.3 s", "13 min", "11 h 7 min"]
    assert DopplerTrainer.train is not None
