"""Nothing is run twice, and nothing that was cut short counts."""

import json

import numpy as np

from doppler_hf.cli import main
from doppler_hf.reproduce import tuning
from doppler_hf.reproduce.log import code_digest
from tests.support.studies import made_up, words


def test_a_run_that_was_killed_while_it_wrote_is_run_again(sources, small, monkeypatch):
    done = []

    def train(run, data):
        done.append(run)
        rate = run.learning_rate or 0.002
        return {"tuning": 1 / (1 + abs(np.log2(rate / 0.004))), "report": 0.5 + run.seed / 10, "first_rate": rate}

    monkeypatch.setattr(tuning, "train", train)
    arguments = words(sources, "--tasks", "mnist", "--methods", "white, none")
    assert main(arguments) == 0
    path = sources.cache_dir / "noise-shaping" / "runs.jsonl"
    whole = path.read_text()
    last = done[-1]
    path.write_text(whole[:-40])
    done.clear()
    assert main([*arguments, "--resume"]) == 0
    assert done == [last]
    assert path.read_text() == whole


def test_runs_of_other_code_are_named(sources, small, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "train", made_up)
    arguments = words(sources, "--tasks", "mnist", "--methods", "white, none")
    assert main(arguments) == 0
    assert main([*arguments, "--resume"]) == 0
    assert "other code" not in capsys.readouterr().err
    path = sources.cache_dir / "noise-shaping" / "runs.jsonl"
    first, *rest = path.read_text().splitlines()
    row = json.loads(first)
    assert row.pop("code") == code_digest()
    for other in (row, row | {"code": "01234567"}):
        path.write_text("\n".join([json.dumps(other), *rest, ""]))
        assert main([*arguments, "--resume"]) == 0
        assert f"1 of the {len(rest) + 1} runs of {path} are of other code, and are not run again. Give another" in (
            capsys.readouterr().err
        )


def test_code_is_known_by_each_of_its_bytes(tmp_path):
    (tmp_path / "inside").mkdir()
    digests = []
    for name, code in (("a.py", "1"), ("a.py", "2"), ("inside/b.py", ""), ("inside/b.py", "3"), ("c.txt", "4")):
        (tmp_path / name).write_text(code)
        digests.append(code_digest.__wrapped__(tmp_path))
    assert len(set(digests)) == 3  # neither an empty file nor another text is code
    assert digests[3] == digests[4]
