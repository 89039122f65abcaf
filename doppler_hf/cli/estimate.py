"""Estimate a private run's peak memory and time per step before training.

The model gets random weights. Passes are measured at two sizes of micro-batch, noise and optimizer on some millions of
weights; the rest is counted. The estimate is for this machine's device, or with --processes for several such devices that
exchange --bandwidth bytes a second. Data loading, padding and waiting for others are left out.

  doppler-hf estimate --model roberta-base --task text-classification --length 64 --batch-size 1024 --micro-batch 16
  doppler-hf estimate --model gpt2 --task causal-lm --length 512 --batch-size 512 --lora-r 8 --processes 8 --bandwidth 2e10
"""

import argparse
import json
from dataclasses import asdict
from typing import get_args

from rich.console import Console
from rich.table import Table

from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.optim.state import BASES
from doppler_hf.privacy.clipping.clipped_gradients import Engine
from doppler_hf.privacy.losses import per_sample_losses
from doppler_hf.run.estimate import Estimate, Setting, estimate
from doppler_hf.workloads.lora import LoraArguments
from doppler_hf.workloads.random_model import TASKS, RandomModel

_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf estimate`."""
    parser.add_argument("--model", required=True, metavar="NAME", help="hub name, or a folder with config.json")
    parser.add_argument("--task", required=True, choices=[*TASKS], help="the task of the training")
    parser.add_argument("--length", type=int, metavar="L", help="tokens per example; leave it out for images")
    parser.add_argument("--batch-size", type=int, required=True, metavar="B", help="expected batch size over all processes")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="M", help="examples per pass (default: %(default)s)")
    parser.add_argument("--engine", choices=get_args(Engine), default="book_keeping", help="default: %(default)s")
    parser.add_argument("--base-optimizer", choices=BASES, default="adam_bc", help="default: %(default)s")
    parser.add_argument("--low-pass-filter", default="momentum", metavar="FILTER", help="default: %(default)s")
    parser.add_argument("--noise-shape", default="white", metavar="SHAPE", help="as banded:bands=4 (default: %(default)s)")
    parser.add_argument("--lora-r", type=int, default=0, metavar="R", help="rank of adapters; 0 trains all weights")
    parser.add_argument("--lora-target-modules", metavar="NAMES", help="layers with adapters, comma separated")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="devices of this kind (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, metavar="BYTES", help="a second between processes; needed for several")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure, and print."""
    setting = Setting(
        batch_size=args.batch_size,
        micro_batch=args.micro_batch,
        processes=args.processes,
        bandwidth=args.bandwidth,
        engine=args.engine,
        base=args.base_optimizer,
        low_pass_filter=LowPassFilter.parse(args.low_pass_filter),
        noise_shape=NoiseShape.parse(args.noise_shape),
    )
    lora = LoraArguments(lora_r=args.lora_r, lora_target_modules=args.lora_target_modules)
    random = RandomModel(args.model, task=args.task, length=args.length, lora=lora, device=args.device)
    found = estimate(
        random.model,
        batch=random.batch,
        losses_of=lambda inputs: per_sample_losses(random.model, inputs, base_model=random.base),
        setting=setting,
    )
    if args.json:
        totals = {"step_seconds": sum(found.seconds.values()), "peak_bytes": sum(found.bytes.values())}
        print(json.dumps({**totals, **asdict(found), "passes": setting.passes}, indent=2))
    else:
        Console().print(table_of(found, setting))
    return 0


def table_of(found: Estimate, setting: Setting) -> Table:
    """Return the estimate as a table."""
    assumed = "" if setting.bandwidth is None else f", with {setting.bandwidth:g} bytes a second between them, as assumed"
    title = f"Of one step and each of {setting.processes} processes{assumed}"
    table = Table("part", "", title=title, caption="Not included: libraries, data loading, padding, waiting for others.")
    for name, seconds in (*found.seconds.items(), ("a step", sum(found.seconds.values()))):
        table.add_row(name, f"{seconds:.3g} s")
    table.add_section()
    for name, number in (*found.bytes.items(), ("at its peak", sum(found.bytes.values()))):
        table.add_row(name, f"{number / _MIB:,.0f} MiB")
    return table
