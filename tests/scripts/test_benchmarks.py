"""Every benchmark runs from its command line at a tiny size, appends what it measured, and measures what it says."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer, WeightFilter
from scripts.bench import contributions, engine, estimates, large_data, noise, optimizer, processes, small_networks
from tests.support.tolerances import RAISED

SIZES = ["--layers=2", "--hidden=16", "--vocabulary=50", "--length=8", "--batch_size=2", "--steps=2", "--lora_r=2"]
TINY = ["--scale=tiny", "--pairs=2", "--threads=1"]
# Module → command line, the flag of the file, and how many lines.
RUNS = {
    contributions: (["--vocabularies=50,99999", "--lengths=8", "--hidden=32", "--most_logits=1e4"], "output", 2),
    engine: ([*TINY, "--works=vit-full", "--engines=book_keeping", "--norm_rule=ghost"], "output", 1),
    estimates: (["--points=tiny", "--steps=1"], "results", 1),
    large_data: (["--works=draw,draw units", "--rows=500", "--batch_size=20", "--steps=2"], "results", 2),
    noise: (["--count=70000", "--pairs=2", "--threads=1", "--tensors=3"], "results", len(noise.WAYS)),
    optimizer: ([*TINY, "--works=galore,adaptive,weights"], "output", 5),
    processes: (SIZES, "results", 1),
    small_networks: (["--steps=2", "--pairs=1", "--batch_size=20"], "output", 1),
}


@pytest.fixture
def here(monkeypatch):
    """Memory is measured in processes of their own, which take their time: not here."""
    for module in (engine, optimizer):
        monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: 1.0 + abs(function(*arguments)))
    for module in (estimates, large_data):
        monkeypatch.setattr(module, "in_child", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(estimates, "memory_now", lambda device: 0)  # the tests before this one have left memory to take
    monkeypatch.setitem(estimates.POINTS, "tiny", dataclasses.replace(estimates.TINY["bert"], processes=1))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("module", RUNS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_results_are_printed_and_written(module, tmp_path, capfd):
    words, flag, number = RUNS[module]
    path = tmp_path / "new" / "results.jsonl"
    module.main([*words, f"--{flag}={path}"])
    found = lines(path)
    assert len(found) == number
    assert capfd.readouterr().out
    for result in found:
        times = [value for name, value in result.items() if name.endswith(("_s", "seconds", "ratio"))]
        assert all(math.isfinite(value) and value > 0 for value in times), result
        if "ratio_quartiles" in result:
            assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]


def test_unknown_names_and_runs_that_end_too_soon_end_in_one_line():
    for module in (engine, optimizer):
        with pytest.raises(SystemExit, match=r"^error: --works must be of .* got 'bert'"):
            module.main([*TINY, "--works=bert"])
    with pytest.raises(SystemExit, match=r"^error: --steps and --pairs must be .*, got 40, 3 and 44\."):
        small_networks.main(["--planned=44"])


@pytest.mark.parametrize("name", ["book_keeping", "opacus"])
def test_a_private_step_leaves_the_clipped_sum(name):
    model, batch = engine.build(replace(engine.ALL_WORKS["gpt2-lm"], **engine.TINY), device="cpu")
    model.eval()  # without dropout, so that single examples compare
    expected = {parameter: torch.zeros_like(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for row in range(4):
        loss = engine.losses_of(model, {key: value[row : row + 1] for key, value in batch.items()}).sum()
        gradients = torch.autograd.grad(loss, list(expected))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for total, gradient in zip(expected.values(), gradients):
            total += gradient / (norm * RAISED + 0.01)  # automatic clipping to C = 1
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with engine.stepping(name, model, batch, engine.BenchArguments()) as step:
        for _ in range(2):  # nothing stays of the first one
            step()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_the_kinds_are_the_optimizers_that_their_names_say():
    params = optimizer.parameters(optimizer.BenchArguments(scale="tiny", pairs=3, threads=1))
    assert type(optimizer.step_of(None, params).__self__) is torch.optim.AdamW
    for kinds in optimizer.WORKS.values():
        for name, kind in kinds.items():
            made = optimizer.step_of(kind, params).__self__
            if "on the weights" in name:
                assert isinstance(made, WeightFilter)
                assert made.low_pass_filter == PAPER_FILTERS[name.split()[0]]
                continue
            assert isinstance(made, DopplerOptimizer)
            assert PAPER_FILTERS.get(name.split(",")[0], name) in (made.low_pass_filter, str(made.low_pass_filter))
            assert made.compiled == ("compiled" in name)
            assert (made.state_dtype == torch.bfloat16) == ("bf16" in name)
            assert (made.defaults["rank"] is not None) == ("GaLore" in name)


def test_the_table_has_the_rows_that_are_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(large_data, "PART", 40)
    large_data.write_table(tmp_path / "rows.arrow", 100)
    table, computed = Dataset.from_file(str(tmp_path / "rows.arrow")), large_data.Computed(100)
    rows = [computed[index] for index in range(len(computed))]
    assert list(table.remove_columns("user")) == rows == [*map(large_data.row_of, range(100))]
    assert table["user"][:] == [index // 10 for index in range(100)]


@pytest.mark.slow
def test_two_processes_that_share(tmp_path):
    path = tmp_path / "processes.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for flags in ([], ["--shards"], ["--full"], ["--full", "--shards"]):
        done = subprocess.run(
            [*launcher, "-m", "scripts.bench.processes", *SIZES, f"--results={path}", *flags],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    whole, shares, all_trained, shares_of_it = lines(path)
    assert shares["frozen_mib"] == pytest.approx(whole["frozen_mib"] / 2, rel=0.05)
    assert shares["trained_mib"] == whole["trained_mib"]
    assert all_trained["frozen_mib"] == shares_of_it["frozen_mib"] == 0
    for name in ("trained_mib", "states_mib"):
        assert shares_of_it[name] == pytest.approx(all_trained[name] / 2, rel=0.05)
