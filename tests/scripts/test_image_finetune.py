"""Pretrained weights on images, at a tiny size: BatchNorm folded into convolutions, features that are kept, and a table."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from scripts.experiments import image_finetune
from scripts.studies.images import Images
from scripts.studies.studies import Method
from tests.support.folders import write_mnist


@pytest.fixture
def tiny():
    """Weights of a stem and two stages, the second of two blocks, with a BatchNorm behind each convolution."""
    torch.manual_seed(0)
    shapes = {"_conv_stem": (4, 3, 3, 3), "_blocks.0._depthwise_conv": (4, 1, 3, 3), "_blocks.0._project_conv": (2, 4, 1, 1)}
    for block, before in ((1, 2), (2, 6)):
        shapes[f"_blocks.{block}._expand_conv"] = (2 * before, before, 1, 1)
        shapes[f"_blocks.{block}._depthwise_conv"] = (2 * before, 1, 5, 5)
        shapes[f"_blocks.{block}._project_conv"] = (6, 2 * before, 1, 1)
    weights = {}
    for name, shape in shapes.items():
        owner, _, layer = name.rpartition(".")
        norm = f"{owner}.{image_finetune.NORMS[layer]}".removeprefix(".")
        weights[f"{name}.weight"] = torch.randn(shape)
        moments = {"weight": 1.0, "bias": 0.5, "running_mean": -0.5, "running_var": 0.5}
        weights |= {f"{norm}.{key}": least + torch.rand(shape[0]) for key, least in moments.items()}
    return weights


def test_batch_norm_as_in_evaluation_is_in_the_convolution(tiny):
    folded = image_finetune.without_batch_norm(tiny)
    x = torch.randn(2, 2, 8, 8)
    norm = nn.BatchNorm2d(4, eps=image_finetune.NORM_EPS).eval()
    norm.load_state_dict(
        {key: tiny[f"_blocks.1._bn0.{key}"] for key in ("weight", "bias", "running_mean", "running_var")}, strict=False
    )
    names = [f"_blocks.1._expand_conv.{key}" for key in ("weight", "bias")]
    expected = norm(nn.functional.conv2d(x, tiny[names[0]]))
    torch.testing.assert_close(nn.functional.conv2d(x, *(folded[name] for name in names)), expected, atol=1e-5, rtol=1e-5)


def test_stages_halve_the_side_and_a_later_block_adds_to_the_one_before(tiny):
    folded = image_finetune.without_batch_norm(tiny)
    first, second = image_finetune.stages_of(torch.randn(2, 3, 32, 32), folded)
    assert (first.shape, second.shape) == ((2, 2, 16, 16), (2, 6, 8, 8))
    silent = folded | {
        f"_blocks.2._project_conv.{key}": torch.zeros(()) * folded[f"_blocks.2._project_conv.{key}"]
        for key in ("weight", "bias")
    }
    alone = {name: weight for name, weight in folded.items() if not name.startswith("_blocks.2")}
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(image_finetune.stages_of(pixels, silent)[1], image_finetune.stages_of(pixels, alone)[1])


def test_moments_are_those_of_the_sum_of_a_stages_blocks(tiny):
    shift, scale, widths = image_finetune.moments_of(tiny)
    assert widths == [2, 6]
    torch.testing.assert_close(shift[2:], tiny["_blocks.1._bn2.bias"] + tiny["_blocks.2._bn2.bias"])
    torch.testing.assert_close(scale[:2], tiny["_blocks.0._bn2.weight"])
    torch.testing.assert_close(scale[2:] ** 2, tiny["_blocks.1._bn2.weight"] ** 2 + tiny["_blocks.2._bn2.weight"] ** 2)


@pytest.mark.usefixtures("own_caches")
def test_features_are_kept_and_of_one_image_each(tiny, tmp_path):
    images = Images("cifar10", str(write_mnist(tmp_path / "data", train=6, test=3, shape=(32, 32, 3))))
    found = image_finetune.features_of(images, tiny, tmp_path / "kept")
    for part in found["train"].split([2, 6], dim=1):
        torch.testing.assert_close(part.norm(dim=1), torch.full((6,), part.shape[1] ** 0.5))
    files = sorted((tmp_path / "kept").iterdir())
    assert [file.name for file in files] == ["test-00000.pt", "train-00000.pt"]
    torch.save(2 * torch.load(files[1]), files[1])
    again = image_finetune.features_of(images, tiny, tmp_path / "kept")
    assert torch.equal(again["test"], found["test"])
    assert not torch.equal(again["train"], found["train"])


@pytest.mark.thorough
@pytest.mark.usefixtures("own_caches")
def test_a_table_of_private_runs_and_one_without(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(image_finetune.SETTINGS, "per_device_train_batch_size", 10)
    monkeypatch.setitem(image_finetune.SETTINGS, "max_steps", 3)
    write_mnist(tmp_path / "data", train=60, test=20, shape=(32, 32, 3))
    torch.save(tiny, tmp_path / "weights.pth")
    folders = [
        f"--data-dir={tmp_path / 'data'}",
        "--weights",
        *2 * [f"{tmp_path / 'weights.pth'}"],
        f"--features={tmp_path / 'kept'}",
    ]
    flags = [f"--output={tmp_path / 'out.jsonl'}", "--epsilons", "3", "--seeds", "0", "1", "--held-out", "20"]
    image_finetune.main([*folders, *flags])
    printed = capsys.readouterr().out
    assert [line.split(" | ")[0] for line in printed.splitlines()[2:]] == ["| 3", "| ∞"]
    image_finetune.main([*folders, *flags])  # what the files hold is not trained again
    assert capsys.readouterr().out == printed
    study = image_finetune.STUDIES["peers"]
    monkeypatch.setitem(image_finetune.STUDIES, "peers", dataclasses.replace(study, methods={"ours": Method()}))
    image_finetune.main([*folders, *flags, "--peers"])
    assert "| ours | " in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["epsilon"], row["seed"], row["num_examples"]) for row in rows] == [(3.0, 0, 40), (3.0, 1, 40)]
