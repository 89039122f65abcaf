"""The log of all runs of a study, which survives an interruption at any moment."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from doppler_hf.reproduce.runs import Run


class Log:
    """The results of all runs of a file, to which missing ones are added.

    Args:
        path: A file of JSON lines, which is made with the first run.
        train: Makes a run's result.
    """

    def __init__(self, path: Path, train: Callable[[Run], dict[str, Any]]) -> None:
        self._path, self._train = path, train
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and not path.read_text().endswith("\n"):  # killed while it wrote
            lines.pop()
            path.write_text("".join(f"{line}\n" for line in lines))
        rows = map(json.loads, lines)
        self._results = {Run(**{each.name: row[each.name] for each in fields(Run)}): row for row in rows}

    def __getitem__(self, run: Run) -> dict[str, Any]:
        """Return a run's result. One that is missing is trained, and written as it ends."""
        if run not in self._results:
            start = time.perf_counter()
            self._results[run] = asdict(run) | self._train(run)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(self._results[run]) + "\n")
            result = self._results[run]
            print(
                f"  lr {run.learning_rate:g}, seed {run.seed}: {100 * result['report']:.2f} % "
                f"({100 * result['tuning']:.2f} % to choose by), {time.perf_counter() - start:.0f} s",
                flush=True,
            )
        return self._results[run]
