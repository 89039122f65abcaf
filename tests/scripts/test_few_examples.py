"""The measurement on few examples runs from its command line, and sorts its lines by the noise."""

import json
import re

import pytest

from scripts.experiments import few_examples


@pytest.mark.thorough
def test_the_command_line(tmp_path, capsys):
    output = tmp_path / "few.jsonl"
    settings = ["--tasks", "digits", "--examples", "40", "80", "--epsilons", "8", "--epochs", "1", "2", "--seeds", "0"]
    few_examples.main([f"--data_dir={tmp_path}", f"--output={output}", *settings])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["examples"], row["epochs"]) for row in rows] == [(40, 1), (40, 2), (80, 1), (80, 2)]
    assert [len(row["accuracies"]) for row in rows] == [1] * 4
    noises = [float(noise) for noise in re.findall(r"([\d.]+) C: ", capsys.readouterr().out)]
    assert len(noises) == 4
    assert noises == sorted(noises, reverse=True)
