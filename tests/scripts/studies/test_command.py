"""The command says in one line what is wrong, and has one writer."""

import json

import pytest
from filelock import FileLock

from scripts.reproduce import main
from scripts.studies import tuning
from tests.scripts.studies.made_up import made_up, words


def test_a_folder_has_one_writer(sources, small, capsys):
    folder = sources.cache_dir / "noise-shaping"
    folder.mkdir(parents=True)
    with FileLock(folder / "runs.lock"):
        assert main(words(sources, "--tasks", "mnist")) == 2
    assert "is being written to by another study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "cola"], "--tasks must be of digits; mnist; mnist-perceptron; cifar10; sst2-words; "),
        (["--methods", "best"], "got 'best'"),
        (["--tasks", "sst2", "--encoder", "nowhere"], "Cannot load 'nowhere' ("),
        (["--seeds", "1"], "--seeds 2 to 100, got 1 and 1. Of one run there is no standard error."),
        (["--epsilons", "3", "nan"], "must be positive numbers, got nan"),
        (["--data-dir", "elsewhere"], "--data-dir must have mnist for the task mnist, got elsewhere without it"),
    ],
)
def test_mistakes_are_one_line(sources, capsys, more, message):
    assert main([*words(sources), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not sources.cache_dir.exists()


def test_a_study_at_full_scale_has_tasks_of_its_own(sources, small, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "train", made_up)
    more = ("--scale", "full", "--methods", "DPSGD", "LP-DPSGD", "--tasks", "cifar10")
    assert main([*words(sources, *more), "--out", str(sources.cache_dir)]) == 2
    assert "--methods must be of" in capsys.readouterr().err
    arguments = [word if word != "noise-shaping" else "paper" for word in words(sources, *more)]
    assert main(arguments) == 0
    assert "## cifar10, ε = 4" in capsys.readouterr().out
    (log,) = sources.cache_dir.rglob("runs.jsonl")
    assert {json.loads(json.loads(line)["arguments"])["max_steps"] for line in log.read_text().splitlines()} == {5400}
    assert main(["floor", "--scale", "full"]) == 2
    assert "--scale must be small for floor, got full. It has no tasks of that scale." in capsys.readouterr().err
