"""Seconds from `train()` to the first step: `DopplerTrainer` against `Trainer`, in turn, in one process.

    python -m scripts.bench.start [--lora_r 8] [--layers 12 --hidden 768] [--tokens 64] [--output out/bench.jsonl]

A RoBERTa of random weights with texts of up to `tokens` random tokens, evaluated every epoch. A step is not made: what is
timed ends where the loop begins its first. The optimizer's compilation, of a user's first training, is done before.
"""

import contextlib
import io
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from scripts.bench.measure import append_json_line, settings
from scripts.training.arguments import one_line_errors, parse_args


@dataclass
class BenchArguments:
    """The settings."""

    lora_r: int = field(default=0, metadata={"help": "Rank of adapters on all linear layers; 0 trains the whole model."})
    layers: int = field(default=12, metadata={"help": "Layers of the model."})
    hidden: int = field(default=768, metadata={"help": "Width of the model; every head has 64 dimensions."})
    tokens: int = field(default=64, metadata={"help": "The longest text."})
    shortest: int = field(default=4, metadata={"help": "The shortest text."})
    examples: int = field(default=2000, metadata={"help": "How many texts."})
    pairs: int = field(default=5, metadata={"help": "How often each is started."})
    device: str = field(default="cpu", metadata={"help": "cpu.", "choices": ["cpu"]})
    threads: int = field(default=2, metadata={"help": "torch's threads."})
    output: str | None = field(default=None, metadata={"help": "JSON-lines file to which the result is appended."})


class Started(Exception):
    """The first step begins."""


class Stop(TrainerCallback):
    """Ends a training where its first step begins."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """End it."""
        raise Started


def texts(args: BenchArguments) -> Dataset:
    """Return texts of random tokens."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(args.shortest, args.tokens + 1, size=args.examples)
    rows = [generator.integers(10, 50_000, size=length).tolist() for length in lengths]
    return Dataset.from_list(
        [{"input_ids": row, "attention_mask": [1] * len(row), "labels": index % 2} for index, row in enumerate(rows)]
    )


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad examples to the longest."""
    longest = max(len(example["input_ids"]) for example in examples)
    batch = {
        name: torch.tensor([[*example[name], *[fill] * (longest - len(example[name]))] for example in examples])
        for name, fill in (("input_ids", 1), ("attention_mask", 0))
    }
    return batch | {"labels": torch.tensor([example["labels"] for example in examples])}


def seconds_to_first_step(trainer: Trainer) -> float:
    """Return the seconds from the call of `train` to the beginning of the first step."""
    trainer.add_callback(Stop())
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Started):
        trainer.train()
    return time.perf_counter() - start


def main() -> None:
    """Time both in turn, and print the medians and their difference."""
    (args,) = parse_args(BenchArguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = RobertaConfig(
        num_hidden_layers=args.layers, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_attention_heads=max(1, args.hidden // 64), vocab_size=50_265, max_position_embeddings=514,
    )  # fmt: skip
    data, evaluation = texts(args), texts(args).select(range(64))
    common: dict[str, Any] = {
        "per_device_train_batch_size": 32, "num_train_epochs": 1, "eval_strategy": "epoch", "report_to": "none",
        "use_cpu": True,
    }  # fmt: skip
    kinds = (
        (Trainer, TrainingArguments, {"learning_rate": 1e-4}),
        (DopplerTrainer, DopplerTrainingArguments, {"target_epsilon": 8.0, "learning_rate": 1e-3}),
    )
    model: Any = RobertaForSequenceClassification(config)
    if args.lora_r:
        lora = LoraConfig(r=args.lora_r, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["classifier"])
        model = get_peft_model(model, lora)
    rows = []
    for _ in range(args.pairs):
        row = []
        for trainer_class, args_class, options in kinds:
            with tempfile.TemporaryDirectory() as folder:
                trainer = trainer_class(
                    model=model, args=args_class(output_dir=folder, disable_tqdm=True, **common, **options),
                    train_dataset=data, eval_dataset=evaluation, data_collator=collate,
                )  # fmt: skip
                row.append(seconds_to_first_step(trainer))
        rows.append(row)
    stock, ours = np.median(rows, axis=0).tolist()
    beyond = np.median([mine - theirs for theirs, mine in rows]).item()
    print(f"Trainer {stock:.2f} s, DopplerTrainer {ours:.2f} s, beyond {beyond:.2f} s (median of {args.pairs})")
    append_json_line(settings(args) | {"stock": stock, "ours": ours, "beyond": beyond}, args.output)


if __name__ == "__main__":
    with one_line_errors():
        main()
