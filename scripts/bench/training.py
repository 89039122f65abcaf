"""Overhead of a private training run: `DopplerTrainer` against `Trainer` on SST-2, in turn, in one process.

    python -m scripts.bench.training --dataset_dir glue/sst2 --tokenizer roberta-base [--lora_r 8] [--output out/bench.jsonl]

Both train a RoBERTa of random weights (6 layers of 384, unless said otherwise) with their own samplers, collation,
optimizers and schedules, and the private one with noise and a filter. `Trainer` shuffles and pads batches of
`batch_size`; `DopplerTrainer` makes random draws, sorts each by length and cuts it into pieces of that size on average.
Draws differ in size, so that what is compared is seconds per example. Every run gets further examples, the same ones for
both; its first step is not timed. The result is the median of the ratios, with its quartiles. Noise and optimizer cost the
same for a step of any size, so that `accumulation` matters; the time that a step waits for its noise is also given
separately. Memory is the most that a run, from its start, adds to the model and the data, in a fresh process for each.
"""

import contextlib
import gc
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.errors import Refusal
from doppler_hf.privacy import GaussianMechanism
from scripts.bench.measure import (
    MIB,
    append_json_line,
    in_fresh_process,
    memory_now,
    memory_peak,
    quartiles,
    seconds_of,
    settings,
)
from scripts.training.arguments import one_line_errors, parse_args
from scripts.training.data_sources import load_glue
from scripts.training.lora import LoraArguments, add_lora


@dataclass
class BenchArguments:
    """The settings of the trainings."""

    dataset_dir: str = field(metadata={"help": "Folder with train.parquet and validation.parquet of SST-2."})
    tokenizer: str = field(metadata={"help": "Hub name or folder of the tokenizer."})
    engine: str = field(default="book_keeping", metadata={"help": "grad_sample_engine of DopplerTrainer."})
    lora_r: int = field(default=0, metadata={"help": "Rank of adapters on query and value; 0 trains the whole model."})
    batch_size: int = field(default=32, metadata={"help": "Examples of a forward pass."})
    accumulation: int = field(default=8, metadata={"help": "Forward passes of a step."})
    max_tokens_per_micro_batch: int | None = field(default=None, metadata={"help": "Of DopplerTrainer."})
    train_sampling_strategy: str = field(
        default="random",
        metadata={
            "help": "Of Trainer. group_by_length spares it most padding too.",
            "choices": ["random", "group_by_length"],
        },
    )
    steps: int = field(default=4, metadata={"help": "Steps of a run that are timed."})
    pairs: int = field(default=5, metadata={"help": "How many pairs of runs."})
    layers: int = field(default=6, metadata={"help": "Layers of the model."})
    hidden: int = field(default=384, metadata={"help": "Width of the model; every head has 64 dimensions at most."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    bf16: bool = field(default=False, metadata={"help": "Compute under autocast."})
    threads: int = field(default=2, metadata={"help": "torch's threads."})
    output: str | None = field(default=None, metadata={"help": "File to which the result is added as a line of JSON."})


def build(args: BenchArguments, *, vocabulary: int) -> nn.Module:
    """Return the model, the same one at every call."""
    set_seed(0)
    config = RobertaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
    )
    lora = LoraArguments(lora_r=args.lora_r, lora_target_modules="query,value" if args.lora_r else None)
    return add_lora(RobertaForSequenceClassification(config), lora, task_type="SEQ_CLS")


class Clock(TrainerCallback):
    """Notes time, examples, padded tokens and seconds of noise at the end of every step."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = np.zeros(3)
        self._marks = [np.array([time.perf_counter(), *self._seen])]
        self.hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen += (len(kwargs["input_ids"]), kwargs["input_ids"].numel(), 0.0)

    @contextlib.contextmanager
    def counting_noise(self, device: str) -> Iterator[None]:
        """Measure how long the sums wait for their noise."""
        privatize = GaussianMechanism.privatize

        def timed(*args: Any, **kwargs: Any) -> Any:
            seconds_of(lambda: None, device=device)  # the gradients' own queue is done
            result = {}
            self._seen[2] += seconds_of(lambda: result.update(privatize(*args, **kwargs)), device=device)
            return result

        with mock.patch.object(GaussianMechanism, "privatize", timed):
            yield

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Note time and counts at the end of a step."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self._marks.append(np.array([time.perf_counter(), *self._seen]))

    def per_example(self) -> np.ndarray:
        """Return seconds, padded tokens and seconds of noise per example of all steps but the first, shape (3,)."""
        seconds, examples, tokens, noise = self._marks[-1] - self._marks[1]
        return np.array([seconds, tokens, noise]) / examples

    def first(self) -> float:
        """Return the seconds until the end of the first step, the checks before it included."""
        return float(self._marks[1][0] - self._marks[0][0])


def train(
    model: nn.Module, examples: Dataset, collator: Callable[..., Any], args: BenchArguments, *, private: bool
) -> Clock:
    """Train for an epoch, and return what was noted of it."""
    clock = Clock(model)
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "per_device_train_batch_size": args.batch_size,
            "gradient_accumulation_steps": args.accumulation,
            "num_train_epochs": 1,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": args.device == "cpu",
            "bf16": args.bf16,
        }
        privacy = {
            "noise_multiplier": 1.0,
            "low_pass_filter": "first-order-v1",
            "grad_sample_engine": args.engine,
            "max_tokens_per_micro_batch": args.max_tokens_per_micro_batch,
        }
        stock = {"train_sampling_strategy": args.train_sampling_strategy}
        trainer = (DopplerTrainer if private else Trainer)(
            model=model,
            args=DopplerTrainingArguments(**common, **privacy) if private else TrainingArguments(**common, **stock),
            train_dataset=examples,
            data_collator=collator,
            callbacks=[clock],
        )
        # A summary for every run would hide the result.
        with contextlib.redirect_stdout(io.StringIO()), clock.counting_noise(args.device):
            trainer.train()
    clock.hook.remove()
    return clock


def peak_memory(examples: Dataset, tokenizer: PreTrainedTokenizerBase, args: BenchArguments, private: bool) -> float:
    """Return the memory that a run needs beyond model and data, in MiB, in a process that has done nothing else."""
    torch.set_num_threads(args.threads)
    collator = DataCollatorWithPadding(tokenizer)
    model = build(args, vocabulary=len(tokenizer)).to(args.device)
    gc.collect()
    before = memory_now(args.device)
    train(model, examples, collator, args, private=private)
    return (memory_peak(args.device) - before) / MIB


def main(argv: Sequence[str] | None = None) -> None:
    """Train in turn, and print one line."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        data = load_glue("sst2", args.dataset_dir)["train"]
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        size = args.batch_size * args.accumulation * (args.steps + 1)
        if size * args.pairs > len(data):
            raise Refusal(
                "too-many-pairs",
                f"--pairs must be at most {len(data) // size}, since a pair needs {size} of {len(data)} examples, got "
                f"{args.pairs}.",
            )
    torch.set_num_threads(args.threads)
    data = data.shuffle(seed=0).select(range(size * args.pairs))
    tokenized = data.map(
        lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=128),
        batched=True,
        remove_columns=[name for name in data.column_names if name != "label"],
    )
    collator = DataCollatorWithPadding(tokenizer)
    models = {private: build(args, vocabulary=len(tokenizer)) for private in (False, True)}
    measured = np.array(
        [
            [
                train(model, tokenized.select(range(start, start + size)), collator, args, private=private).per_example()
                for private, model in models.items()
            ]
            for start in range(0, len(tokenized), size)
        ]
    )  # pair × (plain, private) × (seconds, tokens, seconds of noise)
    q1, ratio, q3 = quartiles(measured[:, 1, 0] / measured[:, 0, 0])
    (plain_s, plain_tokens, _), (private_s, private_tokens, noise_s) = np.median(measured, axis=0).tolist()
    first = tokenized.select(range(size))
    plain_mib, private_mib = (in_fresh_process(peak_memory, first, tokenizer, args, private) for private in (False, True))
    print(
        f"sst2 {args.engine} time ×{ratio:.3f} ({q1:.3f} to {q3:.3f}): {1000 * plain_s:.4g} → {1000 * private_s:.4g} ms per "
        f"example; memory ×{private_mib / plain_mib:.2f}: {plain_mib:.0f} → {private_mib:.0f} MiB; padded tokens per "
        f"example {plain_tokens:.1f} → {private_tokens:.1f}; noise {noise_s / private_s:.2%} of a step"
    )
    result = {
        "work": "sst2",
        "engine": args.engine,
        "ratio": ratio,
        "ratio_quartiles": [q1, q3],
        "plain_s": plain_s,
        "private_s": private_s,
        "noise_s": noise_s,
        "plain_tokens": plain_tokens,
        "private_tokens": private_tokens,
        "plain_mib": plain_mib,
        "private_mib": private_mib,
        **settings(args),
    }
    append_json_line(result, args.output)


if __name__ == "__main__":
    main()
