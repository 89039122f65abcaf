"""`make gpu` without a GPU: every row at tiny shapes, what is missing said in one line, and no row measured twice."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from scripts.bench import gpu, gpu_page
from scripts.bench.gpu import main


@pytest.fixture
def here(monkeypatch):
    """Rows are measured in this process."""
    monkeypatch.setattr(gpu, "in_fresh_process", lambda function, *arguments, limit_s: function(*arguments))


def flags(folder, *more):
    tiny = ["--device=cpu", "--scale=tiny", "--pairs=2", "--threads=1"]
    return [*tiny, f"--results={folder}/new/gpu.jsonl", f"--page={folder}/gpu.md", *more]


def lines(folder):
    return [json.loads(line) for line in (folder / "new" / "gpu.jsonl").read_text().splitlines()]


MEASURED = "--works=pass,release,optimizer,run"


def test_all_takes_fifteen_minutes_at_most():
    works = Counter(name.partition("/")[0] for name in gpu.measurements(gpu.GpuArguments()))
    assert works == {"tests": 2, "pass": 6, "release": 1, "optimizer": 1, "run": 2, "peer": 12}
    assert gpu.GpuArguments().works == "tests,pass,release,optimizer,run"
    assert sum(count * gpu.LIMITS[work] for work, count in works.items() if work != "peer") <= 15 * 60
    assert all(map(Path.exists, map(Path, gpu.files(gpu.GpuArguments()))))


@pytest.mark.usefixtures("here")
def test_every_row_is_measured_once_and_stands_on_the_page(tmp_path, capsys):
    main(flags(tmp_path, MEASURED, "--models=roberta-base-lora"))
    rows = lines(tmp_path)
    assert not any("error" in row for row in rows)
    by_name = {row["row"]: row for row in rows}
    names = ["pass/roberta-base-lora", "release/white", "optimizer/momentum", "run/roberta-base", "run/roberta-base-lora"]
    assert [*by_name] == names
    page = (tmp_path / "gpu.md").read_text()
    of_pass, optimizer = by_name["pass/roberta-base-lora"], by_name["optimizer/momentum"]
    assert min(*of_pass["kernels"], *of_pass["busy_s"], of_pass["second_s"]) > 0
    assert of_pass["kernels"][1] > of_pass["kernels"][0]
    assert f"| roberta-base-lora | {gpu_page.ratio(of_pass)} | {gpu_page.milliseconds(of_pass)} | " in page
    assert f"| optimizer | {gpu_page.ratio(optimizer)} | " in page
    assert optimizer["first_step_s"] > 0
    for name in names[3:]:
        run = by_name[name]
        assert run["examples"] == 8
        assert run["first_step_s"][1] > run["second_s"]
        assert f"| {name[4:]} | {gpu_page.ratio(run)} | " in page
    assert "It says nothing of a GPU" in page
    assert "Marked `gpu`: not run." in page
    assert "Beside Opacus" not in page
    main(flags(tmp_path, MEASURED, "--models=roberta-base-lora"))
    assert lines(tmp_path) == rows
    assert "pass/roberta-base-lora: kept" in capsys.readouterr().out


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
