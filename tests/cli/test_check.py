"""The command `doppler-hf check`: from a recipe or a script to a verdict and an exit code."""

import re
import sys

import pytest

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.cli import script as script_of_command
from doppler_hf.cli.script import _script_of
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
    assert "10 and one more (a batch of the run: 20)" in shown
    assert "No defect found: no tested record moved the sum by more than C" in shown
    assert 0.3 < float(re.search(r"moves the sum by │ at most ([\d.]+) C", shown)[1]) < 1 + 1e-5
    assert "so ε does not cover them" in shown
    # Nothing was spent; and what is not private must not lie where the model will, which is pushed with all beside it.
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(("precision", "allowed", "is_coarse"), [([], "0.00032", False), (["--bf16"], "0.32", True)])
def test_what_rounding_may_hide_is_said(recipe, capsys, precision, allowed, is_coarse):
    words = ["--pairs=2", "--draw-size=10", "--no_grad_sample_self_check", "--per_device_train_batch_size=20"]
    assert main(["check", str(recipe), *words, *precision]) == 0
    shown = flat(capsys.readouterr().out)
    assert f"(allowed: {allowed} C)" in shown
    assert ("this test can miss records that move others. Repeat it in float32." in shown) == is_coarse


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


def test_what_is_refused_in_a_script_is_not_taken_for_an_error_that_it_handles(script, tmp_path, capsys):
    assert main(["check", "--pairs=0", "--script", script, str(tmp_path / "mine"), "0.5"]) == 2
    captured = capsys.readouterr()
    said = "error: pairs, the number of pairs of batches to compare, must be from 1 to 100,000; got 0."
    assert captured.err.splitlines()[-1].startswith(said)
    assert "handled" not in captured.out


def test_numbers_that_no_test_can_have_are_refused(recipe, capsys):
    for words in (["check", "--pairs=1e14"], ["check", "--draw-size=1e14"], ["audit", "--canaries=1e14"]):
        assert main([*words, str(recipe), "--per_device_train_batch_size=20"]) == 2
        assert "got 100000000000000" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["check", "audit"])
def test_a_misspelt_option_before_a_script_is_refused(command, script, tmp_path, capsys):
    assert main([command, "--pears=3", "--script", script, str(tmp_path / "mine"), "0.5"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: Unknown options before --script: --pears=3")
    assert ("(did you mean '--pairs'?)" in told) == (command == "check")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("flag", ["--target_epsilon", "--target-epsilon"])
@pytest.mark.parametrize("command", ["check", "audit", "estimate"])
def test_the_value_of_an_unknown_flag_is_not_read_as_a_recipe(command, flag, recipe, script, tmp_path, capsys):
    for further in ([], [str(recipe)]):
        assert main([command, flag, "3", *further]) == 2
        told = capsys.readouterr().err
        assert "Expected the path of a recipe, or --script; got 3, which is not a file." in told
        assert "This command has no flag --target-epsilon. Give the recipe first" in told
    assert main([command, flag, "3", "--script", script, str(tmp_path / "mine"), "0.5"]) == 2
    told = capsys.readouterr().err
    assert "Unknown options before --script: --target-epsilon 3. Put the script's own arguments after the script." in told


@pytest.mark.parametrize("flag", ["--target_epsilon", "--target-epsilon"])
def test_a_field_follows_the_recipe_as_a_flag_of_either_spelling(flag, recipe, capsys):
    recipe.write_text(recipe.read_text().replace("noise_multiplier: 2.0\n", "").replace("learning_rate: 1e-3\n", ""))
    words = ["--pairs=2", "--draw-size=5", "--no_grad_sample_self_check", "--per_device_train_batch_size=20"]
    assert main(["check", str(recipe), flag, "3", *words]) == 0
    assert "No defect found" in flat(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["check", "audit"])
def test_a_recipe_without_privacy_is_refused_before_it_is_trained(command, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(DopplerTrainer, "train", lambda *args, **options: pytest.fail("it was trained"))
    words = ["--disable_dp=true", "--learning_rate=1e-3"]
    recipe.write_text(recipe.read_text().replace("noise_multiplier: 2.0\ntarget_delta: 1e-3\n", ""))
    assert main([command, str(recipe), *words]) == 2
    assert "disable_dp" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "out").glob("*"))


def test_a_recipe_needs_a_clone_that_is_found_beside_the_package_the_recipe_or_here(recipe, tmp_path, monkeypatch, capsys):
    root = script_of_command.PACKAGE.parent
    command = [str(root / "scripts" / "image_classification.py"), str(recipe)]
    assert _script_of([str(recipe)]) == command
    monkeypatch.chdir(tmp_path)
    assert _script_of([str(recipe)]) == command  # beside the package
    # As where a wheel is installed.
    monkeypatch.setattr(script_of_command, "PACKAGE", tmp_path / "site-packages" / "doppler_hf")
    assert main(["check", str(recipe)]) == 2
    error = capsys.readouterr().err
    said = "error: A recipe needs the training scripts of this project's repository, but no clone of it was found near "
    assert error.startswith(said)
    assert "with --script" in error  # which other tests do
    own = str(root / "recipes" / "image" / "digits-eps8.yaml")
    assert _script_of([own]) == [*command[:1], own]
    monkeypatch.chdir(root / "docs")
    assert _script_of([str(recipe)]) == command


def test_a_script_without_training_and_no_script_are_refused(script, tmp_path, capsys):
    idle = tmp_path / "idle_script.py"
    idle.write_text("import sys; assert sys.argv[1:] == ['--learning_rate', '3']\n")
    assert main(["check", "--script", str(idle), "--learning_rate", "3"]) == 2  # its own words stay as they are
    assert "ended without calling DopplerTrainer.train()" in capsys.readouterr().err
    assert main(["check", "--script", str(tmp_path / "none.py")]) == 2
    assert "Expected the path of a script after --script; got" in capsys.readouterr().err
    assert main(["check"]) == 2
    assert "Expected the path of a recipe, or --script; got none." in capsys.readouterr().err


def test_what_a_script_says_of_a_mistake_is_one_line(tmp_path, capsys):
    failing = tmp_path / "failing.py"
    failing.write_text("import sys; sys.exit('error: data_dir is missing.')\n")
    assert main(["check", "--script", str(failing)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: data_dir is missing."


@pytest.mark.parametrize("command", ["check", "audit", "estimate"])
def test_a_script_in_place_of_a_recipe_is_told_where_it_belongs(command, script, capsys):
    assert main([command, str(script), "--learning_rate", "1e-3"]) == 2
    told = capsys.readouterr().err
    assert f"Put --script before a Python file, and the script's own arguments after it: --script {script}." in told
