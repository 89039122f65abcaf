"""All that a CUDA device is needed for, in fifteen minutes: `make gpu`. It leaves a page, and the figures in lines of JSON.

    PYTHONPATH=. python -m scripts.bench.gpu
    PYTHONPATH=. python -m scripts.bench.gpu --works pass,peer --models roberta-base
    PYTHONPATH=. python -m scripts.bench.gpu --device cpu --scale tiny --results out/try.jsonl --page out/try.md

It needs the packages of pyproject.toml, in whatever Python it is called with; nothing is installed or downloaded, and models
and data are random. First come the tests that need a device, and trainings of other tests there. Then private passes against
plain ones, the release of a step, the optimizer's step, and whole runs against Transformers' `Trainer`; `peer` (passes of
Opacus) is left out unless named. Each row is measured in a process of its own, with a limit of time, so that one that
hangs, crashes or runs out of memory leaves the others as they are. An interrupted run continues with the rows that are
missing or have failed; rows of another device, commit, version or setting do not count. The exit status is 1 if a test or
a row has failed; being out of memory is a result, as is a model that Opacus does not support.
"""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import default_data_collator

from doppler_hf.errors import Failure, Refusal
from doppler_hf.filters import PAPER_FILTERS
from scripts.bench import engine, gpu_page, noise, optimizer, training
from scripts.bench.measure import (
    added_mib,
    append_json_line,
    chosen,
    in_fresh_process,
    kernels_of,
    quartiles,
    seconds_in_turn,
    seconds_of,
)
from scripts.training.arguments import one_line_errors, parse_args

ROOT = Path(__file__).parents[2]
# Seconds for each row of a work. Those of all rows but `peer` are fifteen minutes; most take a third of theirs.
LIMITS = {"tests": 120, "pass": 50, "release": 40, "optimizer": 60, "run": 100, "peer": 60}
WORKS = tuple(LIMITS)
MODELS = ("roberta-base", "roberta-base-lora", "gpt2", "vit-base", "llama-1b-lora", "roberta-large")
RUNS = {"roberta-base": (128, 8), "roberta-base-lora": (128, 16)}  # examples of a forward pass, and passes of a step
RUN_STEPS = 4  # that are timed
# Trainings of theirs run on the device, the most telling first.
TELLING = "end_to_end/test_trainer.py,run/test_private_run.py,preflight/test_examples.py,end_to_end/test_sft.py"
COORDINATES = {"full": (125_000_000, 200), "tiny": (1_000, 2)}  # and the tensors into which they are divided
# As a training has it: the default's filter, on weights of that many coordinates.
OPTIMIZER = {"low_pass_filter": PAPER_FILTERS["momentum"], "base": "adam_bc", "noise_std": 1e-4}
PRIVATE = gpu_page.PRIVATE
Row = dict[str, Any]


@dataclass
class GpuArguments:
    """What is measured, and on what."""

    works: str = field(default=",".join(WORKS[:-1]), metadata={"help": f"Of {', '.join(WORKS)}; comma separated."})
    models: str = field(default=",".join(MODELS), metadata={"help": "Works of engine.py for the passes, comma separated."})
    device: str = field(default="cuda", metadata={"help": "cuda, or cpu to try out the script.", "choices": ["cuda", "cpu"]})
    scale: str = field(default="full", metadata={"help": "tiny tries out the script.", "choices": ["full", "tiny"]})
    pairs: int = field(default=30, metadata={"help": "How many pairs of steps."})
    threads: int = field(default=2, metadata={"help": "torch's threads on the CPU."})
    tests: str = field(default="tests", metadata={"help": "Folder of the tests, of which those marked gpu are run."})
    trainings: str = field(
        default=TELLING, metadata={"help": "Its files of which all tests are run there, comma separated."}
    )
    results: str = field(default="out/gpu.jsonl", metadata={"help": "File to which every row is added as a line of JSON."})
    page: str = field(default="out/gpu.md", metadata={"help": "The page that is written from the rows."})


def refuse_no_device(args: GpuArguments) -> None:
    """Refuse CUDA where there is none.

    Raises:
        ValueError: If there is none, with what is missing.
    """
    if args.device == "cpu" or torch.cuda.is_available():
        return
    missing = (
        f"torch {torch.__version__}, which was built without CUDA. Install a build of torch with it"
        if torch.version.cuda is None
        else f"none that torch {torch.__version__} can use. Look whether nvidia-smi lists one, with a driver for CUDA "
        f"{torch.version.cuda}"
    )
    raise Refusal(
        "no-gpu",
        f"The machine must have a CUDA device, got {missing}. To try the script without one: python -m scripts.bench.gpu "
        "--device cpu --scale tiny.",
    )


def environment(args: GpuArguments) -> Row:
    """Return on what is measured, and how: rows of another environment are none of this page."""
    found: Row = {"device": "cpu", "memory_mib": 0, "driver": "none"}
    if args.device == "cuda":
        properties = torch.cuda.get_device_properties()
        found = {"device": properties.name, "memory_mib": properties.total_memory // 2**20}
        found["driver"] = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    commit = said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")
    return found | versions | {"commit": commit, "scale": args.scale, "pairs": args.pairs}


def said_by(*command: str) -> str:
    """Return what a command prints, or "unknown" if there is none or it fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def measurements(args: GpuArguments) -> dict[str, Callable[[], Row]]:
    """Return what measures each row, by its name "work/of what"."""
    common = {"device": args.device, "threads": args.threads}
    settings = engine.BenchArguments(precision="bf16", pairs=args.pairs, scale=args.scale, **common)
    count, tensors = COORDINATES[args.scale]
    of_noise = noise.BenchArguments(count=count, tensors=tensors, pairs=args.pairs, **common)
    of_optimizer = optimizer.BenchArguments(pairs=args.pairs, scale="large" if args.scale == "full" else "tiny", **common)
    found: dict[str, Callable[[], Row]] = {
        "tests/gpu": functools.partial(outcome_of_tests, marked(ROOT / args.tests), "gpu"),
        "tests/trainings": functools.partial(
            outcome_of_tests, files(args), "not slow and not gpu and not thorough", device=args.device
        ),
    }
    for name in args.models.split(","):
        found[f"pass/{name}"] = functools.partial(passes, work_of(name, args), settings)
    found["release/white"] = functools.partial(releases, of_noise)
    found["optimizer/momentum"] = functools.partial(optimizers, of_optimizer)
    for name, of_full in RUNS.items():
        batch, accumulation = of_full if args.scale == "full" else (4, 2)
        of_run = training.BenchArguments("", "", batch_size=batch, accumulation=accumulation, bf16=True, **common)
        found[f"run/{name}"] = functools.partial(whole_runs, work_of(name, args), of_run)
    for name, peer in itertools.product(args.models.split(","), engine.PEERS):
        found[f"peer/{name} {peer}"] = functools.partial(peers, work_of(name, args), peer, settings)
    return found


def work_of(name: str, args: GpuArguments) -> engine.Work:
    """Return a work of the benchmarks, of the scale that is asked for."""
    return replace(engine.ALL_WORKS[name], **engine.TINY) if args.scale == "tiny" else engine.ALL_WORKS[name]


def compared(plain: Callable[[], Any], ours: Callable[[], Any], *, pairs: int, device: str) -> Row:
    """Return of a plain step and one of ours the times in turn, the kernels, how long they are busy, memory and waits."""
    row = of_times(seconds_in_turn(plain, ours, pairs=pairs, device=device))
    kernels = [kernels_of(step, device=device) for step in (plain, ours)]
    row |= {"kernels": [count for count, _ in kernels], "busy_s": [busy for _, busy in kernels]}
    row["mib"] = [added_mib(step, device=device) for step in (plain, ours)]
    return row | {"waits": [waits_of(step, device=device) for step in (plain, ours)]}


def passes(work: engine.Work, settings: engine.BenchArguments) -> Row:
    """Compare a private forward and backward pass with a plain one."""
    with engine.steps_of(work, [PRIVATE], settings) as steps:
        return compared(*steps, pairs=settings.pairs, device=settings.device) | {"examples": work.batch}


def peers(work: engine.Work, peer: str, settings: engine.BenchArguments) -> Row:
    """Return the times of passes: of a peer against plain ones, and of ours as `ours`."""
    seconds = engine.paired_seconds(work, [PRIVATE, peer], settings)
    return of_times(seconds[:, [0, -1]]) | {"ours": of_times(seconds[:, :2]), "examples": work.batch}


def releases(settings: noise.BenchArguments) -> Row:
    """Compare the release of a step's sums with torch's normals."""
    return compared(*noise.draws(noise.WAYS["white"], settings), pairs=settings.pairs, device=settings.device)


def optimizers(settings: optimizer.BenchArguments) -> Row:
    """Compare a step of ours with one of fused AdamW, and return how long the first one takes, with what is compiled."""
    plain, ours = (optimizer.step_of(kind, optimizer.parameters(settings)) for kind in (None, OPTIMIZER))
    first = seconds_of(ours, device=settings.device)
    return {"first_step_s": first} | compared(plain, ours, pairs=settings.pairs, device=settings.device)


def whole_runs(work: engine.Work, settings: training.BenchArguments) -> Row:
    """Compare the steps of `DopplerTrainer` with those of `Trainer`, on random texts of one length."""
    size = settings.batch_size * settings.accumulation
    texts = np.random.default_rng(0).integers(5, work.vocabulary, (size * (1 + RUN_STEPS), work.length))
    examples = Dataset.from_dict({"input_ids": texts, "labels": np.arange(len(texts)) % 2})
    runs = [
        training.train(
            engine.build(work, device=settings.device)[0], examples, default_data_collator, settings, private=private
        )
        for private in (False, True)
    ]
    seconds = size * np.array([[run.per_example()[0] for run in runs]])
    return of_times(seconds) | {"examples": size, "first_step_s": [run.first() for run in runs]}


def waits_of(step: Callable[[], None], *, device: str) -> list[str]:
    """Return the file and line of each wait for CUDA of which torch warns; a CPU has none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "called a synchronizing CUDA operation" in str(warning.message)]
    return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in found]


def of_times(seconds: np.ndarray) -> Row:
    """Return the ratio of two columns of times, the second of the first, and the median of both in seconds."""
    q1, ratio, q3 = quartiles(seconds[:, 1] / seconds[:, 0])
    first, second = np.median(seconds, axis=0).tolist()
    return {"ratio": ratio, "ratio_quartiles": [q1, q3], "first_s": first, "second_s": second}


def marked(folder: Path) -> list[str]:
    """Return the files that have tests that need a device; to collect the others would take a minute."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if "@pytest.mark.gpu" in path.read_text()]


def files(args: GpuArguments) -> list[str]:
    """Return the files of which trainings run on the device."""
    return [str(ROOT / args.tests / name) for name in args.trainings.split(",")]


def outcome_of_tests(paths: Sequence[str], marks: str, *, device: str = "cpu") -> Row:
    """Run tests until they or the time end, and return how many passed, which failed, and how many were skipped.

    Raises:
        RuntimeError: If pytest ran none of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", *paths, "-m", marks, "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = os.environ | {"DOPPLER_TEST_DEVICE": device, "PYTHONPATH": str(ROOT)}
        # A job in the background ignores interruptions, and would hand that on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-2, text=True) as tests:
            try:
                said, _ = tests.communicate(timeout=LIMITS["tests"] - 20)
            except subprocess.TimeoutExpired:
                tests.send_signal(signal.SIGINT)  # pytest then reports what it has
                try:
                    said, _ = tests.communicate(timeout=15)
                finally:
                    tests.kill()  # or it would take the device from the next row
        if tests.returncode not in (0, 1, 2) or not report.exists():  # 1: some have failed; 2: interrupted
            last = said.strip().rpartition("\n")[2]
            raise Failure("tests-did-not-run", f"The tests must end with status 0 or 1, got {tests.returncode}: {last}.")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{case.get('classname')}.{case.get('name')}" for case in failed]
    is_interrupted = tests.returncode == 2  # in a case that has not failed yet, and not passed
    passed = len(cases) - len(failed) - len(skipped) - is_interrupted
    return {"passed": passed, "failed": names, "skipped": len(skipped), "interrupted": is_interrupted}


def with_threads(threads: int, measure: Callable[[], Row]) -> Row:
    """Measure with some of torch's threads."""
    torch.set_num_threads(threads)
    return measure()


def measured(measure: Callable[[], Row], *, threads: int, limit_s: float) -> Row:
    """Return a row, or why there is none."""
    try:
        return in_fresh_process(with_threads, threads, measure, limit_s=limit_s)
    except TimeoutError:
        return {"error": f"it takes more than {limit_s:g} s"}
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            return {"out_of_memory": True}
        if isinstance(error, NotImplementedError):  # by Opacus, of models that it does not support
            return {"unsupported": str(error)}
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}


def rows_so_far(path: str, here: Row) -> dict[str, Row]:
    """Return the last row of each name that was measured in this environment and has not failed."""
    if not Path(path).exists():
        return {}
    lines = map(json.loads, Path(path).read_text().splitlines())
    return {line["row"]: line for line in lines if line["environment"] == here and not has_failed(line)}


def has_failed(row: Row) -> bool:
    """Return whether a row or one of its tests has failed."""
    return "error" in row or bool(row.get("failed"))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, and write the page after each row."""
    with one_line_errors():
        (args,) = parse_args(GpuArguments, argv=argv)
        works = chosen("--works", args.works, WORKS)
        chosen("--models", args.models, engine.ALL_WORKS)
        refuse_no_device(args)
    here = environment(args)
    all_of_them = measurements(args)
    rows: dict[str, Row | None] = dict.fromkeys(all_of_them) | rows_so_far(args.results, here)
    wanted = {name: measure for name, measure in all_of_them.items() if name.partition("/")[0] in works}
    for name, measure in wanted.items():
        if rows[name]:
            print(f"{name}: kept", flush=True)
            continue
        row = {
            "row": name,
            **measured(measure, threads=args.threads, limit_s=LIMITS[name.partition("/")[0]]),
            "environment": here,
            "date": time.strftime("%Y-%m-%d"),
        }
        append_json_line(row, args.results)
        rows[name] = row
        print(f"{name}: {gpu_page.in_short(row)}", flush=True)
        write_page(args, here, rows)
    write_page(args, here, rows)
    print(f"The page is {args.page}, and the figures are in {args.results}.")
    if any(has_failed(rows[name]) for name in wanted):
        raise SystemExit(1)


def write_page(args: GpuArguments, here: Row, rows: gpu_page.Rows) -> None:
    """Write the page of the rows so far."""
    Path(args.page).parent.mkdir(parents=True, exist_ok=True)
    Path(args.page).write_text(gpu_page.page(here, rows))


if __name__ == "__main__":
    main()
