"""How far `doppler-hf estimate` is off: its seconds and bytes of a step against those of a training with the trainer.

    export MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536
    python -m scripts.bench.estimates [--results out/estimates.jsonl]

Each setting is estimated in one child of the process, and trained for a few steps in another, on random examples of the same
length, all of which are drawn in each step (of shaped noise those of the step's group, about as many). The constants come
from half a micro-batch and a whole one; the steps have several of these, and noise and optimizer of all weights. On a CPU
seconds are the processor's, and memory is what is resident at most in the steps behind the first, above what was resident
after the training of a tiny model: libraries. The two variables let glibc give back what is freed, such as that of the check
before the first step.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, TrainerCallback, default_data_collator, set_seed

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli.random_model import RandomModel
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.run.planning.estimate import Setting, bytes_of_step, seconds_of_step
from scripts.bench.measure import MIB, append_json_line, chosen, forget_peak, in_child, memory_now, memory_peak
from scripts.training.arguments import one_line_errors, parse_args


@dataclass(frozen=True)
class Point:
    """A setting; the model is a type of transformers with its changes."""

    model_type: str
    task: str
    config: dict[str, Any]
    length: int | None
    batch_size: int
    micro_batch: int
    lora_r: int = 0
    base: str = "adam_bc"
    low_pass_filter: str = "momentum"
    noise_shape: str = "white"


BERT = {"vocab_size": 8000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
GPT2 = {"vocab_size": 8000, "n_embd": 256, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
VIT = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 64}
TEXT, LM, IMAGE = "text-classification", "causal-lm", "image-classification"
POINTS = {
    "bert": Point("bert", TEXT, BERT, 64, batch_size=64, micro_batch=16),
    "bert-shaped": Point("bert", TEXT, BERT | {"hidden_size": 512}, 32, 64, 8, noise_shape="banded:bands=4"),
    "bert-sgd": Point("bert", TEXT, BERT, 128, 32, 8, base="sgd", low_pass_filter="none"),
    "bert-second-order": Point("bert", TEXT, BERT, 32, 128, 32, low_pass_filter="second-order"),
    "bert-lora": Point("bert", TEXT, BERT, 64, 64, 16, lora_r=8),
    "gpt2": Point("gpt2", LM, GPT2, 64, 32, 8),
    "vit": Point("vit", IMAGE, VIT, None, 64, 16),
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
# With the libraries of each.
TINY = {
    "bert": Point("bert", TEXT, SMALL | {"vocab_size": 50}, 8, batch_size=4, micro_batch=2),
    "gpt2": Point("gpt2", LM, GPT2 | {"vocab_size": 50, "n_embd": 16, "n_layer": 1}, 8, batch_size=4, micro_batch=2),
    "vit": Point("vit", IMAGE, SMALL | {"image_size": 32}, None, batch_size=4, micro_batch=2),
}


@dataclass
class BenchArguments:
    """The settings of the measurement."""

    points: str = field(default=",".join(POINTS), metadata={"help": f"Of {', '.join(POINTS)}; comma separated."})
    steps: int = field(default=3, metadata={"help": "Steps of a training that count."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    threads: int = field(default=1, metadata={"help": "torch's threads."})
    results: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


class Clock(TrainerCallback):
    """Notes the seconds of steps, of the processor on a CPU, and lets memory be counted behind the first."""

    def __init__(self, device: str) -> None:
        self._device, self.marks = device, list[float]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        if state.global_step == 1:
            forget_peak(self._device)
        self.marks.append(time.perf_counter() if self._device == "cuda" else time.process_time() / torch.get_num_threads())


def made(point: Point, folder: str, device: str) -> RandomModel:
    """Return the model of a setting."""
    AutoConfig.for_model(point.model_type, **point.config).save_pretrained(folder)
    set_seed(0)
    return RandomModel(folder, task=point.task, length=point.length, lora_r=point.lora_r, device=device)


def estimated(point: Point, args: BenchArguments) -> tuple[float, float]:
    """Return the seconds and bytes that are estimated."""
    torch.set_num_threads(args.threads)
    setting = Setting(
        batch_size=point.batch_size, micro_batch=point.micro_batch, processes=1, bandwidth=None,
        base=point.base, low_pass_filter=LowPassFilter.parse(point.low_pass_filter),
        noise_shape=NoiseShape.parse(point.noise_shape),
    )  # fmt: skip
    found = []
    for device in (args.device, "meta"):
        with tempfile.TemporaryDirectory() as folder:
            random = made(point, folder, device)
        common = {"batch": random.batch, "losses_of": random.losses_of, "setting": setting}
        if device == "meta":
            found.append(bytes_of_step(random.model, **common, on_cuda=args.device == "cuda"))
        else:
            found.append(seconds_of_step(random.model, **common))
    seconds, most = (sum(each.values()) for each in found)
    return seconds, most


def trained(point: Point, args: BenchArguments) -> tuple[float, float]:
    """Return the seconds and bytes of steps of the trainer."""
    torch.set_num_threads(args.threads)
    train(TINY[point.model_type], args)
    before = memory_now(args.device)
    clock = train(point, args)
    return float(np.median(np.diff(clock.marks[1:]))), memory_peak(args.device) - before


def train(point: Point, args: BenchArguments) -> Clock:
    """Train for the steps that count and two more."""
    clock, size = Clock(args.device), NoiseShape.parse(point.noise_shape).bands * point.batch_size
    with tempfile.TemporaryDirectory() as folder:
        random = made(point, folder, args.device)
        batch = {name: values.cpu() for name, values in random.batch(size).items()}
        rows = [{name: values[row] for name, values in batch.items()} for row in range(size)]
        trainer = DopplerTrainer(
            model=random.model,
            args=DopplerTrainingArguments(
                output_dir=folder, noise_multiplier=1.0, max_steps=args.steps + 2, learning_rate=1e-3,
                per_device_train_batch_size=point.micro_batch,
                gradient_accumulation_steps=point.batch_size // point.micro_batch,
                base_optimizer=point.base,
                low_pass_filter=point.low_pass_filter, noise_shape=point.noise_shape, use_cpu=args.device == "cpu",
                report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
            ),
            train_dataset=rows,
            data_collator=default_data_collator,
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    return clock


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one line for each setting."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        points = chosen("--points", args.points, POINTS)
    for name in points:
        point = POINTS[name]
        seconds, most = in_child(estimated, point, args)
        real_seconds, real_most = in_child(trained, point, args)
        print(
            f"{name:18} step {seconds:7.3f} s of {real_seconds:7.3f} s ({seconds / real_seconds - 1:+.0%})  memory "
            f"{most / MIB:6.0f} of {real_most / MIB:6.0f} MiB ({most / real_most - 1:+.0%})",
            flush=True,
        )
        result = {"point": name, "seconds": seconds, "real_seconds": real_seconds, "bytes": most, "real_bytes": real_most}
        append_json_line(result | {"device": args.device, "threads": args.threads}, args.results)


if __name__ == "__main__":
    main()
