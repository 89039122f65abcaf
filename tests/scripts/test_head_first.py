"""The measurement of a head that was fitted first runs from its command line, and its head is the regression's."""

import dataclasses
import json

import pytest

from scripts.experiments import head_first
from scripts.studies.tasks import SMALL
from tests.support.folders import write_bert, write_glue


@pytest.mark.thorough
def test_the_command_line(tmp_path, monkeypatch, capsys):
    settings = SMALL["sst2"].settings | {"per_device_train_batch_size": 10, "max_steps": 3}
    monkeypatch.setitem(SMALL, "sst2", dataclasses.replace(SMALL["sst2"], settings=settings))
    monkeypatch.setattr("scripts.studies.texts.apart", lambda count, held_out: (range(20, 60), range(20)))
    (tmp_path / "glue").mkdir()
    write_glue(tmp_path / "glue" / "sst2", "sst2", train=60)
    encoder, output = write_bert(tmp_path / "bert", num_hidden_layers=3), tmp_path / "h.jsonl"
    more = ["--rates", "0.01", "--seeds", "0", f"--cache_dir={tmp_path / 'out'}", f"--output={output}"]
    head_first.main([f"--data_dir={tmp_path}", f"--encoder={encoder}", *more])
    assert [json.loads(line)["head"] for line in output.read_text().splitlines()] == ["new", "fitted"]
    assert "sst2, fitted head, 0.01, seed 0" in capsys.readouterr().out
