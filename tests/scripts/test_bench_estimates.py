"""The benchmark of estimates sets what is estimated beside what a training took."""

import dataclasses
import json

import pytest

from scripts.bench import estimates


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_estimate_and_training_are_of_the_same_setting(processes, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(estimates, "in_child", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(estimates, "memory_now", lambda device: 0)  # the tests before this one have left memory to take
    monkeypatch.setitem(estimates.POINTS, "tiny", dataclasses.replace(estimates.TINY["bert"], processes=processes))
    path = tmp_path / "estimates.jsonl"
    estimates.main(["--points=tiny", "--steps=1", f"--results={path}"])
    found = json.loads(path.read_text())
    assert min(found[name] for name in ("seconds", "real_seconds", "bytes")) > 0
    assert f"tiny               step {found['seconds']:7.3f} s of {found['real_seconds']:7.3f} s" in capfd.readouterr().out
