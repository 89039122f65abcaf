"""The command `doppler-hf audit`: from a recipe to a verdict and an exit code."""

import json

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

from doppler_hf.cli import main
from doppler_hf.privacy import GaussianMechanism
from doppler_hf.workloads import images

RECIPE = """
dataset_name: digits
image_size: 8
patch_size: 4
hidden_size: 8
num_layers: 1
num_heads: 1
noise_multiplier: 2.0
target_delta: 1e-3
per_device_train_batch_size: 60
max_steps: 2
learning_rate: 1e-3
eval_strategy: steps
eval_steps: 1
save_strategy: steps
save_steps: 1
load_best_model_at_end: true
disable_tqdm: true
use_cpu: true
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe that would evaluate and save, on forty images of two classes."""
    generator = np.random.default_rng(0)
    rows = {
        "image": list(generator.integers(0, 255, size=(40, 8, 8), dtype=np.uint8)), "label": [0, 1] * 20
    }  # fmt: skip
    features = Features({"image": Image(), "label": ClassLabel(names=["even", "odd"])})
    splits = {name: Dataset.from_dict(rows, features=features) for name in ("train", "test")}
    monkeypatch.setattr(images, "load_images", lambda name, folder, unit_column: DatasetDict(splits))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + f"output_dir: {tmp_path / 'out'}\n")
    return path


def flat(text):
    return " ".join(text.split())


def test_honest_run_ends_with_0_and_writes_one_file(recipe, tmp_path, capsys):
    words = ["audit", str(recipe), "--canaries", "200", "--confidence", "0.999999"]
    assert main([*words, "--per_device_train_batch_size=8"]) == 0  # wrong once in a million
    shown = flat(capsys.readouterr().out)
    assert "No defect found" in shown
    assert "canaries │ 200, " in shown
    written = json.loads((tmp_path / "out" / "privacy_audit.json").read_text())
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "privacy_audit.json"]
    assert (written["canaries"], written["confidence"]) == (200, 0.999999)
    assert len(written["scores"]) == len(written["included"]) == 200
    assert written["lower_bound"] == max(written["lower_bounds"].values())
    assert f"claimed ε │ {written['claimed_epsilon']:.4g}" in shown


def test_broken_run_ends_with_1(recipe, tmp_path, monkeypatch, capsys):
    def without_noise(self, sums, **kwargs):
        return {name: total / self.expected_batch_size for name, total in sums.items()}

    monkeypatch.setattr(GaussianMechanism, "privatize", without_noise)
    assert main(["audit", str(recipe), "--canaries=400"]) == 1
    shown = flat(capsys.readouterr().out)
    written = json.loads((tmp_path / "out" / "privacy_audit.json").read_text())
    assert written["contradicts_claim"]
    assert f"THE CLAIM IS WRONG: this run leaks at least ε = {written['lower_bound']:.4g}" in shown


def test_options_go_before_the_recipe_too_and_fields_after_it(recipe, capsys, tmp_path):
    assert (
        main(["audit", "--canaries", "37", str(recipe), "--noise_multiplier", "50", "--per_device_train_batch_size", "5"])
        == 0
    )
    shown = flat(capsys.readouterr().out)
    assert "noise multiplier 50; " in shown
    assert "canaries │ 37, " in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--confidence", "1"], "error: confidence must lie in (0, 1), got 1.0. Usual is 0.95."),
        (["--canaries", "0"], "error: num_canaries must be at least 1, got 0."),
        (["--leerning_rate", "1"], "error: Recipe and flags fit no workload"),
        (["--noise_multiplier", "0"], "error: The run claims no privacy"),
    ],
)
def test_mistakes_end_with_2_and_one_line(words, message, recipe, capsys):
    assert main(["audit", str(recipe), *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
