"""The benchmark of large data sets measures what it says, on the same rows in the table as computed."""

import json
import math

from datasets import Dataset

from scripts.bench import large_data
from scripts.bench.large_data import Computed, row_of, write_table


def test_every_piece_of_work_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(large_data, "in_child", lambda function, *arguments: function(*arguments))
    works, path = [work for work in large_data.WORKS if not work.startswith("run")], tmp_path / "large.jsonl"
    large_data.main([f"--works={','.join(works)}", "--rows=500", "--batch_size=20", "--steps=2", f"--results={path}"])
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result["work"] for result in results] == works
    assert all(result["start_s"] > 0 and result["bytes"] >= 0 for result in results)
    assert [not math.isnan(result["step_s"]) for result in results] == [work.startswith("draw") for work in works]


def test_the_table_has_the_rows_that_are_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(large_data, "PART", 40)
    write_table(tmp_path / "rows.arrow", 100)
    table, computed = Dataset.from_file(str(tmp_path / "rows.arrow")), Computed(100)
    assert len(computed) == 100
    assert list(table.remove_columns("user")) == [computed[index] for index in range(100)] == [*map(row_of, range(100))]
    assert table["user"][:] == [index // 10 for index in range(100)]
    assert {len(row["input_ids"]) for row in table} == set(range(1, 9))
