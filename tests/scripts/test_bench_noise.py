"""The measurement of the noise runs from its command line, and measures what it says."""

import json

import pytest
import torch

from scripts.bench import noise as bench_noise
from scripts.bench.noise import WAYS, BenchArguments, paired_seconds

FLAGS = ["--count=70000", "--pairs=2", "--threads=1", "--tensors=3"]


def test_results_are_printed_and_appended(tmp_path, capsys):
    path = tmp_path / "new" / "noise.jsonl"
    for _ in range(2):
        bench_noise.main([*FLAGS, f"--results={path}"])
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result["work"] for result in results] == [*WAYS] * 2
    for result in results:
        assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]
        assert min(result["torch_s"], result["ours_s"]) > 0
        assert result["settings"]["count"] == 70_000
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 12
    assert f"csprng         time ×{results[0]['ratio']:.2f}" in out[0]


def test_torchs_normals_and_ours_are_drawn_in_turn(monkeypatch):
    drawn, normal = [], torch.Tensor.normal_

    class Recorder(bench_noise.GaussianMechanism):
        def privatize(self, sums, *, step):
            drawn.append((sum(total.numel() for total in sums.values()), len(sums), self._floating_point_safe))
            return super().privatize(sums, step=step)

    monkeypatch.setattr(bench_noise, "GaussianMechanism", Recorder)
    monkeypatch.setattr(torch.Tensor, "normal_", lambda values: drawn.append(values.numel()) or normal(values))
    args = BenchArguments(count=5000, tensors=2, pairs=3, threads=1)
    assert paired_seconds(WAYS["csprng safe"], args).shape == (3, 2)
    assert drawn == [5000, (5000, 2, True)] * (3 + bench_noise.WARM_UP)


def test_an_unknown_way_ends_in_one_line():
    with pytest.raises(
        SystemExit, match=r"^error: --ways must be of csprng, philox, csprng safe, philox safe, .* got 'mt19937'"
    ):
        bench_noise.main([*FLAGS, "--ways=csprng,mt19937"])
