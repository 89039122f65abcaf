"""Pretrained weights on images, at a tiny size: BatchNorm folded into convolutions, features that are kept, and a table."""

import dataclasses
import json

import pytest
import torch

from scripts.experiments import image_finetune
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
