"""Fill the table of the paper's own regime, one cell after another, for as long as there is time.

Every cell that ends is a line of the results file. A cell that was interrupted continues from its last tenth. Two processes
may not fill the same file at once.

  python -m scripts.reproduce paper-regime --data-dir DATA --minutes 600
  python -m scripts.reproduce paper-regime --data-dir DATA --curvature
  python -m scripts.reproduce paper-regime --page
"""

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from doppler_hf.errors import Refusal
from scripts.regime.cells import train_cell
from scripts.regime.curvature import cells_to_measure, measured
from scripts.regime.page import write_page
from scripts.regime.results import Results
from scripts.regime.runs_page import write_runs_page
from scripts.regime.search import lines_of, next_cell
from scripts.regime.tasks import TASKS, Loaded, load
from scripts.studies.data import digest_of
from scripts.studies.runs import say

RESULTS = Path("recipes/results/paper-regime.jsonl")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce paper-regime", allow_abbrev=False, description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data-dir", metavar="DIR", help="mnist/ and cifar10/ as parquet files; default: the hub")
    usual = [name for name, task in TASKS.items() if not task.is_left_out]
    tasks = f"some of {', '.join(TASKS)}; default: {', '.join(usual)}"
    add("--tasks", nargs="+", choices=[*TASKS], default=usual, metavar="TASK", help=tasks)
    add("--minutes", type=float, metavar="M", help="begin no cell after so many minutes; default: no limit")
    add("--jobs", type=int, metavar="N", help="train at most so many cells; default: no limit")
    add("--results", type=Path, default=RESULTS, metavar="FILE", help="default: %(default)s")
    add("--out", type=Path, default=Path("out/regime"), metavar="DIR", help="for images and the lock; default: %(default)s")
    add("--page", action="store_true", help="train nothing, but write the page of the results that there are")
    add("--curvature", action="store_true", help="train SGD's runs of the best rates again, to measure their curvature")
    return parser.parse_args(argv)


def run(argv: Sequence[str] | None = None) -> int:
    """Train what is missing for as long as there is time, and write the page."""
    args = parsed(argv)
    if (args.minutes is not None and not args.minutes > 0) or (args.jobs is not None and args.jobs < 1):
        raise Refusal(
            "out-of-range",
            f"--minutes and --jobs must be positive, got {args.minutes} and {args.jobs}. Leave them out for all.",
        )
    if args.page:
        rewrite_page(args, Results(args.results))
        return 0
    for name in args.tasks if args.data_dir is not None else ():
        if not Path(args.data_dir, TASKS[name].source).is_dir():
            raise Refusal(
                "data-missing", f"--data-dir must have {TASKS[name].source}, got {args.data_dir} without it. Add it."
            )
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(args.out / "regime.lock", timeout=0):
            measure(args) if args.curvature else fill(args)
    except Timeout:
        raise Refusal(
            "results-in-use", f"{args.out} is in use by another process. Give another --out and --results, or wait."
        ) from None
    return 0


def fill(args: argparse.Namespace) -> None:
    """Train one cell after another, always of the task that had the least of its share of the time."""
    results, begun, trained = Results(args.results), time.perf_counter(), 0
    loaded: dict[str, Loaded] = {}
    waiting = list(args.tasks)

    def due(name: str) -> float:
        return results.seconds(name) / TASKS[name].weight + TASKS[name].later

    while waiting and (args.jobs is None or trained < args.jobs):
        if args.minutes is not None and time.perf_counter() - begun > 60 * args.minutes:
            return
        name = min(waiting, key=due)
        found = next_cell(name, lines_of(name), results)
        if found is None:
            waiting.remove(name)
            continue
        cell, hopeless = found
        if name not in loaded:
            loaded[name] = load(TASKS[name], data_dir=args.data_dir, cache_dir=args.out)
        say(f"{time.strftime('%H:%M:%S')} {cell}")
        folder = args.out / "unfinished" / digest_of(repr(cell))
        row = results.add(cell, functools.partial(train_cell, data=loaded[name], folder=folder, hopeless=hopeless))
        shutil.rmtree(folder)
        trained += 1
        say(f"  {row['curve']}, {row['seconds']:.0f} s" + (", stopped early" if row["stopped_at"] else ""))
        rewrite_page(args, results)


def measure(args: argparse.Namespace) -> None:
    """Measure the curvature of runs with the best rates, one after another, a line of a file of its own for each."""
    results, curvatures, begun = Results(args.results), curvatures_of(args.results), time.perf_counter()
    for name in args.tasks:
        missing = [cell for cell in cells_to_measure(name, results) if curvatures.get(cell) is None]
        data = load(TASKS[name], data_dir=args.data_dir, cache_dir=args.out) if missing else None
        for cell in missing:
            if args.minutes is not None and time.perf_counter() - begun > 60 * args.minutes:
                return
            assert data is not None
            folder = args.out / "curvature"
            shutil.rmtree(folder, ignore_errors=True)  # an interrupted run begins again
            row = curvatures.add(cell, functools.partial(measured, data=data, folder=folder))
            shutil.rmtree(folder)
            say(f"{cell}: {row['largest_eigenvalue']}")
            rewrite_page(args, results)


def curvatures_of(results: Path) -> Results:
    """Return the measured curvatures, whose file is beside that of the results."""
    return Results(results.with_name(f"{results.stem}-curvature.jsonl"))


def rewrite_page(args: argparse.Namespace, results: Results) -> None:
    """Write the pages beside the results."""
    measured_rows = [row for name in TASKS for row in curvatures_of(args.results).rows(name)]
    write_page(results, args.results.with_suffix(".md"), curvatures=measured_rows)
    write_runs_page(results, args.results.with_name(f"{args.results.stem}-runs.md"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return 0, 2 for arguments that cannot be carried out, or 130 for an interruption."""
    try:
        return run(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last tenth of the training that was saved", file=sys.stderr)
        return 130
