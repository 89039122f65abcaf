"""The table and picture of the README: the best rate without privacy is chosen by seeds that are not reported."""

import json

from scripts.experiments import accuracy


def test_table_picture_and_log(tmp_path, monkeypatch, capsys):
    def train(run, *, data):
        return {"report": 0.8 + run.epsilon / 100 + run.seed / 1000, "tuning": 0.0, "first_rate": 1.0}

    def without_privacy(run, *, data):
        return {"report": 100 * run.learning_rate, "tuning": -abs(run.learning_rate - 1e-3), "first_rate": run.learning_rate}

    monkeypatch.setattr(accuracy, "TASKS", {"digits": "Digits"})
    monkeypatch.setattr(accuracy, "train", train)
    monkeypatch.setattr(accuracy, "train_without_privacy", without_privacy)
    accuracy.main(["--tasks", "digits", "--seeds", "3", f"--out={tmp_path}", f"--picture={tmp_path / 'a.png'}"])
    assert "| Digits | 3 | 83.1 ± 0.1 | 83.1 ± 0.1 | 10.0 ± 0.0 |" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 10_000
    seeds = [json.loads(line)["seed"] for line in (tmp_path / "plain.jsonl").read_text().splitlines()]
    assert seeds == [100, 101] * 3 + [0, 1, 2]
