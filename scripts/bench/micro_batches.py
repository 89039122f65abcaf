"""The time of a batch of short texts by how it is cut into passes, relative to plain passes of 32 sorted rows.

    python -m scripts.bench.micro_batches [--tokens 128,256,512,1024] [--widths 128,384,768] [--output out/cuts.jsonl]

Lengths are those of SST-2: a gamma distribution with mean 13.5, from 3 to 54 tokens. Processor seconds, the least of the
repetitions, all cuts in turn.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.batching.cutting import Cut
from scripts.bench.engine import TEXT, Work, build
from scripts.bench.measure import append_json_line, settings
from scripts.training.arguments import one_line_errors, parse_args

SHORTEST, MEAN, LONGEST = 3, 13.5, 54
ROWS = 32  # of a plain pass


@dataclass
class BenchArguments:
    """The sizes."""

    texts: int = field(default=256, metadata={"help": "Texts of the batch."})
    tokens: str = field(default="128,256,512,1024,2048,4096", metadata={"help": "Budgets, with commas between."})
    widths: str = field(default="128,384,768", metadata={"help": "Widths of the models, with commas between."})
    layers: int = field(default=4, metadata={"help": "Layers of each model."})
    lora_r: int = field(default=0, metadata={"help": "Rank of adapters; 0 trains all weights."})
    repetitions: int = field(default=3, metadata={"help": "How often each cut is timed."})
    device: str = field(default="cpu", metadata={"help": "cpu.", "choices": ["cpu"]})
    threads: int = field(default=1, metadata={"help": "torch's threads."})
    output: str | None = field(default=None, metadata={"help": "File to which each result is added as a line of JSON."})


def lengths_like_sst2(number: int) -> np.ndarray:
    """Return the same random lengths at every call, distributed as those of SST-2."""
    return np.random.default_rng(0).gamma(2.0, MEAN / 2.0, size=number).astype(np.int64).clip(SHORTEST, LONGEST)


def passes_of(lengths: np.ndarray, cut: Cut) -> list[dict[str, Tensor]]:
    """Return the inputs of each pass, of random tokens padded to the longest row of the pass."""
    stops = [each.stop for each in cut.passes(len(lengths), lengths=lengths)]
    found = []
    for start, stop in itertools.pairwise([0, *stops]):
        own = torch.from_numpy(lengths[start:stop])
        mask = (torch.arange(int(own.max())) < own[:, None]).long()
        found.append({"input_ids": torch.randint(5, 1000, mask.shape) * mask, "attention_mask": mask})
    return found


def losses_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the loss of each text, with label 0."""
    logits: Tensor = model(**inputs).logits
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="none")


def ratios(width: int, args: BenchArguments) -> dict[str, float]:
    """Return the seconds of plain passes, and the ratio of each cut to them."""
    work = Work("roberta", TEXT, args.layers, width, max(2, width // 64), 1000, LONGEST + 2, 1, lora_r=args.lora_r)
    lengths = np.sort(lengths_like_sst2(args.texts))
    (model, _), (plain, _) = build(work, device="cpu"), build(work, device="cpu")
    with ClippedGradients(model, clipping="automatic") as clipped:

        def private_step(passes: Sequence[dict[str, Tensor]]) -> None:
            clipped.reset()
            for inputs in passes:
                clipped.backward(losses_of(model, inputs))

        def plain_step(passes: Sequence[dict[str, Tensor]]) -> None:
            plain.zero_grad()
            for inputs in passes:
                losses_of(plain, inputs).mean().backward()

        cuts: dict[str, tuple[Callable[[Sequence[dict[str, Tensor]]], None], Cut]] = {
            "plain": (plain_step, Cut(ROWS)), "rows": (private_step, Cut(ROWS)),
            **{name: (private_step, Cut(None, int(name))) for name in args.tokens.split(",")},
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in cuts}
        inputs = {name: passes_of(lengths, cut) for name, (_, cut) in cuts.items()}
        for _ in range(args.repetitions):
            for name, (step, _) in cuts.items():
                start = time.process_time()
                step(inputs[name])
                seconds[name].append(time.process_time() - start)
    least = {name: min(found) for name, found in seconds.items()}
    return {"plain_seconds": least["plain"]} | {
        f"{name}_ratio": value / least["plain"] for name, value in least.items() if name != "plain"
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Time the cuts of every width, and print and write the ratios."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
    torch.set_num_threads(args.threads)
    for width in map(int, args.widths.split(",")):
        found = ratios(width, args)
        print(f"width {width}: " + ", ".join(f"{each} {value:.2f}" for each, value in found.items()), flush=True)
        append_json_line({"width": width, **found} | settings(args), args.output)


if __name__ == "__main__":
    main()
