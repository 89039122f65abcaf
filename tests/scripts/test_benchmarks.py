"""Every benchmark runs from its command line at a tiny size, appends what it measured, and measures what it says."""

import json
import math

import pytest

from scripts.bench import engine, estimates, micro_batches, noise, optimizer, rounding, small_networks
from tests.support.tiers import thorough

TINY = ["--scale=tiny", "--pairs=2", "--threads=1"]
# Module → command line, the flag of the file, and how many lines.
RUNS = {
    engine: ([*TINY, "--works=vit-full", "--engines=book_keeping", "--norm_rule=ghost"], "output", 1),
    estimates: (["--points=tiny", "--steps=1"], "results", 1),
    micro_batches: (["--texts=12", "--tokens=64,128", "--widths=16,32", "--layers=1", "--repetitions=1"], "output", 2),
    noise: (["--count=70000", "--pairs=2", "--threads=1", "--tensors=3"], "results", len(noise.WAYS)),
    optimizer: ([*TINY, "--works=galore"], "output", 1),
    rounding: (["--scale=tiny", "--groups=layers,padding", "--lengths=8", "--seeds=1"], "output", 14 * 2 + 5 * 2 * 3),
    small_networks: (["--steps=2", "--pairs=1", "--batch_size=20"], "output", 1),
}


@pytest.fixture
def here(monkeypatch):
    """Memory is measured in processes of their own, which take their time: not here."""
    for module in (engine, optimizer):
        monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: 1.0 + abs(function(*arguments)))
    monkeypatch.setattr(estimates, "in_child", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(estimates, "memory_now", lambda device: 0)  # the tests before this one have left memory to take
    monkeypatch.setitem(estimates.POINTS, "tiny", estimates.TINY["bert"])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "module",
    [engine, estimates, micro_batches, noise, optimizer, *thorough(rounding, small_networks)],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
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


def test_unknown_names_end_in_one_line():
    for module in (engine, optimizer):
        with pytest.raises(SystemExit, match=r"^error: --works must be of .* got 'bert'"):
            module.main([*TINY, "--works=bert"])
