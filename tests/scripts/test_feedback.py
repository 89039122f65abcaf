"""The measurement of a rate that follows the loss runs from its command line, and finds the lowest point of a parabola."""

import dataclasses
import json

import pytest

from scripts.experiments import feedback
from scripts.studies.tasks import SMALL


@pytest.mark.thorough
def test_the_command_line(tmp_path, monkeypatch, capsys):
    settings = SMALL["digits"].settings | {"max_steps": 6}
    monkeypatch.setitem(SMALL, "digits", dataclasses.replace(SMALL["digits"], settings=settings))
    output = tmp_path / "f.jsonl"
    feedback.main([f"--data_dir={tmp_path}", f"--output={output}", "--tasks", "digits", "--seeds", "0"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["feedback"] for row in rows] == [False, True, True] * 2
    assert "digits, auto noise, constant, by the losses" in capsys.readouterr().out
