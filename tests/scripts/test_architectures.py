"""The survey of architectures tells what trains from what is refused, and holds a refusal against plain autograd."""

import json
from pathlib import Path

import pytest

import doppler_hf
from scripts.experiments import architectures


def surveyed(tmp_path, *names):
    """Survey the models, and return their lines by name."""
    output = tmp_path / "out.jsonl"
    architectures.main([f"--output={output}", "--models", *names])
    return {line["model"]: line for line in map(json.loads, output.read_text().splitlines())}


@pytest.mark.slow
def test_one_model_trains_and_another_is_refused_truly(tmp_path, monkeypatch, capsys):
    names = ("BertForSequenceClassification", "FNetForMaskedLM")
    lines = surveyed(tmp_path, *names)
    assert {name: architectures.verdict(line) for name, line in lines.items()} == {
        names[0]: "trained",
        names[1]: "refused truly",
    }
    assert max(lines[names[0]]["truth"]["by"].values()) < 1e-12
    by = lines[names[1]]["truth"]["by"]
    assert by["padded"] > 0.1 > 1e-12 > by["beside"]
    printed = capsys.readouterr().out
    assert "| trained | 1 | 0 | 1 |" in printed
    assert "| refused truly | 0 | 1 | 1 |" in printed

    # What the file holds is not run again, and counts.
    monkeypatch.setattr(architectures, "in_own_process", lambda name, timeout: pytest.fail(f"{name} was done already"))
    assert surveyed(tmp_path, *names) == lines
    assert capsys.readouterr().out.strip() == printed[printed.index("| |") :].strip()


def test_an_unknown_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^error: --models must be of .*, got 'BertModel'\."):
        surveyed(tmp_path, "BertModel")


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        (Path(doppler_hf.__file__).with_name("trainer.py"), True),
        ("/clones/doppler_hf/.venv/lib/transformers/trainer.py", False),
    ],
)
def test_an_error_is_ours_by_its_module_and_not_by_the_folder_of_the_clone(file, ours):
    with pytest.raises(ValueError, match="no") as raised:
        exec(compile("raise ValueError('no')", file, "exec"))
    assert architectures.is_ours(raised.value) == ours
