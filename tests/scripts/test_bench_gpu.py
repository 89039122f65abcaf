"""`make gpu` without a GPU: every row at tiny shapes, what is missing said in one line, and no row measured twice."""

import json
from collections import Counter

import pytest
import torch

from scripts.bench import gpu, gpu_page
from scripts.bench.gpu import main


@pytest.fixture
def here(monkeypatch):
    """Rows are measured in this process, and nothing is compiled."""
    monkeypatch.setattr(gpu, "in_fresh_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(gpu, "KINDS", {name: kind for name, kind in gpu.KINDS.items() if not kind["compiled"]})


def flags(folder, *more):
    common = [
        "--device=cpu",
        "--scale=tiny",
        "--pairs=2",
        "--threads=1",
        f"--results={folder}/new/gpu.jsonl",
        f"--page={folder}/gpu.md",
    ]
    return [*common, *more]


def lines(folder):
    return [json.loads(line) for line in (folder / "new" / "gpu.jsonl").read_text().splitlines()]


ALL_BUT_TESTS = f"--works={','.join(gpu.WORKS[1:])}"


@pytest.mark.usefixtures("here")
def test_every_row_is_measured_once_and_stands_on_the_page(tmp_path, capsys):
    main(flags(tmp_path, ALL_BUT_TESTS, "--models=roberta-base-lora"))
    rows = lines(tmp_path)
    assert Counter(row["row"].split("/")[0] for row in rows) == {
        **{"pass": 1, "step": 1, "memory": 6, "noise": 4, "optimizer": 3}
    }
    assert not any("error" in row for row in rows)
    by_name = {row["row"]: row for row in rows}
    page = (tmp_path / "gpu.md").read_text()
    step = by_name["step/roberta-base-lora"]
    assert step["second_s"] > 0
    assert f"| roberta-base-lora | {gpu_page.ratio(step)} | {gpu_page.milliseconds(step)} |" in page
    assert f"| csprng ahead | {gpu_page.ratio(by_name['noise/csprng ahead'])} | " in page
    assert "It says nothing of a GPU" in page
    assert "Marked `gpu`: not run." in page
    main(flags(tmp_path, ALL_BUT_TESTS, "--models=roberta-base-lora"))
    assert lines(tmp_path) == rows
    assert "step/roberta-base-lora: kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("built_for", "said"), [(None, "built without CUDA. Install a build of torch"), ("13.0", "a driver for CUDA 13.0.")]
)
def test_without_a_device_one_line_says_what_is_missing(tmp_path, monkeypatch, built_for, said):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^error: The machine must have a CUDA device, got .*--scale tiny\.$") as ended:
        main([f"--results={tmp_path / 'rows'}"])
    assert said in str(ended.value)
    assert not list(tmp_path.iterdir())
