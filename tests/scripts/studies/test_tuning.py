"""A study tunes on other data than it reports, its table says what its log holds, and nothing is run twice."""

import json

import numpy as np
import pytest

from scripts.reproduce import main
from scripts.studies import tuning
from scripts.studies.runs import code_digest
from scripts.studies.tuning import best_on_grid
from tests.scripts.studies.made_up import made_up, words


def test_the_table_says_what_the_log_holds_and_nothing_is_run_twice(sources, small, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "train", made_up)
    arguments = words(sources, "--tasks", "mnist-perceptron", "--methods", "white, none", "auto, auto")
    assert main(arguments) == 0
    folder = sources.cache_dir / "noise-shaping"
    rows = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    printed, progress = capsys.readouterr()
    for method, rate in (("white", 0.004), ("auto", 0.032)):
        own = [row for row in rows if f'"noise_shape": "{method}"' in row["arguments"]]
        reported = {row["seed"]: row for row in own if row["seed"] < 100 and row["learning_rate"]}
        assert {row["learning_rate"] for row in reported.values()} == {rate}
        tuned = {row["learning_rate"]: row["tuning"] for row in own if row["seed"] >= 100}
        assert min(tuned) < rate < max(tuned)
        accuracy = 100 * np.array([reported[seed]["report"] for seed in (0, 1)])
        assert f"| {rate:g} | {accuracy.mean():.2f} ± {accuracy.std(ddof=1) / 2**0.5:.2f} |" in printed
    # The rule's rate is off by a factor of two for the one, and of sixteen for the other.
    assert "| 0.002 | -10.00 [-10.00, -10.00] |" in printed
    assert "| 0.002 | -40.00 [-40.00, -40.00] |" in printed
    assert "## mnist-perceptron, ε = 4" in printed
    assert "1 lines of mnist-perceptron to come, about 0 min" in progress
    monkeypatch.setattr(tuning, "train", lambda run, data: pytest.fail("this was done already"))
    assert main([*arguments, "--resume"]) == 0
    again = capsys.readouterr()
    assert again.out == printed
    assert "to come" not in again.err
    assert main(arguments) == 2
    assert "holds runs already. Add --resume" in capsys.readouterr().err


def test_the_tuning_part_alone_chooses(sources, small, monkeypatch, capsys):
    """The reported accuracy is best at another rate."""

    def train(run, data):
        rate = run.learning_rate or 0.002
        return {"tuning": -abs(np.log2(rate / 0.032)), "report": -abs(np.log2(rate)), "first_rate": rate}

    monkeypatch.setattr(tuning, "train", train)
    assert main(words(sources, "--tasks", "mnist", "--methods", "white, none")) == 0
    assert "| white, none | 0.032 |" in capsys.readouterr().out


def test_a_run_that_was_killed_while_it_wrote_is_run_again_and_runs_of_other_code_are_named(
    sources, small, monkeypatch, capsys
):
    done = []

    def train(run, data):
        done.append(run)
        return made_up(run, data)

    monkeypatch.setattr(tuning, "train", train)
    arguments = words(sources, "--tasks", "mnist", "--methods", "white, none")
    assert main(arguments) == 0
    path = sources.cache_dir / "noise-shaping" / "runs.jsonl"
    whole, last = path.read_text(), done[-1]
    path.write_text(whole[:-40])
    done.clear()
    assert main([*arguments, "--resume"]) == 0
    assert done == [last]
    assert path.read_text() == whole
    assert "other code" not in capsys.readouterr().err
    first, *rest = whole.splitlines()
    row = json.loads(first)
    assert row["code"] == code_digest()
    path.write_text("\n".join([json.dumps(row | {"code": "01234567"}), *rest, ""]))
    assert main([*arguments, "--resume"]) == 0
    assert f"1 of the {len(rest) + 1} runs of {path} are of other code, and are not run again." in capsys.readouterr().err


@pytest.mark.parametrize("best", [-5, 7])
def test_the_grid_is_widened_until_the_best_is_inside(best):
    seen = []

    def score(value):
        seen.append(value)
        return -abs(np.log2(value / 0.3) - best)

    assert best_on_grid(score, centre=0.3) == 0.3 * 2.0**best
    assert min(seen) < 0.3 * 2.0**best < max(seen)
