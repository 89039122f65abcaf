"""`doppler-hf estimate`: what is counted is what is kept, and several processes are not invented."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BertConfig, GPT2Config, T5Config, ViTConfig

from doppler_hf.cli import main
from doppler_hf.cli.random_model import TASKS
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.run.planning import estimate as module
from doppler_hf.run.planning.estimate import Setting, bytes_of_step, seconds_of_step
from doppler_hf.run.planning.memory import Peak
from scripts.bench import estimates
from tests.support.tiers import further, thorough

SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
CONFIGS = {
    "text-classification": BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL),
    "causal-lm": GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0),
    "image-classification": ViTConfig(image_size=16, patch_size=8, **SMALL),
    "text2text-generation": T5Config(
        vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, decoder_start_token_id=0, pad_token_id=0
    ),
}
CONFIGS |= {"text-generation": CONFIGS["causal-lm"]}
CONFIGS |= dict.fromkeys(
    ("token-classification", "question-answering", "fill-mask", "multiple-choice"), CONFIGS["text-classification"]
)


def words(folder, task, *more):
    CONFIGS[task].save_pretrained(folder)
    length = [] if task == "image-classification" else ["--length", "8"]
    return ["estimate", "--model", str(folder), "--task", task, "--batch-size", "8", *length, *more]


@pytest.mark.parametrize("task", further([*CONFIGS], quick=["causal-lm", "question-answering"]))
def test_every_part_of_a_model_is_estimated(task, tmp_path, capsys):
    assert main(words(tmp_path, task, "--micro-batch=2", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passes"] == 4
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["peak_bytes"] == pytest.approx(sum(found["bytes"].values()))
    assert min(found["seconds"][name] for name in ("passes", "noise", "optimizer")) > 0
    assert found["seconds"]["between processes"] == found["bytes"]["earlier noise"] == 0


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # PEFT, of the layers of GPT-2
@pytest.mark.parametrize("task", TASKS)
def test_the_memory_of_every_task_is_estimated_with_adapters_too(task, tmp_path, capsys):
    for more in ([], ["--lora-r=2", "--lora-target-modules=all-linear"]):
        assert main(words(tmp_path, task, "--memory=1", "--json", *more)) == 0
        assert json.loads(capsys.readouterr().out)["proposed"] == 8


def test_an_adapter_is_refused_with_the_model_to_which_it_belongs(tmp_path, capsys):
    folder, base = tmp_path / "adapter", str(tmp_path / "base")
    LoraConfig(base_model_name_or_path=base).save_pretrained(folder)
    given = words(tmp_path / "base", "text-classification", "--memory=1")
    assert main([*given, "--model", str(folder)]) == 2
    told = capsys.readouterr().err
    assert f"{folder} has an adapter (adapter_config.json) and no model" in told
    for mend in (f"--model {base}", "--lora-r", "--trainable-parameters"):
        assert mend in told
    assert main([*given, "--model", base, "--lora-r=2"]) == 0  # the mend


def test_a_micro_batch_is_proposed_for_a_card(tmp_path, capsys):
    found = []
    for gib in (1, 5e-4):
        assert main(words(tmp_path, "causal-lm", "--json", f"--memory={gib}")) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [each["proposed"] for each in found] == [8, 4]  # of a batch of 8
    assert main(words(tmp_path, "causal-lm", "--json", "--memory=1", "--processes=4")) == 0
    assert json.loads(capsys.readouterr().out)["proposed"] == 2  # of which each process has two
    assert found[1]["peak_bytes"] <= 0.9 * 5e-4 * 2**30 < found[0]["peak_bytes"]
    assert found[0]["seconds"] == {}
    assert main(words(tmp_path, "causal-lm", "--memory=1e-6")) == 0
    assert "none, not even 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--processes", "2"], "--bandwidth must be positive and finite for 2 processes; got None"),
        (["--processes", "2", "--bandwidth", "0"], "--bandwidth must be positive and finite for 2 processes; got 0"),
        (["--bandwidth", "0"], "--bandwidth has no effect with one process"),
        (["--memory", "1", "--micro-batch", "2"], "--micro-batch has no effect beside --memory"),
        (["--memory", "1", "--processes", "2", "--bandwidth", "1e9"], "--bandwidth has no effect beside --memory"),
        (["--processes", "2", "--bandwidth", "inf"], "--bandwidth must be positive and finite for 2 processes; got inf"),
        (["--length", "0"], "--length must be from 1 to 10,000,000; got 0"),
        (["--length", "-1"], "--length must be from 1 to 10,000,000; got -1"),
        (["--length", "1e14"], "--length must be from 1 to 10,000,000; got 1"),
        (["--lora-r", "-1"], "--lora-r must be from 0 to 1,000,000; got -1"),
        (["--lora-r", "1e14"], "--lora-r must be from 0 to 1,000,000; got 1"),
        (["--micro-batch", "1e14"], "--micro-batch must be from 1 to 1,000,000; got 1"),
        (["--micro-batch", "1e6", "--length", "1e4"], "make more than 1,000,000,000 tokens of a pass"),
        (["--lora-r", "1e6", "--micro-batch", "1e6"], "GiB, and this machine has"),
        *(
            (["--memory", value], f"--memory must be positive and finite; got {value}")
            for value in ("0", "-1", "nan", "inf")
        ),
        (["--micro-batch", "0"], "--micro-batch must be from 1 to 1,000,000; got 0"),
        (["--batch-size", "0"], "must be at least 1; got 0, 8 and 1"),
        (["--task", "image-classification"], "--length 8 has no effect on images"),
        (["--length", "17"], "--length must be at most the 16 positions of this model; got 17. Use --length 16."),
        (["--model", "/nowhere"], "Expected a hub name or a folder with a config.json as --model; got '/nowhere'"),
    ],
)
def test_what_cannot_be_estimated_is_refused(more, message, tmp_path, capsys):
    assert main(words(tmp_path, "text-classification", *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # PEFT, of the layers of GPT-2
def test_what_is_too_large_to_measure_is_counted_for_a_larger_card(tmp_path, capsys):
    given = words(tmp_path, "causal-lm", "--lora-r=1e6", "--lora-target-modules=all-linear")
    assert main([*given, "--micro-batch=1e4"]) == 2
    assert "or the memory of a larger card in GiB, as --memory 80" in capsys.readouterr().err
    assert main([*given, "--memory=80"]) == 0  # as advised
    assert "Largest per_device_train_batch_size" in capsys.readouterr().out
    assert main([*words(tmp_path, "causal-lm"), "--memory=80", "--processes=2"]) == 0
    assert "One step with micro-batches of 4" in capsys.readouterr().out


def test_a_missing_gpu_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = words(tmp_path, "causal-lm", "--device=cuda")
    assert main(given) == 2
    assert "as --memory 80; then nothing is timed" in capsys.readouterr().err
    assert main([*given, "--memory=80"]) == 0  # as advised


def seconds_of(work, device):
    """Passes of 1 s and 3 s an example; noise and steps of 2 s."""
    return 1.0 + 3.0 * len(work.args[0]["x"]) if isinstance(work, functools.partial) else 2.0


@pytest.mark.parametrize(("base", "kept"), [("sgd", 1), ("adam_bc", 2)])
def test_parts_add_up_to_a_step(base, kept, monkeypatch):
    monkeypatch.setattr(module, "seconds_of", seconds_of)
    monkeypatch.setattr(module, "_SAMPLED", 5)
    with torch.device("meta"):
        hollow = nn.Linear(4, 5, bias=False)
    model = nn.Linear(4, 5, bias=False)
    setting = Setting(
        batch_size=40, micro_batch=4, processes=2, bandwidth=160.0, base=base,
        low_pass_filter=LowPassFilter.parse("momentum"), noise_shape=NoiseShape.parse("banded:bands=3"),
    )  # fmt: skip

    def common(model):
        losses_of = lambda inputs: model(inputs["x"]).sum(dim=1)  # noqa: E731
        return dict(batch=lambda size: {"x": torch.ones(size, 4)}, losses_of=losses_of, setting=setting)

    # 20 examples of a process in 5 passes; 20 weights, of which 5 were timed, with the noise of half of them; all gradients
    # pass once, 80 bytes in 0.5 s.
    seconds = seconds_of_step(model, **common(model))
    assert seconds == pytest.approx({"passes": 65.0, "between processes": 0.5, "noise": 4.0, "optimizer": 8.0})
    # Bytes: 20 weights of 4; the filter's state, and Adam's; half of two earlier noises; the sums.
    found = bytes_of_step(hollow, **common(hollow), on_cuda=False)
    assert found.pop("a pass") >= 4 * 4 * (4 + 5)  # inputs and outputs
    assert found == {"weights": 80, "optimizer": 80 * kept, "earlier noise": 80, "clipped sums": 80}


@pytest.mark.parametrize("point", ["bert-lora", *thorough("vit", "gpt2", "bert")])
def test_the_peak_of_a_training_is_what_was_estimated(point, monkeypatch):
    args = estimates.BenchArguments(steps=1)
    point = replace(estimates.POINTS[point], batch_size=16, micro_batch=8)
    monkeypatch.setattr(estimates, "seconds_of_step", lambda *args, **kwargs: {})
    _, estimated = estimates.estimated(point, args)
    with Peak() as peak:
        monkeypatch.setattr(estimates, "forget_peak", lambda device: peak.forget())  # behind the first step
        estimates.train(point, args)
    assert estimated == pytest.approx(peak.most, rel=0.1)
