"""Steps of small networks are timed in turn, from the command line."""

import json

import pytest

from scripts.bench import small_networks


def test_both_trainers_are_timed_in_turn(tmp_path, capsys):
    output = tmp_path / "b.jsonl"
    small_networks.main(["--steps=2", "--pairs=2", "--batch_size=20", f"--output={output}"])
    (result,) = map(json.loads, output.read_text().splitlines())
    assert result["work"] == "digits"
    assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]
    assert min(result["plain_s"], result["private_s"]) > 0
    assert f"digits time ×{result['ratio']:.2f}" in capsys.readouterr().out


def test_a_task_that_there_is_not_is_refused():
    with pytest.raises(SystemExit, match=r"^error: --tasks must be of digits, mnist, .*, got 'cola'\.$"):
        small_networks.main(["--tasks=cola"])
