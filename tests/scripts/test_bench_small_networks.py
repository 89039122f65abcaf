"""Steps of small networks are timed in turn, from the command line."""

import json

import pytest
from transformers import Trainer

from scripts.bench import small_networks


def test_both_trainers_are_timed_in_turn(tmp_path, capsys, monkeypatch):
    trained = []

    def as_it_is(self, *args, **kwargs):
        trained.append(type(self).__name__)
        return train(self, *args, **kwargs)

    train = Trainer.train
    monkeypatch.setattr(Trainer, "train", as_it_is)
    output = tmp_path / "b.jsonl"
    small_networks.main(["--steps=2", "--pairs=1", "--batch_size=20", f"--output={output}"])
    assert trained == ["Trainer", "StudyTrainer"]
    (result,) = map(json.loads, output.read_text().splitlines())
    assert result["work"] == "digits"
    assert result["ratio"] == pytest.approx(result["private_s"] / result["plain_s"], rel=1e-9)
    assert f"digits time ×{result['ratio']:.2f}" in capsys.readouterr().out


def test_a_task_that_there_is_not_is_refused():
    with pytest.raises(SystemExit, match=r"^error: --tasks must be of digits, mnist, mnist-perceptron, got 'cola'\.$"):
        small_networks.main(["--tasks=cola"])


def test_a_run_that_would_end_before_it_is_timed_is_refused():
    with pytest.raises(SystemExit, match=r"^error: --steps and --pairs must be .*, got 40, 3 and 44\."):
        small_networks.main(["--planned=44"])
