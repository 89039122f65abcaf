"""Every benchmark runs from its command line at a tiny size, appends what it measured, and measures what it says."""

import dataclasses
import json
import math

import pytest
import torch

from doppler_hf.privacy import token_losses
from scripts.bench import engine, estimates, noise, optimizer, rounding, small_networks
from tests.support.tiers import thorough

TINY = ["--scale=tiny", "--pairs=2", "--threads=1"]
# Module → command line, the flag of the file, and how many lines.
RUNS = {
    engine: ([*TINY, "--works=vit-full", "--engines=book_keeping", "--norm_rule=ghost"], "output", 1),
    estimates: (["--points=tiny", "--steps=1"], "results", 1),
    noise: (["--count=70000", "--pairs=2", "--threads=1", "--tensors=3"], "results", len(noise.WAYS)),
    optimizer: ([*TINY, "--works=galore"], "output", 1),
    rounding: (["--scale=tiny", "--groups=layers,padding", "--lengths=8", "--seeds=1"], "output", 14 * 2 + 5 * 2 * 3),
    small_networks: (["--steps=2", "--pairs=1", "--batch_size=20"], "output", 1),
}


@pytest.fixture
def here(monkeypatch):
    """Memory is measured in processes of their own, which take their time: not here."""
    for module in (engine, optimizer):
        monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: 1.0 + abs(function(*arguments)))
    monkeypatch.setattr(estimates, "in_child", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(estimates, "memory_now", lambda device: 0)  # the tests before this one have left memory to take
    monkeypatch.setitem(estimates.POINTS, "tiny", estimates.TINY["bert"])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "module",
    [engine, estimates, noise, optimizer, *thorough(rounding, small_networks)],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_results_are_printed_and_written(module, tmp_path, capfd):
    words, flag, number = RUNS[module]
    path = tmp_path / "new" / "results.jsonl"
    module.main([*words, f"--{flag}={path}"])
    found = lines(path)
    assert len(found) == number
    assert capfd.readouterr().out
    for result in found:
        times = [value for name, value in result.items() if name.endswith(("_s", "seconds", "ratio"))]
        assert all(math.isfinite(value) and value > 0 for value in times), result
        if "ratio_quartiles" in result:
            assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]


def test_unknown_names_end_in_one_line():
    for module in (engine, optimizer):
        with pytest.raises(SystemExit, match=r"^error: --works must be of .* got 'bert'"):
            module.main([*TINY, "--works=bert"])


def tiny(name, **changes):
    return engine.build(dataclasses.replace(engine.LARGE_WORKS[name], **engine.TINY | changes), device="cpu")


@pytest.mark.parametrize("name", ["llama-1b-lora", "gpt2"])
def test_private_losses_are_the_models_own_without_all_logits(name, monkeypatch):
    model, batch = tiny(name, batch=2)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    own, places = model(**batch).loss, []
    monkeypatch.setattr(token_losses, "CHUNK", 2 * 64 * 4)
    head = next(module for path, module in model.named_modules() if path.endswith("lm_head"))
    with head.register_forward_hook(lambda module, inputs, outputs: places.append(outputs.shape[1])):
        losses = engine.losses_of(model, batch)
    assert losses.shape == (2,)
    torch.testing.assert_close(losses.mean(), own)
    assert max(places) == 4


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # of torch, at the first layer
@pytest.mark.parametrize("kind", engine.PEERS)
@pytest.mark.parametrize("name", ["vit-base", "llama-1b-lora"])
def test_opacus_clips_as_a_loop_over_single_examples(name, kind):
    model, batch = tiny(name)
    trained = {path: weight for path, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad():  # so that examples are clipped
        for path, weight in trained.items():
            weight.mul_(200.0 if "lora_A" in path else 1.0)
    expected, norms = dict.fromkeys(trained, 0.0), []
    for row in range(len(batch["labels"])):
        loss = model(**{key: values[row : row + 1] for key, values in batch.items()}).loss
        gradients = torch.autograd.grad(loss, list(trained.values()))
        norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
        for path, gradient in zip(trained, gradients, strict=True):
            expected[path] = expected[path] + gradient * min(1.0, 1.0 / (norms[-1] + 1e-6))
    assert max(norms) > 1.0
    with engine.stepping(kind, model, batch, engine.BenchArguments()) as step:
        for _ in range(2):
            step()
    for path, weight in trained.items():
        torch.testing.assert_close(weight.grad, expected[path], atol=1e-5, rtol=1e-3)
