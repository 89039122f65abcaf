"""A study tunes on other data than it reports, and its table says what its log holds."""

import json

import numpy as np
import pytest

from doppler_hf.cli import main
from doppler_hf.reproduce import tuning
from doppler_hf.reproduce.tuning import best_on_grid
from tests.support.studies import made_up, words


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


def test_a_method_without_a_rule_is_tuned_alone(sources, small, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "train", made_up)
    assert main(words(sources, "--tasks", "mnist", "--methods", "SGD: white, none", "white, none")) == 0
    sgd, adam = [line for line in capsys.readouterr().out.splitlines() if "white, none" in line]
    assert sgd.endswith("| – | – |")
    assert "| 0.002 |" in adam


@pytest.mark.parametrize("best", [-5, 0, 7])
def test_the_grid_is_widened_until_the_best_is_inside(best):
    seen = []

    def score(value):
        seen.append(value)
        return -abs(np.log2(value / 0.3) - best)

    assert best_on_grid(score, centre=0.3) == 0.3 * 2.0**best
    assert min(seen) < 0.3 * 2.0**best < max(seen)


def test_where_nothing_is_learnt_at_any_rate_the_first_is_kept():
    assert best_on_grid(lambda value: 0.5, centre=1.0) == 1.0


@pytest.mark.parametrize("learns_from", [3.0, 100.0])
def test_rates_at_which_nothing_is_learnt_are_not_taken_for_the_best(learns_from):
    """Of three that are far too small all scores are that of the largest class."""
    assert best_on_grid(lambda rate: 0.5 + (rate >= learns_from) / rate, centre=0.5) == min(
        rate for rate in 0.5 * 2.0 ** np.arange(12) if rate >= learns_from
    )
