"""The measurement of the engines measures what it says, and runs from its command line."""

import json
from dataclasses import replace

import pytest
import torch

from scripts.bench import engine as bench_engine
from scripts.bench.engine import ALL_WORKS, TINY, BenchArguments, build, losses_of, paired_seconds, stepping
from tests.support.tolerances import RAISED

FLAGS = ["--scale=tiny", "--pairs=2", "--threads=1"]


def tiny(name):
    return replace(ALL_WORKS[name], **TINY)


@pytest.mark.parametrize("name", ALL_WORKS)
def test_losses_are_those_of_the_model_example_by_example(name):
    model, batch = build(tiny(name), device="cpu")
    losses = losses_of(model.eval(), batch)
    for row, loss in enumerate(losses):
        own = model(**{key: value[row : row + 1] for key, value in batch.items()}).loss
        torch.testing.assert_close(loss, own, atol=1e-5, rtol=1e-5)
    assert losses.shape == (4,)


@pytest.mark.parametrize("engine", ["book_keeping", "opacus"])
@pytest.mark.parametrize("name", ["roberta-lora", "gpt2-lm"])
def test_a_private_step_leaves_the_clipped_sum(name, engine):
    model, batch = build(tiny(name), device="cpu")
    model.eval()  # without dropout, so that single examples compare
    expected = {parameter: torch.zeros_like(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for row in range(4):
        loss = losses_of(model, {key: value[row : row + 1] for key, value in batch.items()}).sum()
        gradients = torch.autograd.grad(loss, list(expected))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for total, gradient in zip(expected.values(), gradients):
            total += gradient / (norm * RAISED + 0.01)  # automatic clipping to C = 1
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with stepping(engine, model, batch, BenchArguments()) as step:
        for _ in range(2):  # nothing stays of the first one
            step()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "views"), [*((name, 1) for name in ALL_WORKS), ("vit-full", 2)])
def test_every_work_is_stepped_in_pairs(name, views):
    seconds = paired_seconds(tiny(name), "book_keeping", BenchArguments(pairs=2, views=views))
    assert seconds.shape == (2, 2)
    assert (seconds > 0).all()


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_are_printed_and_written(tmp_path, capsys, monkeypatch, fresh):
    """Memory is measured in processes of their own; that takes its time, so that it is seldom done here."""
    if not fresh:
        monkeypatch.setattr(bench_engine, "in_fresh_process", lambda function, *arguments: 1.0 + abs(function(*arguments)))
    path = tmp_path / "new" / "bench.jsonl"
    bench_engine.main([*FLAGS, "--works=vit-full", "--engines=book_keeping", "--norm_rule=ghost", f"--output={path}"])
    (result,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (result["work"], result["engine"], result["device"]) == ("vit-full", "book_keeping", "cpu")
    assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]
    assert result["plain_mib"] > 0
    assert result["settings"]["norm_rule"] == "ghost"
    assert f"×{result['ratio']:.3f}" in capsys.readouterr().out


def test_an_unknown_work_ends_in_one_line():
    with pytest.raises(SystemExit, match=r"^error: --works must be of roberta-full, .* got 'bert'"):
        bench_engine.main([*FLAGS, "--works=bert"])
