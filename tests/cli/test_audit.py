"""The command `doppler-hf audit`: from a recipe to a verdict and an exit code."""

import json

import pytest

from doppler_hf.audit import AuditTrainer
from doppler_hf.cli import main
from doppler_hf.privacy import GaussianMechanism
from tests.support.printed import flat


def test_honest_run_ends_with_0_and_writes_one_file(recipe, tmp_path, capsys):
    """Its options stand before the recipe and behind it, and fields of the recipe behind it."""
    words = ["audit", "--canaries", "200", str(recipe), "--confidence", "0.999999"]  # wrong once in a million
    assert main([*words, "--per_device_train_batch_size=8", "--noise_multiplier", "3"]) == 0
    shown = flat(capsys.readouterr().out)
    assert "No defect found" in shown
    assert "noise multiplier 2.985; " in shown  # √0.99 times what was given: of gradient and loss together
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


SCRIPT = """
import sys
from pathlib import Path
from doppler_hf import DopplerTrainer
from tests.support.tiny import text_data
from tests.support.trainers import trainer_of


class Half(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return 0.5 * super().compute_per_sample_loss(model, inputs)


class Mine(Half):
    def __init__(self, *args, note=None, **options):
        super().__init__(*args, **options)


cls = {"Half": Half, "Mine": Mine}[sys.argv[2]]
trainer_of(Path(sys.argv[1]), cls=cls, evaluated=text_data(8), eval_strategy="steps", eval_steps=1, save_strategy="steps",
           save_steps=1, load_best_model_at_end=True, max_steps=2, learning_rate=1e-3).train()
"""


def test_the_training_of_a_script_is_audited_in_its_place(tmp_path, monkeypatch, capsys):
    path = tmp_path / "my_train.py"
    path.write_text(SCRIPT)
    losses = []
    right = AuditTrainer.compute_per_sample_loss
    monkeypatch.setattr(
        AuditTrainer, "compute_per_sample_loss",
        lambda self, *args: losses.append(type(self).__mro__[2].__name__) or right(self, *args),
    )  # fmt: skip
    words = ["audit", "--canaries=100", "--confidence=0.999999", "--script", str(path), str(tmp_path / "mine")]
    assert main([*words, "Half"]) == 0
    assert "canaries │ 100, " in flat(capsys.readouterr().out)
    assert set(losses) == {"Half"}
    assert [each.name for each in (tmp_path / "mine" / "out").iterdir()] == ["privacy_audit.json"]
    assert main([*words, "Mine"]) == 2
    error = capsys.readouterr().err
    assert "error: Mine has its own __init__" in error
    assert "define class Audited(AuditTrainer, Mine)" in error  # which tests/audit does


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--confidence", "1"], "error: confidence must be in (0, 1); got 1.0. A usual value is 0.95."),
        (["--canaries", "0"], "error: num_canaries, the number of records that the audit attacks, must be at least 1"),
        (["--leerning_rate", "1"], "error: Recipe and flags fit no workload"),
        (["--noise_multiplier", "0"], "error: This run claims no privacy"),
    ],
)
def test_mistakes_end_with_2_and_one_line(words, message, recipe, capsys):
    assert main(["audit", str(recipe), *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
