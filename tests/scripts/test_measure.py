"""The benchmarks' own instruments."""

import json
import os

import pytest
import torch

from scripts.bench.measure import (
    WARM_UP,
    append_json_line,
    in_fresh_process,
    memory_now,
    memory_peak,
    seconds_in_turn,
)


def test_pairs_are_made_in_turn_after_warming_up():
    made = []
    seconds = seconds_in_turn(lambda: made.append("one"), lambda: made.append("other"), pairs=3, device="cpu")
    assert seconds.shape == (3, 2)
    assert made == ["one", "other"] * (WARM_UP + 3)


def process_and_memory():
    held = torch.ones(2**20)
    return os.getpid() if held.any() and memory_peak("cpu") >= memory_now("cpu") else 0


@pytest.mark.slow
def test_a_fresh_process_is_another_one():
    assert in_fresh_process(process_and_memory) not in (0, os.getpid())


def test_results_are_appended(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    for number in range(2):
        append_json_line({"number": number}, str(path))
    append_json_line({"number": 2}, None)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1]
