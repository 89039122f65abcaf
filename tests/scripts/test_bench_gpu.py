"""`make gpu` without a GPU: every row at tiny shapes, what is missing said in one line, and no row measured twice."""

import functools
import json
import re
import signal
import subprocess
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from scripts.bench import engine, gpu, gpu_page
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


OPACUS_HOOKS = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # of torch, at the first layer
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


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
@OPACUS_HOOKS
def test_every_preset_runs_and_what_opacus_refuses_is_no_failure(tmp_path, capsys):
    main(flags(tmp_path, "--works=pass,peer", "--pairs=1", f"--models={','.join(engine.LARGE_WORKS)}"))
    found = {row["row"]: row for row in lines(tmp_path)}
    assert len(found) == len(engine.LARGE_WORKS) * 3
    refused = [name for name, row in found.items() if "unsupported" in row]
    assert refused == ["peer/gpt2 ghost clipping"]
    assert "gpt2 ghost clipping: not supported (Parameter tying" in capsys.readouterr().out
    peer = found["peer/roberta-base GradSampleModule"]
    assert peer["first_s"] == peer["ours"]["first_s"]
    assert peer["second_s"] != peer["ours"]["second_s"]
    assert f"| {gpu_page.ratio(peer)} | {gpu_page.ratio(peer['ours'])} | " in (tmp_path / "gpu.md").read_text()


OF_TESTS = """
import os, pathlib, time, pytest
def test_where(): assert os.environ["DOPPLER_TEST_DEVICE"] == "cpu"
@pytest.mark.gpu
def test_on_it(): pass
@pytest.mark.gpu
def test_fails(): assert False
def test_takes_long():
    pathlib.Path(__file__).with_name("begun").touch()
    time.sleep(60)
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_tests_are_counted_and_interrupted_when_their_time_is_over(tmp_path, monkeypatch):
    def communicate(tests, input=None, timeout=None, *, own=subprocess.Popen.communicate):
        if timeout is None or "gpu" in tests.args or (tmp_path / "begun").exists():
            return own(tests, input, timeout)
        while not (tmp_path / "begun").exists():
            time.sleep(0.1)
        raise subprocess.TimeoutExpired("pytest", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    (tmp_path / "test_a.py").write_text(OF_TESTS)
    with pytest.raises(SystemExit, match="1"):
        main(flags(tmp_path, "--works=tests", f"--tests={tmp_path}", "--trainings=test_a.py"))
    page = (tmp_path / "gpu.md").read_text()
    assert re.search(r"Marked `gpu`: 1 passed, 1 failed \(`\S*test_a\.test_fails`\), 0 skipped\.", page)
    assert "on the device: 1 passed, 0 failed, 0 skipped, and the time was over." in page


def test_a_row_that_takes_too_long_is_ended():
    row = gpu.measured(functools.partial(time.sleep, 60), threads=1, limit_s=0.5)
    assert row == {"error": "it takes more than 0.5 s"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (dict(second_s=0.0029), "| 3 | 2.9 | **met** |"),
        (dict(second_s=0.006), "| 3 | 6 | **missed**, 2 × |"),
        (dict(error="it takes more than 40 s"), "| 3 | failed (it takes more than 40 s) | – |"),
        (dict(out_of_memory=True), "| 3 | out of memory | – |"),
        (None, "| 3 | not run | – |"),
    ],
)
def test_the_verdict_says_by_how_much_a_figure_is_missed(row, said):
    (wanted,) = (each for each in gpu_page.WANTED if each[:2] == ("ms", "release/white"))
    assert gpu_page.verdict({"release/white": row}, *wanted) == f"| ms | release/white {said}"


def test_waits_are_counted_with_their_places(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step():
        assert modes == ["warn"]
        warnings.warn("something else", stacklevel=1)
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", stacklevel=1)

    (place, again) = gpu.waits_of(step, device="cuda")
    assert place == again
    assert place.startswith("test_bench_gpu.py:")
    assert modes == ["warn", "default"]
    assert gpu_page.waits({"waits": [[], [place, again]]}) == f"0 → 2 (`{place}`)"


@pytest.mark.gpu
def test_torch_warns_of_a_wait():
    number = torch.ones((), device="cuda")
    assert len(gpu.waits_of(lambda: number.item() + number.item(), device="cuda")) == 2
    assert gpu.waits_of(lambda: number + number, device="cuda") == []


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
