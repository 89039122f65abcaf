"""The log of all runs of a study, which survives an interruption at any moment."""

import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from doppler_hf.reproduce.runs import Run


@functools.cache
def code_digest(package: Path = Path(__file__).parents[1]) -> str:
    """Return 8 hexadecimal digits for the code of a package: this one, by default."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def say(line: str) -> None:
    """Write a line of progress, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


class Log:
    """The results of all runs of a file, to which missing ones are added.

    Args:
        path: A file of JSON lines, which nobody else writes to.
        train: Makes a run's result.
    """

    def __init__(self, path: Path, train: Callable[[Run], dict[str, Any]]) -> None:
        self._path, self._train = path, train
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            written = file.read()
            end = written.rfind(b"\n") + 1
            file.truncate(end)  # the rest of a line that was cut short
        lines = written[:end].decode().splitlines()
        rows = map(json.loads, lines)
        self._results = {Run(**{each.name: row[each.name] for each in fields(Run)}): row for row in rows}
        if others := sum(row.get("code") != code_digest() for row in self._results.values()):
            say(
                f"{others} of the {len(self)} runs of {path} are of other code, and are not run again. Give another --out "
                "for runs by this code."
            )

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, run: Run) -> dict[str, Any]:
        """Return a run's result. One that is missing is trained, and written as it ends."""
        if run not in self._results:
            start = time.perf_counter()
            self._results[run] = asdict(run) | self._train(run) | {"code": code_digest()}
            with self._path.open("a") as file:
                file.write(json.dumps(self._results[run]) + "\n")
            result = self._results[run]
            say(
                f"  lr {result['first_rate']:.3g}, seed {run.seed}: {100 * result['report']:.2f} % "
                f"({100 * result['tuning']:.2f} % to choose by), {time.perf_counter() - start:.0f} s"
            )
        return self._results[run]
