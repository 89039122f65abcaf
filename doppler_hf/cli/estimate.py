"""Estimate a private run's peak memory and time per step before training.

The model gets random weights. Forward and backward passes are timed at two micro-batch sizes, and noise and optimizer on
some millions of weights. Memory is computed without being used. The estimate is for this machine's device, or with
--processes for several such devices that exchange --bandwidth bytes per second. It leaves out data loading, padding, and
waiting for other processes. With --memory nothing is timed: the command proposes a per_device_train_batch_size for a CUDA
card with that much memory, which need not be in this machine.

  doppler-hf estimate --model roberta-base --task text-classification --length 64 --batch-size 1024 --micro-batch 16
  doppler-hf estimate --model gpt2 --task causal-lm --length 512 --batch-size 512 --lora-r 8 --processes 8 --bandwidth 2e10
  doppler-hf estimate --model Qwen/Qwen2.5-7B --task causal-lm --length 512 --batch-size 512 --lora-r 16 --bf16 --memory 80
"""

import argparse
import functools
import json
from dataclasses import replace
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from doppler_hf.cli.random_model import TASKS, RandomModel
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.optim.update import BASES
from doppler_hf.run.estimate import Setting, bytes_of_step, largest_micro_batch, seconds_of_step

_MIB, _GIB = 2**20, 2**30
# The optimizer is timed on a vector, but the time that Muon takes is spent on matrices.
TIMED: Final = [base for base in BASES if base != "muon"]
_USABLE = 0.9  # Libraries, and gaps between the allocator's blocks, take the rest of a card's memory.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf estimate`."""
    parser.add_argument("--model", required=True, metavar="NAME", help="hub name, or a folder with config.json")
    parser.add_argument("--task", required=True, choices=[*TASKS], help="the task of the training run")
    parser.add_argument("--length", type=int, metavar="L", help="tokens per record; leave it out for images")
    parser.add_argument("--batch-size", type=int, required=True, metavar="B", help="expected batch size over all processes")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="M", help="records per pass (default: %(default)s)")
    parser.add_argument("--base-optimizer", choices=TIMED, default="adam_bc", help="default: %(default)s")
    parser.add_argument("--low-pass-filter", default="momentum", metavar="FILTER", help="default: %(default)s")
    parser.add_argument("--noise-shape", default="white", metavar="SHAPE", help="as banded:bands=4 (default: %(default)s)")
    parser.add_argument("--lora-r", type=int, default=0, metavar="R", help="rank of adapters; 0 trains all weights")
    parser.add_argument("--lora-target-modules", metavar="NAMES", help="layers with adapters, comma separated")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="devices of this kind (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, metavar="BYTES", help="per second between processes; needed for several")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, as --bf16 of a training script")
    parser.add_argument("--memory", type=float, metavar="GIB", help="propose a micro-batch for a card with this much memory")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Estimate time and memory, and print them."""
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
        model, parts = _random_model(args, args.device)
        seconds = seconds_of_step(model, **parts, setting=setting)
    else:
        proposed = largest_micro_batch(
            lambda size: sum(_bytes(args, replace(setting, micro_batch=size)).values()),
            most=max(1, args.batch_size // args.processes),
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
    if setting.processes > 1:
        title += f", in each of {setting.processes} processes that exchange {setting.bandwidth:g} bytes per second (assumed)"
    caption = "Not included: libraries, data loading, padding, waiting for other processes."
    table = Table("part", "time or memory", title=title, caption=caption)
    if seconds:
        for name, number in (*seconds.items(), ("whole step", sum(seconds.values()))):
            table.add_row(name, f"{number:.3g} s")
        table.add_section()
    for name, number in (*bytes.items(), ("peak memory", sum(bytes.values()))):
        table.add_row(name, f"{number / _MIB:,.0f} MiB")
    return table
