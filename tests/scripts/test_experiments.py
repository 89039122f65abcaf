"""Measurements that train, from their command lines at a tiny size: a line for every run, and what is said of it."""

import dataclasses
import json
import re

import pytest

from scripts.experiments import feedback, few_examples, head_first
from scripts.studies.tasks import SMALL
from tests.support.folders import write_bert, write_glue

pytestmark = pytest.mark.thorough


@pytest.fixture
def shortened(monkeypatch):
    """Let a task be of other settings."""

    def shorten(name, **settings):
        monkeypatch.setitem(SMALL, name, dataclasses.replace(SMALL[name], settings=SMALL[name].settings | settings))

    return shorten


def lines_of(module, tmp_path, *flags):
    """Run a module, and return the lines that it has written."""
    module.main([f"--data_dir={tmp_path}", f"--output={tmp_path / 'out.jsonl'}", *flags])
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_a_rate_that_follows_the_loss(tmp_path, shortened, capsys):
    shortened("digits", max_steps=6)
    rows = lines_of(feedback, tmp_path, "--tasks", "digits", "--seeds", "0")
    assert [row["feedback"] for row in rows] == [False, True, True] * 2
    assert "digits, auto noise, constant, by the losses" in capsys.readouterr().out


def test_few_examples_in_the_order_of_their_noise(tmp_path, capsys):
    settings = ["--tasks", "digits", "--examples", "40", "80", "--epsilons", "8", "--epochs", "1", "2", "--seeds", "0"]
    rows = lines_of(few_examples, tmp_path, *settings)
    assert [(row["examples"], row["epochs"]) for row in rows] == [(40, 1), (40, 2), (80, 1), (80, 2)]
    assert [len(row["accuracies"]) for row in rows] == [1] * 4
    noises = [float(noise) for noise in re.findall(r"([\d.]+) C: ", capsys.readouterr().out)]
    assert len(noises) == 4
    assert noises == sorted(noises, reverse=True)


def test_a_head_that_was_fitted_first(tmp_path, shortened, monkeypatch, capsys):
    shortened("sst2", per_device_train_batch_size=10, max_steps=3)
    monkeypatch.setattr("scripts.studies.texts.apart", lambda count, held_out: (range(20, 60), range(20)))
    (tmp_path / "glue").mkdir()
    write_glue(tmp_path / "glue" / "sst2", "sst2", train=60)
    encoder = write_bert(tmp_path / "bert", num_hidden_layers=3)
    more = ["--rates", "0.01", "--seeds", "0", f"--cache_dir={tmp_path / 'out'}"]
    assert [row["head"] for row in lines_of(head_first, tmp_path, f"--encoder={encoder}", *more)] == ["new", "fitted"]
    assert "sst2, fitted head, 0.01, seed 0" in capsys.readouterr().out
