"""Time and memory of an optimizer step: `DopplerOptimizer` against torch's fused AdamW, in turn, in one process.

    python -m scripts.bench.optimizer --output out/bench.jsonl
    python -m scripts.bench.optimizer --works filters --pairs 100 --device cuda

The parameters have the shapes of RoBERTa-base's encoder, 85 million in 192 tensors, and gradients that stay the same; noise
is not drawn. A step of AdamW and one of ours make a pair; the result is the median of the pairs' ratios, with its quartiles.
Memory is the most that three steps add to parameters and gradients, in a fresh process for each. `galore` is the same in a
subspace of rank 64, between refreshes.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer
from scripts.bench.measure import (
    MIB,
    append_json_line,
    chosen,
    in_fresh_process,
    memory_now,
    memory_peak,
    quartiles,
    seconds_in_turn,
    settings,
)
from scripts.training.arguments import one_line_errors, parse_args

SECOND = {"low_pass_filter": PAPER_FILTERS["second-order"], "base": "adam_bc", "noise_std": 1e-4}
# Name → arguments of DopplerOptimizer.
WORKS: dict[str, dict[str, dict[str, Any]]] = {
    "filters": {
        "second-order": SECOND,
        "first-order-v1": SECOND | {"low_pass_filter": PAPER_FILTERS["first-order-v1"]},
        "none": SECOND | {"low_pass_filter": PAPER_FILTERS["none"]},
    },
    "galore": {"second-order, GaLore": SECOND | {"galore": {"update_proj_gap": 10_000}}},
}
SIZES = {"full": (768, 12), "large": (768, 18), "tiny": (32, 1)}  # width and layers; large has 127 million parameters
MEMORY_STEPS = 3


@dataclass
class BenchArguments:
    """The settings of the measurement."""

    works: str = field(default=",".join(WORKS), metadata={"help": f"Of {', '.join(WORKS)}; comma separated."})
    pairs: int = field(default=30, metadata={"help": "How many pairs of steps."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    threads: int = field(default=2, metadata={"help": "torch's threads."})
    scale: str = field(default="full", metadata={"help": "tiny tries out the script.", "choices": list(SIZES)})
    output: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


def parameters(args: BenchArguments) -> list[nn.Parameter]:
    """Return the encoder's parameters with their gradients, the same ones at every call."""
    width, layers = SIZES[args.scale]
    generator = torch.Generator().manual_seed(0)
    attention = [(width, width), (width,)] * 4
    rest = [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,)]
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(args.device)) for shape in (attention + rest) * layers]
    for p in made:
        p.grad = 1e-3 * torch.randn(p.shape, generator=generator).to(args.device)
    return made


def step_of(kind: dict[str, Any] | None, params: list[nn.Parameter]) -> Callable[[], Any]:
    """Return a step of ours with these arguments, or for None of torch's own optimizer."""
    if kind is None:
        return torch.optim.AdamW(params, lr=1e-4, fused=True).step
    galore = {"rank": min(params[0].shape) // 12, **kind["galore"]} if "galore" in kind else {}
    options = {name: value for name, value in kind.items() if name != "galore"}
    return DopplerOptimizer([{"params": params, **galore}], lr=1e-4, weight_decay=0.01, **options).step


def kind_seconds(kind: dict[str, Any], args: BenchArguments) -> np.ndarray:
    """Return the seconds of torch's own optimizer and of ours with these arguments, made in turn, shape (pairs, 2)."""
    steps = (step_of(way, parameters(args)) for way in (None, kind))
    return seconds_in_turn(*steps, pairs=args.pairs, device=args.device)


def peak_memory(kind: dict[str, Any] | None, args: BenchArguments) -> float:
    """Return the memory that three steps need beyond parameters and gradients, in MiB, in a fresh process."""
    torch.set_num_threads(args.threads)
    params = parameters(args)
    gc.collect()
    before = memory_now(args.device)
    step = step_of(kind, params)
    for _ in range(MEMORY_STEPS):
        step()
    return (memory_peak(args.device) - before) / MIB


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one line for each kind."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        works = chosen("--works", args.works, WORKS)
    torch.set_num_threads(args.threads)
    kinds = {name: kind for work in works for name, kind in WORKS[work].items()}
    adamw_mib = in_fresh_process(peak_memory, None, args)
    for name, kind in kinds.items():
        seconds = kind_seconds(kind, args)
        q1, ratio, q3 = quartiles(seconds[:, 1] / seconds[:, 0])
        adamw_s, ours_s = np.median(seconds, axis=0).tolist()
        ours_mib = in_fresh_process(peak_memory, kind, args)
        print(
            f"{name:35} time ×{ratio:.2f} ({q1:.2f} to {q3:.2f}) of fused AdamW: {1000 * adamw_s:.3g} → {1000 * ours_s:.3g} "
            f"ms; memory ×{ours_mib / adamw_mib:.2f}: {adamw_mib:.0f} → {ours_mib:.0f} MiB",
            flush=True,
        )
        result = {"work": name, "ratio": ratio, "ratio_quartiles": [q1, q3], "adamw_s": adamw_s, "ours_s": ours_s}
        append_json_line(result | {"adamw_mib": adamw_mib, "ours_mib": ours_mib} | settings(args), args.output)


if __name__ == "__main__":
    main()
