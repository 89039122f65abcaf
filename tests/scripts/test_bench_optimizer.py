"""The measurement of the optimizer measures what it says, and runs from its command line."""

import json

import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer, WeightFilter
from scripts.bench import optimizer as bench_optimizer
from scripts.bench.measure import in_fresh_process
from scripts.bench.optimizer import (
    WORKS,
    BenchArguments,
    energy,
    matrices,
    parameters,
    peak_memory,
    step_of,
)

FLAGS = ["--scale=tiny", "--pairs=2", "--threads=1"]
TINY = BenchArguments(scale="tiny", pairs=3, threads=1)


@pytest.fixture
def measured(monkeypatch):
    """What would have been measured in processes of their own."""
    asked = []

    def instead(function, kind, args):
        asked.append((function, kind))
        return 2.0 + len(asked)

    monkeypatch.setattr(bench_optimizer, "in_fresh_process", instead)
    return asked


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_are_printed_and_written(tmp_path, capsys, measured):
    path = tmp_path / "new" / "bench.jsonl"
    bench_optimizer.main([*FLAGS, "--works=galore", f"--output={path}"])
    (result,) = lines(path)
    assert (result["work"], result["device"]) == ("second-order, GaLore", "cpu")
    assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]
    assert min(result["adamw_s"], result["ours_s"]) > 0
    assert (result["adamw_mib"], result["ours_mib"]) == (3.0, 4.0)
    assert measured == [(peak_memory, None), (peak_memory, WORKS["galore"]["second-order, GaLore"])]
    assert result["settings"] == vars(BenchArguments("galore", pairs=2, threads=1, scale="tiny", output=str(path)))
    out = capsys.readouterr().out
    assert f"time ×{result['ratio']:.2f}" in out
    assert "memory ×1.33: 3 → 4 MiB" in out


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    args = BenchArguments(scale="tiny", threads=1)
    state = 8 * sum(p.numel() for p in parameters(args)) / 2**20
    assert state < in_fresh_process(peak_memory, None, args) < state + 100


@pytest.mark.usefixtures("measured")
def test_a_second_run_appends(tmp_path, capsys, monkeypatch):
    uncompiled = {
        work: {name: kind for name, kind in kinds.items() if not kind.get("compiled")} for work, kinds in WORKS.items()
    }
    monkeypatch.setattr(bench_optimizer, "WORKS", uncompiled)
    path = tmp_path / "bench.jsonl"
    bench_optimizer.main([*FLAGS, "--works=filters", f"--output={path}"])
    bench_optimizer.main([*FLAGS, "--works=bfloat16,galore", f"--output={path}"])
    bench_optimizer.main([*FLAGS, "--works=adaptive,weights", f"--output={path}"])
    works = [
        *("second-order", "first-order-v1", "second-order, bf16 state", "second-order, GaLore"),
        *("optimal-fir:taps=4", "optimal-fir:taps=8", "momentum on the weights", "second-order on the weights"),
    ]
    assert [result["work"] for result in lines(path)] == works
    assert [line.split(" time")[0].strip() for line in capsys.readouterr().out.splitlines()] == works


def test_projectors_are_compared_with_the_svd(tmp_path, capsys):
    path = tmp_path / "bench.jsonl"
    bench_optimizer.main([*FLAGS, "--works=projectors", f"--output={path}"])
    results = {result["work"]: result for result in lines(path)}
    assert list(results) == [
        f"projector {projector}, {name}" for name in ("decaying", "noisy") for projector in ("svd", "randomized", "warm")
    ]
    for name, result in results.items():
        least = 1 - 1e-5 if "svd" in name else 0.8 if "decaying" in name else 0.3
        assert least <= result["captured"] <= 1 + 1e-5, name
        assert result["speedup_quartiles"][0] <= result["speedup"] <= result["speedup_quartiles"][1]
        assert result["seconds"] > 0
    assert "captures 1.0000 of it" in capsys.readouterr().out


@pytest.mark.usefixtures("measured")
def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench_optimizer.main([*FLAGS, "--works=galore"])
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_work_ends_in_one_line():
    with pytest.raises(
        SystemExit, match=r"^error: --works must be of filters, bfloat16, galore, adaptive, weights, projectors, got 'adam'"
    ):
        bench_optimizer.main([*FLAGS, "--works=galore,adam"])


def test_the_parameters_are_an_encoders():
    params, again = parameters(TINY), parameters(TINY)
    assert sum(p.numel() for p in params) == 4 * (32 * 32 + 32) + 8 * 32 * 32 + 4 * 32 + 5 * 32
    for p, other in zip(params, again, strict=True):
        assert torch.equal(p, other)
        assert torch.equal(p.grad, other.grad)


def test_the_kinds_are_the_optimizers_that_their_names_say():
    params = parameters(TINY)
    assert type(step_of(None, params).__self__) is torch.optim.AdamW
    for kinds in WORKS.values():
        for name, kind in kinds.items():
            optimizer = step_of(kind, params).__self__
            if "on the weights" in name:
                assert isinstance(optimizer, WeightFilter)
                assert optimizer.low_pass_filter == PAPER_FILTERS[name.split()[0]]
                continue
            assert isinstance(optimizer, DopplerOptimizer)
            assert PAPER_FILTERS.get(name.split(",")[0], name) in (optimizer.low_pass_filter, str(optimizer.low_pass_filter))
            assert optimizer.compiled == ("compiled" in name)
            assert (optimizer.state_dtype == torch.bfloat16) == ("bf16" in name)
            assert (optimizer.defaults["rank"] is not None) == ("GaLore" in name)


def test_the_matrices_have_the_singular_values_and_the_noise_that_are_told():
    decaying, noisy = matrices(TINY).values()
    torch.testing.assert_close(torch.linalg.svdvals(decaying), 1 / torch.arange(1.0, 33.0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((noisy - decaying).norm(), 10 * decaying.norm(), rtol=1e-4, atol=0)
    torch.testing.assert_close(energy(decaying, torch.eye(32)), decaying.square().sum().item(), rtol=1e-4, atol=0)
