"""`doppler-hf estimate`: what is counted is what is kept, and several processes are not invented."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, Qwen2Config, ViTConfig

from doppler_hf.cli import main
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.privacy import ClippedGradients, token_losses
from doppler_hf.privacy.losses import per_sample_losses
from doppler_hf.run import estimate as module
from doppler_hf.run.estimate import Setting, estimate
from doppler_hf.workloads.lora import LoraArguments
from doppler_hf.workloads.random_model import RandomModel
from tests.support.devices import Peak

SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
CONFIGS = {
    "text-classification": BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL),
    "causal-lm": GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0),
    "image-classification": ViTConfig(image_size=16, patch_size=8, **SMALL),
}


def words(folder, task, *more):
    CONFIGS[task].save_pretrained(folder)
    length = [] if task == "image-classification" else ["--length", "8"]
    return ["estimate", "--model", str(folder), "--task", task, "--batch-size", "8", "--micro-batch", "2", *length, *more]


@pytest.mark.parametrize("task", CONFIGS)
def test_every_part_of_a_model_is_estimated(task, tmp_path, capsys):
    assert main(words(tmp_path, task, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passes"] == 4
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["peak_bytes"] == pytest.approx(sum(found["bytes"].values()))
    assert min(found["seconds"][name] for name in ("passes", "noise", "optimizer")) > 0
    assert found["seconds"]["between processes"] == found["bytes"]["earlier noise"] == 0


def test_it_says_where_it_can_read_the_peak_of_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_FORGET_PEAK", tmp_path / "none")
    assert main(words(tmp_path, "causal-lm")) == 2
    assert "must be there, got none. Run it on Linux, or with --device cuda." in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--processes", "2"], "--bandwidth must be given for 2 processes, got None"),
        (["--micro-batch", "0"], "must be at least 1, got 8, 0 and 1"),
        (["--task", "image-classification"], "--length must be left out for images, got 8"),
        (["--model", "/nowhere"], "must be a hub name or a folder with a config.json, got '/nowhere'"),
    ],
)
def test_what_cannot_be_estimated_is_refused(more, message, tmp_path, capsys):
    assert main(words(tmp_path, "text-classification", *more)) == 2
    assert message in capsys.readouterr().err


class Stopwatch:
    """Passes of 1 s and 3 s an example, 100 bytes and 10 an example; noise and steps of 2 s."""

    def __init__(self, device):
        self._size = 0

    def peak(self, work):
        self._size = len(work.args[0]["x"])
        return 100 + 10 * self._size

    def seconds(self, work):
        is_pass = isinstance(work, functools.partial)
        None if is_pass else work()
        return 1.0 + 3.0 * self._size if is_pass else 2.0


@pytest.mark.parametrize(("base", "kept"), [("sgd", 1), ("adam_bc", 2)])
def test_parts_add_up_to_a_step(base, kept, monkeypatch):
    monkeypatch.setattr(module, "Meter", Stopwatch)
    monkeypatch.setattr(module, "_SAMPLED", 5)
    model = nn.Linear(4, 5, bias=False)
    found = estimate(
        model,
        batch=lambda size: {"x": torch.ones(size, 4)},
        losses_of=lambda inputs: model(inputs["x"]).sum(dim=1),
        setting=Setting(
            batch_size=40, micro_batch=4, processes=2, bandwidth=160.0, engine="book_keeping", base=base,
            low_pass_filter=LowPassFilter.parse("momentum"), noise_shape=NoiseShape.parse("banded:bands=3"),
        ),
    )  # fmt: skip
    # 20 examples of a process in 5 passes; 20 weights, of which 5 were timed, with the noise of half of them; all gradients
    # pass once, 80 bytes in 0.5 s.
    assert found.seconds == pytest.approx({"passes": 65.0, "between processes": 0.5, "noise": 4.0, "optimizer": 8.0})
    # Bytes: 20 weights of 4; the filter's state, and Adam's; half of two earlier noises; the sums; a pass of 4 examples.
    assert found.bytes == {
        "weights": 80, "optimizer": 80 * kept, "earlier noise": 80, "clipped sums": 80, "a pass, or the gradient": 140
    }  # fmt: skip


IN_CHUNKS = """
import sys
from doppler_hf.cli import main
from doppler_hf.privacy import token_losses
from doppler_hf.run.estimate import Meter

token_losses.CHUNK = int(sys.argv[1])
Meter.seconds = lambda self, work: 1.0
main(sys.argv[2:])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_pass_of_a_language_model_takes_what_its_tensors_do(lora_r, tmp_path, monkeypatch):
    # 205 MB of logits, of which 67 MB are there at a time: less than 32 MB do not go back to the system at once.
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, intermediate_size=64)
    Qwen2Config(vocab_size=50_000, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes).save_pretrained(tmp_path)
    monkeypatch.setattr(token_losses, "CHUNK", 2**24)
    adapters = ["--lora-r", str(lora_r), "--lora-target-modules", "q_proj"] if lora_r else []
    line = ["estimate", "--model", str(tmp_path), "--task", "causal-lm", "--length", "512", "--batch-size", "8", "--json"]
    # A process whose memory nothing has used before.
    line = [sys.executable, "-c", IN_CHUNKS, str(token_losses.CHUNK), *line, "--micro-batch", "2", *adapters]
    found = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    lora = LoraArguments(lora_r=lora_r, lora_target_modules="q_proj" if lora_r else None)
    random = RandomModel(str(tmp_path), task="causal-lm", length=512, lora=lora, device="cpu")
    inputs = random.batch(2)
    with ClippedGradients(random.model, clipping="automatic") as clipped:
        losses_of = functools.partial(per_sample_losses, random.model, base_model=random.base)
        clipped.backward(losses_of(inputs))
        with Peak() as peak:
            clipped.backward(losses_of(inputs))
    # The system counts what the allocator holds, in pages, and libraries.
    assert found["bytes"]["a pass, or the gradient"] == pytest.approx(peak.most, rel=0.2)
    assert peak.most < 1.5 * 2 * 512 * 50_000 * 4  # all logits at once, and what is made of them, are more than three times
