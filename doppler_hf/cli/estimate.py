"""Estimate a private run's peak memory and time per step before training.

With --script, your own script runs up to its DopplerTrainer.train(). In place of the training, the command makes a few
steps with your data, model and loss. It prints time, memory and ε of the whole run, and then ends. Nothing is trained,
saved or spent. A recipe in a clone of the repository is estimated in the same way. The figures depend on your data: do not
publish them.

  doppler-hf estimate --script my_train.py --learning_rate 1e-3
  doppler-hf estimate recipes/image/digits-eps8.yaml --num_train_epochs 5

Without a script, the model gets random weights. Forward and backward passes are timed at two micro-batch sizes, and noise
and optimizer on some millions of weights. Memory is computed without being used. The estimate is for this machine's device,
or with --processes for several such devices that exchange --bandwidth bytes per second. It leaves out data loading,
padding, and waiting for other processes. With --memory nothing is timed: the command proposes a
per_device_train_batch_size for a CUDA card with that much memory, which need not be in this machine.

  doppler-hf estimate --model roberta-base --task text-classification --length 64 --batch-size 1024 --micro-batch 16
  doppler-hf estimate --model gpt2 --task causal-lm --length 512 --batch-size 512 --lora-r 8 --processes 8 --bandwidth 2e10
  doppler-hf estimate --model Qwen/Qwen2.5-7B --task causal-lm --length 512 --batch-size 512 --lora-r 16 --bf16 --memory 80
"""

import argparse
import functools
import json
import math
import os
import sys
from dataclasses import replace
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from doppler_hf.cli import script
from doppler_hf.cli.flags import hint, whole_number
from doppler_hf.cli.measured_run import measured_run
from doppler_hf.cli.random_model import TASKS, RandomModel
from doppler_hf.errors import Refusal
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.optim.update import BASES
from doppler_hf.run.planning.estimate import Setting, bytes_of_step, largest_micro_batch, seconds_of_step

_MIB, _GIB = 2**20, 2**30
# The optimizer is timed on a vector, but the time that Muon takes is spent on matrices.
TIMED: Final = [base for base in BASES if base != "muon"]
_NEEDED: Final = ("model", "task", "batch_size")
# Flags that describe a model without a script.
_OF_MODELS: Final = (
    *_NEEDED, "length", "micro_batch", "base_optimizer", "low_pass_filter", "noise_shape", "lora_r", "lora_target_modules",
    "processes", "bandwidth", "bf16", "memory", "device",
)  # fmt: skip
_OF_SCRIPT: Final = "Not included: libraries, evaluations, checkpoints."
# Flag → the least and the largest number, and what it counts. Sizes of tensors do not overflow with these.
_SIZES: Final = {
    "length": (1, 10**7, "tokens of a text, as --length 128"),
    "micro_batch": (1, 10**6, "records of a pass, as --micro-batch 8"),
    "lora_r": (0, 10**6, "dimensions of an adapter, as --lora-r 16"),
}
_MOST_TOKENS: Final = 10**9
_USABLE = 0.9  # Libraries, and gaps between the allocator's blocks, take the rest of a card's memory.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf estimate`."""
    parser.add_argument("--model", metavar="NAME", help="hub name, or a folder with config.json")
    parser.add_argument("--task", choices=[*TASKS], metavar="TASK", help=f"the task of the run: {', '.join(TASKS)}")
    parser.add_argument("--length", type=whole_number, metavar="L", help="tokens per record; leave it out for images")
    parser.add_argument("--batch-size", type=whole_number, metavar="B", help="expected batch size over all processes")
    parser.add_argument(
        "--micro-batch", type=whole_number, default=8, metavar="M", help="records per pass (default: %(default)s)"
    )
    parser.add_argument("--base-optimizer", choices=TIMED, default="adam_bc", help="default: %(default)s")
    parser.add_argument("--low-pass-filter", default="momentum", metavar="FILTER", help="default: %(default)s")
    parser.add_argument("--noise-shape", default="white", metavar="SHAPE", help="as banded:bands=4 (default: %(default)s)")
    parser.add_argument("--lora-r", type=whole_number, default=0, metavar="R", help="rank of adapters; 0 trains all weights")
    parser.add_argument("--lora-target-modules", metavar="NAMES", help="layers with adapters, comma separated")
    parser.add_argument(
        "--processes", type=whole_number, default=1, metavar="P", help="devices of this kind (default: %(default)s)"
    )
    parser.add_argument("--bandwidth", type=float, metavar="BYTES", help="per second between processes; needed for several")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, as --bf16 of a training script")
    parser.add_argument("--memory", type=float, metavar="GIB", help="propose a micro-batch for a card with this much memory")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    script.add_arguments(parser)
    parser.set_defaults(defaults={each.dest: each.default for each in parser._actions})


def run(args: argparse.Namespace) -> int:
    """Estimate time and memory, and print them."""
    if args.script is not None or args.recipe is not None:
        return run_of_script(args)
    if args.fields:
        raise Refusal(
            "unknown-options",
            f"Unknown options: {' '.join(args.fields)}{hint(args.fields, args.flags)}. See doppler-hf estimate --help.",
        )
    for name in _NEEDED:
        if vars(args)[name] is None:
            flag = f"--{name.replace('_', '-')}"
            raise Refusal("nothing-to-estimate", f"{flag} is missing. Give it, or your own script with --script.")
    _check_flags(args)
    setting = Setting(
        batch_size=args.batch_size,
        micro_batch=args.micro_batch,
        processes=args.processes,
        bandwidth=args.bandwidth,
        base=args.base_optimizer,
        low_pass_filter=LowPassFilter.parse(args.low_pass_filter),
        noise_shape=NoiseShape.parse(args.noise_shape),
        may_exceed=args.length is None,
    )
    seconds, proposed = {}, None
    if args.memory is None:
        found = _bytes(args, setting)
        _refuse_too_large(sum(found.values()), args.device)
        model, parts = _random_model(args, args.device)
        seconds = seconds_of_step(model, **parts, setting=setting)
    else:
        proposed = largest_micro_batch(
            lambda size: sum(_bytes(args, replace(setting, micro_batch=size)).values()),
            most=max(
                1, min(args.batch_size // args.processes, _SIZES["micro_batch"][1], _MOST_TOKENS // (args.length or 1))
            ),
            memory=_USABLE * args.memory * _GIB,
        )
        setting = replace(setting, micro_batch=proposed or 1)
        found = _bytes(args, setting)
    if args.json:
        totals = {"step_seconds": sum(seconds.values()), "peak_bytes": sum(found.values())}
        print(json.dumps({**totals, "seconds": seconds, "bytes": found, "passes": setting.passes, "proposed": proposed}))
    else:
        Console().print(table_of(seconds, found, setting))
        if args.memory is not None:
            print(
                f"Largest per_device_train_batch_size (a power of two) that leaves a tenth of {args.memory:g} GiB free: "
                f"{proposed or 'none, not even 1. Try --lora-r 16, --bf16 or a shorter --length.'}"
            )
    return 0


def run_of_script(args: argparse.Namespace) -> int:
    """Measure a few steps of a script or recipe in place of its training, and print what its run will take."""
    script.check_source(args)
    given = [name for name in _OF_MODELS if vars(args)[name] != args.defaults[name]]
    if given:
        raise Refusal(
            "no-effect",
            f"--{given[0].replace('_', '-')} has no effect here, because a script or recipe is measured with its own "
            "arguments. Leave the flag out, and change the arguments of the script.",
        )
    found = script.use_trainer(args, measured_run)
    statement, who = found.statement, found.statement.noun
    if args.json:
        totals = {"step_seconds": sum(found.seconds.values()), "peak_bytes": sum(found.bytes.values())}
        of_run = {
            "steps": statement.steps_planned, "run_seconds": found.run_seconds, "start_seconds": found.start_seconds,
            "epsilon": found.epsilon, "delta": statement.target_delta, "batch_size": statement.expected_batch_size,
            "measured_batch_size": found.measured_rows,
        }  # fmt: skip
        print(json.dumps({**totals, "seconds": found.seconds, "bytes": found.bytes, "passes": found.passes, **of_run}))
        return 0
    console = Console()
    console.print(table_of_parts(found.seconds, found.bytes, title="One step", caption=_OF_SCRIPT))
    batch = f"{statement.expected_batch_size:,} {who}s in about {found.passes:,} passes"
    extrapolated = found.measured_rows < statement.expected_batch_size
    batch += f", extrapolated from batches of {found.measured_rows:,}" if extrapolated else ""
    lines = (
        f"A step: {batch}.",
        f"The run: {statement.steps_planned:,} steps in {in_hours(found.run_seconds)}, of which {found.start_seconds:.3g} s "
        "are checks at the start.",
        f"It will spend ε = {found.epsilon:.4g}, δ = {statement.target_delta:.3g} for one {who}. This estimate has spent "
        "nothing.",
        "Time and memory depend on the data: do not publish them.",
    )
    console.print(*lines, sep="\n", soft_wrap=True, highlight=False)
    return 0


def in_hours(seconds: float) -> str:
    """Return a time in seconds, minutes or hours.

    Example:
        >>> in_hours(2.34), in_hours(754), in_hours(40_000)
        ('2.3 s', '13 min', '11 h 7 min')
    """
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse sizes of no model, flags that nothing would read, and processes without the speed of their connection."""
    for name, (least, most, what) in _SIZES.items():
        value = vars(args)[name]
        if value is not None and not least <= value <= most:
            raise Refusal(
                "out-of-range",
                f"--{name.replace('_', '-')} must be from {least} to {most:,}; got {value}. Give the number of {what}.",
            )
    if args.memory is None and args.micro_batch * (args.length or 1) > _MOST_TOKENS:
        raise Refusal(
            "out-of-range",
            f"--micro-batch {args.micro_batch} and --length {args.length} make more than {_MOST_TOKENS:,} tokens of a pass. "
            "Give smaller numbers.",
        )
    if args.device == "cuda" and args.memory is None and not torch.cuda.is_available():
        raise Refusal(
            "no-cuda",
            "--device cuda needs a GPU that torch can use, and there is none on this machine. Leave it out to time the CPU. "
            "For a card in another machine, give its GiB, as --memory 80; then nothing is timed.",
        )
    if args.memory is not None:
        if not 0 < args.memory < math.inf:
            raise Refusal(
                "out-of-range",
                f"--memory must be positive and finite; got {args.memory:g}. Give GiB, for example --memory 80.",
            )
        for name, reason in (("micro_batch", "which proposes a micro-batch"), ("bandwidth", "with which nothing is timed")):
            if vars(args)[name] != args.defaults[name]:
                raise Refusal(
                    "no-effect", f"--{name.replace('_', '-')} has no effect beside --memory, {reason}. Leave it out."
                )
    elif args.processes > 1 and not (args.bandwidth is not None and 0 < args.bandwidth < math.inf):
        raise Refusal(
            "no-bandwidth",
            f"--bandwidth must be positive and finite for {args.processes} processes; got {args.bandwidth}. The transfer "
            "between processes is not measured here. Give its bytes per second, for example --bandwidth 1e10.",
        )
    elif args.processes == 1 and args.bandwidth is not None:
        raise Refusal(
            "no-effect",
            "--bandwidth has no effect with one process, which exchanges nothing. Leave it out, or give --processes.",
        )


def _refuse_too_large(needed: float, device: str) -> None:
    """Refuse to measure what does not fit into the memory of this machine, before the system ends the process."""
    if device == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    elif sys.platform == "win32":
        return  # Windows refuses memory that it does not have, and does not end processes.
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise Refusal(
            "too-large-to-measure",
            f"A step takes about {needed / _GIB:.3g} GiB, and this machine has {there / _GIB:.3g} GiB. Give a smaller "
            "--micro-batch, or the memory of a larger card in GiB, as --memory 80; then nothing is measured.",
        )


def _random_model(args: argparse.Namespace, device: str) -> tuple[Any, dict[str, Any]]:
    random = RandomModel(
        args.model,
        task=args.task,
        length=args.length,
        lora_r=args.lora_r,
        lora_target_modules=args.lora_target_modules,
        device=device,
    )
    return random.model, {"batch": random.batch, "losses_of": functools.partial(random.losses_of, in_bf16=args.bf16)}


def _bytes(args: argparse.Namespace, setting: Setting) -> dict[str, float]:
    model, parts = _random_model(args, "meta")
    return bytes_of_step(model, **parts, setting=setting, on_cuda=args.device == "cuda" or args.memory is not None)


def table_of(seconds: dict[str, float], bytes: dict[str, float], setting: Setting) -> Table:
    """Return the estimate as a table."""
    title = f"One step with micro-batches of {setting.micro_batch}"
    if setting.may_exceed:
        title += f" (up to {setting.most_rows} images, for which memory is counted)"
    if setting.bandwidth is not None:
        title += f", in each of {setting.processes} processes that exchange {setting.bandwidth:g} bytes per second (assumed)"
    caption = "Not included: libraries, data loading, padding, waiting for other processes."
    return table_of_parts(seconds, bytes, title=title, caption=caption)


def table_of_parts(seconds: dict[str, float], bytes: dict[str, float], *, title: str, caption: str) -> Table:
    """Return the parts of a step and their sums as a table."""
    table = Table("part", "time or memory", title=title, caption=caption)
    if seconds:
        for name, number in (*seconds.items(), ("whole step", sum(seconds.values()))):
            table.add_row(name, f"{number:.3g} s")
        table.add_section()
    for name, number in (*bytes.items(), ("peak memory", sum(bytes.values()))):
        table.add_row(name, f"{number / _MIB:,.0f} MiB")
    return table
