"""The benchmark of estimates sets what is estimated beside what a training took."""

import json

from scripts.bench import estimates


def test_estimate_and_training_are_of_the_same_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(estimates, "in_child", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(estimates, "memory_now", lambda device: 0)  # the tests before this one have left memory to take
    monkeypatch.setitem(estimates.POINTS, "tiny", estimates.TINY)
    path = tmp_path / "estimates.jsonl"
    estimates.main(["--points=tiny", "--steps=1", f"--results={path}"])
    found = json.loads(path.read_text())
    assert min(found[name] for name in ("seconds", "real_seconds", "bytes")) > 0
    assert f"tiny               step {found['seconds']:7.3f} s of {found['real_seconds']:7.3f} s" in capsys.readouterr().out
