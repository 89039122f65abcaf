"""The file of all cells: a line of JSON for each that has ended, appended as it ends."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.regime.cells import Cell

_NAMES = [each.name for each in dataclasses.fields(Cell)]


class Results:
    """The results of cells in a file of JSON lines, to which one process at a time appends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.read_bytes() if path.exists() else b""
        end = written.rfind(b"\n") + 1
        if end < len(written):  # the rest of a line that was cut short
            with path.open("r+b") as file:
                file.truncate(end)
        rows = [json.loads(line) for line in written[:end].decode().splitlines()]
        self._rows = {cell_of(row): row for row in rows}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._rows)

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return a cell's result, or None if it was not trained yet."""
        return self._rows.get(cell)

    @property
    def date(self) -> str:
        """The date of the last result, or a dash where there is none."""
        return max((row.get("date", "") for row in self._rows.values()), default="–") or "–"

    def rows(self, task: str) -> list[dict[str, Any]]:
        """Return the results of a task."""
        return [row for cell, row in self._rows.items() if cell.task == task]

    def seconds(self, task: str) -> float:
        """Return how long the cells of a task took together."""
        return sum(row["seconds"] for cell, row in self._rows.items() if cell.task == task)

    def add(self, cell: Cell, train: Callable[[Cell], dict[str, Any]]) -> dict[str, Any]:
        """Train a cell, append its result to the file, and return it."""
        row = self._rows[cell] = train(cell)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return row


def cell_of(row: dict[str, Any]) -> Cell:
    """Return the cell of a row; what a row does not have was added to cells later, and is as by default."""
    return Cell(**{name: row[name] for name in _NAMES if name in row})
