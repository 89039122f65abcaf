"""Overhead of secret noise: each way to draw it against torch's own normals, in turn, in one process.

    python -m scripts.bench.noise --results out/noise.jsonl
    python -m scripts.bench.noise --count 10000000 --threads 1 --ways "white,banded"

`torch.Tensor.normal_` and a `privatize` of ours make a pair; the result is the median of the pairs' ratios, with its
quartiles. Ours also adds the noise to a sum and divides it by the batch size.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import GaussianMechanism
from scripts.bench.measure import append_json_line, chosen, quartiles, seconds_in_turn, settings
from scripts.training.arguments import one_line_errors, parse_args

# Name → arguments of GaussianMechanism.
WAYS: dict[str, dict[str, Any]] = {
    "white": {},
    "white safe": {"floating_point_safe": True},
    "banded": {"shape": NoiseShape.banded(4)},
}


@dataclass
class BenchArguments:
    """The settings of the measurement."""

    ways: str = field(default=",".join(WAYS), metadata={"help": f"Of {', '.join(WAYS)}; comma separated."})
    count: int = field(default=125_000_000, metadata={"help": "Coordinates that get noise."})
    tensors: int = field(default=1, metadata={"help": "Into how many tensors they are divided."})
    pairs: int = field(default=7, metadata={"help": "How many pairs of draws."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    threads: int = field(default=2, metadata={"help": "torch's threads."})
    results: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


def draws(way: dict[str, Any], args: BenchArguments) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what draws torch's normals, and what releases the sums of the next step."""
    normals = torch.empty(args.count, device=args.device)
    sums = {str(i): part for i, part in enumerate(torch.zeros(args.count, device=args.device).chunk(args.tensors))}
    device, steps = torch.device(args.device), itertools.count()
    mechanism = GaussianMechanism(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=100, device=device, **way)
    return normals.normal_, lambda: mechanism.privatize(sums, step=next(steps))


def paired_seconds(way: dict[str, Any], args: BenchArguments) -> np.ndarray:
    """Return the seconds of torch's normals and of ours, made in turn, shape (pairs, 2)."""
    return seconds_in_turn(*draws(way, args), pairs=args.pairs, device=args.device)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one line for each way."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        ways = chosen("--ways", args.ways, WAYS)
    torch.set_num_threads(args.threads)
    for name in ways:
        seconds = paired_seconds(WAYS[name], args)
        q1, ratio, q3 = quartiles(seconds[:, 1] / seconds[:, 0])
        torch_s, ours_s = np.median(seconds, axis=0).tolist()
        print(
            f"{name:14} time ×{ratio:.2f} ({q1:.2f} to {q3:.2f}) of torch's normals: {1000 * torch_s:.4g} → "
            f"{1000 * ours_s:.4g} ms, {1e9 * ours_s / args.count:.2f} ns each",
            flush=True,
        )
        result = {"work": name, "ratio": ratio, "ratio_quartiles": [q1, q3], "torch_s": torch_s, "ours_s": ours_s}
        append_json_line(result | settings(args), args.results)


if __name__ == "__main__":
    main()
