"""All that a CUDA device is needed for, with one command: `make gpu`. It leaves a page, and the figures in lines of JSON.

    python -m scripts.bench.gpu
    python -m scripts.bench.gpu --works step,noise --models roberta-base
    python -m scripts.bench.gpu --device cpu --scale tiny --results out/try.jsonl --page out/try.md

First the tests marked `gpu`; then the time of a private forward and backward pass against a plain one and Opacus, its
memory, a whole step with noise and optimizer, its waits for the device, the noise, and the optimizer: what `engine.py`,
`noise.py` and `optimizer.py` measure. Models have random weights, and nothing is downloaded. Each row is measured in a
process of its own, so that one that runs out of memory, or crashes, leaves the others as they are. An interrupted run goes
on with the rows that are missing or have failed; rows of another device, commit, version or setting do not count. The exit
status is 1 if a test or a row has failed; being out of memory is a result, as is a model that Opacus does not support.
"""

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import GaussianMechanism
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench import engine, gpu_page, noise, optimizer
from scripts.bench.measure import WARM_UP, append_json_line, chosen, in_fresh_process, quartiles, seconds_in_turn

ROOT = Path(__file__).parents[2]
WORKS = ("tests", "pass", "peer", "memory", "step", "waits", "noise", "optimizer")
WAYS = tuple(noise.WAYS)
KINDS = optimizer.WORKS["filters"] | optimizer.WORKS["galore"]
MOST_DRAWS = 10  # the slowest way takes seconds for each
PRIVATE = gpu_page.PRIVATE
COORDINATES = {"full": (125_000_000, 200), "tiny": (1_000, 2)}  # and the tensors into which they are divided
Row = dict[str, Any]


@dataclass
class GpuArguments:
    """What is measured, and on what."""

    works: str = field(default=",".join(WORKS), metadata={"help": f"Of {', '.join(WORKS)}; comma separated."})
    models: str = field(
        default=",".join(engine.LARGE_WORKS),
        metadata={"help": "Works of engine.py for the passes and steps, comma separated."},
    )
    device: str = field(default="cuda", metadata={"help": "cuda, or cpu to try out the script.", "choices": ["cuda", "cpu"]})
    scale: str = field(default="full", metadata={"help": "tiny tries out the script.", "choices": ["full", "tiny"]})
    pairs: int = field(default=30, metadata={"help": "How many pairs of steps."})
    threads: int = field(default=2, metadata={"help": "torch's threads on the CPU."})
    tests: str = field(default="tests", metadata={"help": "File or folder of the tests, of which those marked gpu are run."})
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
    raise ValueError(
        f"The machine must have a CUDA device, got {missing}. To try the script without one: python -m scripts.bench.gpu "
        "--device cpu --scale tiny."
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
    models = {name: engine.ALL_WORKS[name] for name in args.models.split(",")}
    if args.scale == "tiny":
        models = {name: replace(work, **engine.TINY) for name, work in models.items()}
    count, tensors = COORDINATES[args.scale]
    of_noise = noise.BenchArguments(count=count, tensors=tensors, pairs=min(MOST_DRAWS, args.pairs), **common)
    of_optimizer = optimizer.BenchArguments(pairs=args.pairs, scale=args.scale, **common)
    found: dict[str, Callable[[], Row]] = {"tests/gpu": functools.partial(outcome_of_tests, args.tests)}
    for name, work in models.items():
        for kind in ("plain", PRIVATE, *engine.PEERS):
            memory = functools.partial(engine.peak_memory, work, kind, settings)
            found[f"memory/{name} {kind}"] = functools.partial(mebibytes, memory)
        found[f"pass/{name}"] = functools.partial(rates, work, [PRIVATE], settings)
        for peer in engine.PEERS:
            found[f"peer/{name} {peer}"] = functools.partial(rates, work, [PRIVATE, peer], settings)
        found[f"step/{name}"] = functools.partial(rates_of_steps, work, settings)
        found[f"waits/{name}"] = functools.partial(waits, work, settings)
    for name in WAYS:
        found[f"noise/{name}"] = functools.partial(
            times, functools.partial(noise.paired_seconds, noise.WAYS[name], of_noise)
        )
    for name, kind in {"fused AdamW": None, **KINDS}.items():
        memory = functools.partial(optimizer.peak_memory, kind, of_optimizer)
        found[f"memory/{name}"] = functools.partial(mebibytes, memory)
        if kind is not None:
            found[f"optimizer/{name}"] = functools.partial(
                times, functools.partial(optimizer.kind_seconds, kind, of_optimizer)
            )
    return found


def rates(work: engine.Work, engines: Sequence[str], settings: engine.BenchArguments) -> Row:
    """Return the times of passes: of the last engine against plain ones, and of the first as `ours`."""
    seconds = engine.paired_seconds(work, engines, settings)
    return of_times(seconds[:, [0, -1]]) | {"ours": of_times(seconds[:, :2]), "examples": work.batch}


def rates_of_steps(work: engine.Work, settings: engine.BenchArguments) -> Row:
    """Return the times of whole steps, and how many examples each has."""
    with whole_steps(work, settings) as steps:
        seconds = seconds_in_turn(*steps, pairs=settings.pairs, device=settings.device)
    return of_times(seconds) | {"examples": work.batch}


def waits(work: engine.Work, settings: engine.BenchArguments) -> Row:
    """Return where a plain and a private whole step wait for the device, each place as often as it does."""
    with whole_steps(work, settings) as steps:
        for step in steps * WARM_UP:
            step()
        plain, private = (waits_of(step, device=settings.device) for step in steps)
    return {"plain": plain, "private": private}


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


def times(paired: Callable[[], np.ndarray]) -> Row:
    """Return the ratio of two times that were taken in turn, and both."""
    return of_times(paired())


def of_times(seconds: np.ndarray) -> Row:
    """Return the ratio of two columns of times, the second of the first, and the median of both in seconds."""
    q1, ratio, q3 = quartiles(seconds[:, 1] / seconds[:, 0])
    first, second = np.median(seconds, axis=0).tolist()
    return {"ratio": ratio, "ratio_quartiles": [q1, q3], "first_s": first, "second_s": second}


def mebibytes(memory: Callable[[], float]) -> Row:
    """Return the memory that was measured."""
    return {"mib": memory()}


@contextlib.contextmanager
def whole_steps(work: engine.Work, settings: engine.BenchArguments) -> Iterator[tuple[Callable[[], None], ...]]:
    """Yield a plain step with fused AdamW, and a private one with noise and the defaults' filter and AdamBC."""
    with contextlib.ExitStack() as stack:
        models = [engine.build(work, device=settings.device) for _ in range(2)]
        passes = [
            stack.enter_context(engine.stepping(kind, model, batch, settings))
            for kind, (model, batch) in zip(("plain", PRIVATE), models, strict=True)
        ]
        trained = [[p for p in model.parameters() if p.requires_grad] for model, _ in models]
        adamw = torch.optim.AdamW(trained[0], lr=1e-4, fused=True)
        mechanism = GaussianMechanism(
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=work.batch,
            device=torch.device(settings.device),
        )
        filtered = DopplerOptimizer(
            trained[1], lr=1e-4, low_pass_filter=PAPER_FILTERS["momentum"], noise_std=mechanism.noise_std(0)
        )

        def plain() -> None:
            passes[0]()
            adamw.step()

        def private() -> None:
            passes[1]()
            mechanism.privatize(gradients(models[1][0]), step=0)
            filtered.step()

        yield plain, private


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def outcome_of_tests(path: str) -> Row:
    """Run the tests that are marked `gpu`, all of them, and return how many passed, which failed, and how many were skipped.

    Raises:
        RuntimeError: If pytest ran none of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", path, "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):  # 1: some have failed
            last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
            raise RuntimeError(f"The tests must end with status 0 or 1, got {done.returncode}: {last}.")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{case.get('classname')}.{case.get('name')}" for case in failed]
    return {"passed": len(cases) - len(failed) - len(skipped), "failed": names, "skipped": len(skipped)}


def with_threads(threads: int, measure: Callable[[], Row]) -> Row:
    """Measure with some of torch's threads."""
    torch.set_num_threads(threads)
    return measure()


def measured(measure: Callable[[], Row], *, threads: int) -> Row:
    """Return a row, or why there is none."""
    try:
        return in_fresh_process(with_threads, threads, measure)
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
            **measured(measure, threads=args.threads),
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
