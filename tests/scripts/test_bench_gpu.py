"""`make gpu` without a GPU: every row at tiny shapes, what is missing said in one line, and no row measured twice."""

import json
import warnings
from collections import Counter

import pytest
import torch

from scripts.bench import engine, gpu, gpu_page
from scripts.bench.gpu import main


@pytest.fixture
def here(monkeypatch):
    """Rows are measured in this process."""
    monkeypatch.setattr(gpu, "in_fresh_process", lambda function, *arguments: function(*arguments))


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


OPACUS_HOOKS = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # of torch, at the first layer
ALL_BUT_TESTS = f"--works={','.join(gpu.WORKS[1:])}"


@pytest.mark.usefixtures("here")
@OPACUS_HOOKS
def test_every_row_is_measured_once_and_stands_on_the_page(tmp_path, capsys):
    main(flags(tmp_path, ALL_BUT_TESTS, "--models=roberta-base-lora"))
    rows = lines(tmp_path)
    assert Counter(row["row"].split("/")[0] for row in rows) == {
        **{"pass": 1, "peer": 2, "step": 1, "waits": 1, "memory": 9, "noise": 3, "optimizer": 4}
    }
    assert not any("error" in row for row in rows)
    by_name = {row["row"]: row for row in rows}
    page = (tmp_path / "gpu.md").read_text()
    step = by_name["step/roberta-base-lora"]
    assert step["second_s"] > 0
    assert step["examples"] == 4
    rates = f"{4 / step['first_s']:,.1f} → {4 / step['second_s']:,.1f}"
    assert f"| roberta-base-lora | {gpu_page.ratio(step)} | {rates} | 0 → 0 |" in page
    for way in ("GradSampleModule", "ghost clipping"):
        peer, memory = by_name[f"peer/roberta-base-lora {way}"], by_name[f"memory/roberta-base-lora {way}"]
        assert peer["first_s"] == peer["ours"]["first_s"]
        assert peer["second_s"] != peer["ours"]["second_s"]
        both = f"{gpu_page.ratio(peer)} | {gpu_page.ratio(peer['ours'])} | {gpu_page.examples(peer)}"
        assert f"| roberta-base-lora {way} | {both} | {gpu_page.mib(memory)} |" in page
    assert f"| white safe | {gpu_page.ratio(by_name['noise/white safe'])} | " in page
    assert "It says nothing of a GPU" in page
    assert "Marked `gpu`: not run." in page
    main(flags(tmp_path, ALL_BUT_TESTS, "--models=roberta-base-lora"))
    assert lines(tmp_path) == rows
    assert "step/roberta-base-lora: kept" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
@OPACUS_HOOKS
def test_every_preset_runs_and_what_opacus_refuses_is_no_failure(tmp_path, capsys):
    main(flags(tmp_path, "--works=peer,waits", "--pairs=1"))
    found = {row["row"]: row for row in lines(tmp_path)}
    assert len(found) == len(engine.LARGE_WORKS) * 3
    refused = [name for name, row in found.items() if "unsupported" in row]
    assert refused == ["peer/gpt2 ghost clipping"]
    assert "gpt2 ghost clipping: not supported (Parameter tying" in capsys.readouterr().out


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
    assert gpu_page.waits({"plain": [], "private": [place, again]}) == f"0 → 2 (`{place}`)"


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
