"""The comparison of a private search with the automatic values: at one ε, on data that did not choose, and resumable."""

import json

import pytest

from doppler_hf.run.search import search
from scripts.experiments import private_search


def test_both_ways_are_trained_at_the_same_epsilon_and_what_is_done_is_kept(sources, small, capsys, monkeypatch):
    monkeypatch.setattr(search, "another_trial", lambda trials, begun: begun < 2)
    words = ["--data-dir", sources.data_dir, "--out", str(sources.cache_dir), "--seeds", "2", "--trials", "3"]
    private_search.main(words)
    table = capsys.readouterr().out.splitlines()
    path = sources.cache_dir / "mnist-perceptron.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["seed"] for line in lines] == [0, 1]
    assert all(0 <= line[way] <= 1 for line in lines for way in private_search.WAYS)
    assert all(1 <= line["chosen"]["max_steps"] <= 6 for line in lines)
    mean = 50 * sum(line["search"] for line in lines)
    assert any(row.startswith(f"| search, 3 trials expected | {mean:.1f} ± ") for row in table)
    monkeypatch.delattr(private_search, "compared")  # nothing is trained again
    private_search.main(words)
    assert capsys.readouterr().out.splitlines() == table


def test_one_seed_has_no_error(capsys):
    with pytest.raises(SystemExit):
        private_search.main(["--seeds", "1"])
    assert "at least 2" in capsys.readouterr().err
