"""The benchmarks' own instruments."""

import json

from scripts.bench.measure import WARM_UP, append_json_line, seconds_in_turn


def test_pairs_are_made_in_turn_after_warming_up():
    made = []
    seconds = seconds_in_turn(lambda: made.append("one"), lambda: made.append("other"), pairs=3, device="cpu")
    assert seconds.shape == (3, 2)
    assert made == ["one", "other"] * (WARM_UP + 3)


def test_results_are_appended(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    for number in range(2):
        append_json_line({"number": number}, str(path))
    append_json_line({"number": 2}, None)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1]
