"""Run a study: which method trains best at equal ε?

Every method is tuned on the same grid, on data that are not reported. Every run is a line of OUT/NAME/runs.jsonl, written as
it ends; with --resume those that it holds are not run again. The tables are printed, the progress goes to standard error.

  python -m scripts.reproduce noise-shaping > tables.md
  python -m scripts.reproduce noise-shaping --tasks sst2 --epsilons 3 --data-dir DATA --encoder MODEL --resume

`paper-regime` is another kind of study, with arguments of its own: see python -m scripts.reproduce paper-regime --help.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from doppler_hf.errors import Refusal
from scripts.regime import command as regime
from scripts.studies.data import Sources
from scripts.studies.studies import STUDIES, fits
from scripts.studies.tasks import TASKS
from scripts.studies.texts import check_encoder
from scripts.studies.tuning import Seeds, run_study

# The first seed of those that choose; those that are reported are below it.
FIRST_TUNING_SEED = 100


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reproduce", allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("study", metavar="NAME", choices=STUDIES, help=f"the study: {', '.join(STUDIES)}")
    add("--scale", choices=[*TASKS], default="small", help="tasks for two cores, or the paper's from scratch, for a GPU")
    add("--resume", action="store_true", help="continue the runs that OUT/NAME holds")
    add("--tasks", nargs="+", metavar="TASK", help="some of the study's tasks")
    add("--methods", nargs="+", metavar="METHOD", help="some of its methods; the first is compared with")
    add("--epsilons", nargs="+", type=float, metavar="ε", help="other budgets than the study's")
    add("--tune-seeds", type=int, default=3, metavar="S", help="how many choose (default: %(default)s)")
    add("--seeds", type=int, default=5, metavar="S", help="how many are reported (default: %(default)s)")
    add("--data-dir", metavar="DIR", help="mnist/, cifar10/, cifar100/ and glue/TASK/ as parquet; default: the hub")
    encoder = "hub name or folder of a BERT-like encoder for the texts (default: %(default)s)"
    add("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", metavar="MODEL", help=encoder)
    add("--bf16", action="store_true", help="train in mixed precision: faster on a GPU, and on CPUs with AVX512-BF16 or AMX")
    add("--out", type=Path, default=Path("out/reproduce"), metavar="OUT", help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study, and return 0, 2 for arguments that cannot be carried out, or 130 for an interruption."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["paper-regime"]:
        return regime.main(argv[1:])
    try:
        return run(parsed(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Run what is missing, and print the tables."""
    if args.tune_seeds < 1 or not 2 <= args.seeds <= FIRST_TUNING_SEED:
        raise Refusal(
            "out-of-range",
            f"--tune-seeds must be 1 or more and --seeds 2 to {FIRST_TUNING_SEED}, got {args.tune_seeds} and {args.seeds}. "
            "Of one run there is no standard error.",
        )
    study = STUDIES[args.study]
    names = study.tasks if args.scale == "small" else study.full_tasks
    if not names:
        raise Refusal(
            "no-tasks-of-that-scale",
            f"--scale must be small for {args.study}, got {args.scale}. It has no tasks of that scale.",
        )
    tasks = _some("--tasks", args.tasks, {name: TASKS[args.scale][name] for name in names})
    study = dataclasses.replace(
        study,
        methods=_some("--methods", args.methods, study.methods),
        epsilons=tuple(dict.fromkeys(args.epsilons or study.epsilons)),
    )
    if args.bf16:
        tasks = {name: dataclasses.replace(task, settings={**task.settings, "bf16": True}) for name, task in tasks.items()}
    for epsilon in study.epsilons:
        if not 0 < epsilon < math.inf:
            raise Refusal(
                "out-of-range", f"--epsilons must be positive numbers, got {epsilon:g}. Give budgets such as 1 3 8."
            )
    for name, task in tasks.items():  # or it would be found when that task begins, hours later
        folder = task.load.folder
        if args.data_dir is not None and folder is not None and not Path(args.data_dir, folder).is_dir():
            raise Refusal(
                "data-missing", f"--data-dir must have {folder} for the task {name}, got {args.data_dir} without it. Add it."
            )
        if task.is_pretrained:
            check_encoder(args.encoder)
        for label, method in study.methods.items() if args.methods else ():
            if not fits(method, task):
                raise Refusal(
                    "methods-without-network",
                    f"--methods must fit all --tasks, got {label!r}, which trains a part of a pretrained network, for "
                    f"{name}, which has none. Leave one of the two out.",
                )
    out = args.out / args.study
    finished = out / "runs.jsonl"
    if finished.exists() and finished.stat().st_size and not args.resume:
        raise Refusal("results-exist", f"{out} holds runs already. Add --resume to continue them, or give another --out.")
    out.mkdir(parents=True, exist_ok=True)
    seeds = Seeds(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + args.tune_seeds), range(args.seeds))
    try:
        with FileLock(out / "runs.lock", timeout=0):
            print(f"# {study.question}\n", flush=True)
            for table in run_study(study, out / "runs.jsonl", tasks, Sources(args.data_dir, args.encoder, args.out), seeds):
                print(table, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; --resume continues the runs that {out} holds", file=sys.stderr)
        return 130
    except Timeout:
        raise Refusal(
            "results-in-use", f"{out} is being written to by another study. Give another --out, or wait for it."
        ) from None
    return 0


def _some(flag: str, names: Sequence[str] | None, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of these names in their order, or all of them for None."""
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise Refusal("unknown-value", f"{flag} must be of {'; '.join(known)}, got {unknown[0]!r}.")
    return {name: known[name] for name in names or known}


if __name__ == "__main__":
    sys.exit(main())
