"""The command `doppler-hf check`: from a recipe or a script to a verdict and an exit code."""

import re
import sys

import pytest

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.privacy.clipping import clipped_gradients as clipping
from tests.support.printed import flat

SCRIPT = """
import sys
from doppler_hf import DopplerTrainer
from tests.support.trainers import trainer_of
from pathlib import Path


class Mine(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return float(sys.argv[2]) * super().compute_per_sample_loss(model, inputs)


if __name__ == "__main__":
    try:
        baseline = trainer_of(Path(sys.argv[1]) / "baseline", disable_dp=True, noise_multiplier=None, max_steps=1)
        assert baseline.train().global_step == 1
        trainer_of(Path(sys.argv[1]), cls=Mine).train()
    except Exception:
        print("handled")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my_train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_recipe_ends_with_0_and_a_table(recipe, tmp_path, capsys):
    words = ["check", str(recipe), "--pairs", "3", "--draw_size=10", "--clipping=vanilla"]
    assert main([*words, "--per_device_train_batch_size=20"]) == 0
    shown = flat(capsys.readouterr().out)
    assert "10 and one more, of a batch of 20" in shown
    assert "No defect found: no tested record moved the sum by more than C" in shown
    assert 0.3 < float(re.search(r"moves the sum by │ ([\d.]+) C", shown)[1]) < 1 + 1e-5
    assert "These figures are not private" in shown
    # Nothing was spent; and what is not private must not lie where the model will, which is pushed with all beside it.
    assert not list((tmp_path / "out").glob("*"))


def test_a_defect_ends_with_1(recipe, monkeypatch, capsys):
    right = clipping.clip_factors
    monkeypatch.setattr(clipping, "clip_factors", lambda norms, **options: 1.5 * right(norms, **options))
    words = ["--pairs=2", "--draw-size=5", "--no_grad_sample_self_check", "--per_device_train_batch_size=20"]
    assert main(["check", str(recipe), *words]) == 1
    assert "THE CLAIM IS WRONG: one record moves the sum by 1.49" in flat(capsys.readouterr().out)


def test_a_script_of_ones_own_runs_up_to_its_training(script, tmp_path, capsys):
    before = DopplerTrainer.train, sys.argv, list(sys.path)
    assert main(["check", "--pairs=2", "--script", script, str(tmp_path / "mine"), "0.5"]) == 0
    assert (DopplerTrainer.train, sys.argv, sys.path) == before
    shown = flat(capsys.readouterr().out)
    assert "No defect found" in shown
    assert "handled" not in shown
    assert not list((tmp_path / "mine" / "out").glob("*"))


def test_a_script_without_training_and_no_script_are_refused(script, tmp_path, capsys):
    idle = tmp_path / "idle_script.py"
    idle.write_text("import sys; assert sys.argv[1:] == ['--learning_rate', '3']\n")
    assert main(["check", "--script", str(idle), "--learning_rate", "3"]) == 2  # its own words stay as they are
    assert "must call DopplerTrainer.train(), but ended without it" in capsys.readouterr().err
    assert main(["check", "--script", str(tmp_path / "none.py")]) == 2
    assert "--script must be followed by the path of a script, got" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check"])
