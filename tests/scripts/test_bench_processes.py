"""The measurement of processes runs from its command line, alone and under a launcher, and measures what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import processes as bench_processes

SIZES = ["--layers=2", "--hidden=16", "--vocabulary=50", "--length=8", "--batch_size=2", "--steps=2", "--lora_r=2"]


def test_one_process(tmp_path, capsys):
    path = tmp_path / "new" / "processes.jsonl"
    bench_processes.main([*SIZES, f"--results={path}"])
    (result,) = map(json.loads, path.read_text().splitlines())
    model = bench_processes.build(bench_processes.BenchArguments(layers=2, hidden=16, vocabulary=50, lora_r=2))
    frozen = sum(value.nbytes for value in model.parameters() if not value.requires_grad)
    assert result["processes"] == 1
    assert result["frozen_mib"] == frozen / 2**20
    assert 0 < result["between_mib"] <= result["peak_mib"] + 1  # Linux counts pages in batches
    assert result["seconds"] > 0
    assert "1 processes, all weights" in capsys.readouterr().out


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
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result["processes"] for result in results] == [2] * 4
    whole, shares, all_trained, shares_of_it = results
    assert shares["frozen_mib"] == pytest.approx(whole["frozen_mib"] / 2, rel=0.05)
    assert shares["trained_mib"] == whole["trained_mib"]
    assert all_trained["frozen_mib"] == shares_of_it["frozen_mib"] == 0
    for name in ("trained_mib", "states_mib"):
        assert shares_of_it[name] == pytest.approx(all_trained[name] / 2, rel=0.05)
