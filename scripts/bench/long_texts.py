"""Overhead of a private run of a causal model on texts of unequal lengths, up to 512 tokens, and of DPO's pairs of answers.

    python -m scripts.bench.long_texts --tokenizer roberta-base [--works causal,dpo-lora] [--output out/bench.jsonl]

Each work is trained with `Trainer`, or TRL's `DPOTrainer`, and with ours in turn, in one process. The model is a Llama of
random weights, and the texts are random words: only their lengths matter here. Half of the texts have at most 180 tokens.
`Trainer` shuffles its batches (`plain`), and then also sorts them by length (`sorted`); `DPOTrainer` shuffles. Reference
log-probabilities are computed before training. The result is the median of the ratios of seconds per row of the model's
input, with its quartiles. The first step of a run is not timed.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from scripts.bench.measure import append_json_line, chosen, quartiles, settings
from scripts.bench.training import Clock
from scripts.training.arguments import one_line_errors, parse_args
from scripts.training.lora import LoraArguments, add_lora

WORKS = ("causal", "causal-lora", "dpo-lora")
LONGEST, MEDIAN = 512, 180


@dataclass
class BenchArguments:
    """The settings of the runs."""

    tokenizer: str = field(metadata={"help": "Hub name or folder of the tokenizer."})
    works: str = field(default=",".join(WORKS), metadata={"help": f"Of {', '.join(WORKS)}, with commas between."})
    batch_size: int = field(default=8, metadata={"help": "Texts, or pairs, of a forward pass."})
    accumulation: int = field(default=8, metadata={"help": "Forward passes of a step."})
    steps: int = field(default=2, metadata={"help": "Steps of a run that are timed."})
    pairs: int = field(default=3, metadata={"help": "How many pairs of runs."})
    layers: int = field(default=6, metadata={"help": "Layers of the model."})
    hidden: int = field(default=384, metadata={"help": "Width of the model; every head has 64 dimensions at most."})
    longest: int = field(default=LONGEST, metadata={"help": "Tokens of the longest text, or pair of prompt and answer."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    threads: int = field(default=2, metadata={"help": "torch's threads."})
    output: str | None = field(default=None, metadata={"help": "File to which each result is added as a line of JSON."})


def build(args: BenchArguments, *, vocabulary: int, lora: bool) -> nn.Module:
    """Return the model, the same one at every call."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.longest,
    )
    adapters = LoraArguments(lora_r=8 if lora else 0, lora_target_modules="q_proj,v_proj" if lora else None)
    return add_lora(LlamaForCausalLM(config), adapters, task_type="CAUSAL_LM")


def lengths(count: int, *, longest: int, random: np.random.Generator) -> list[int]:
    """Return lengths of texts: log-normal, so that a few are long, cut off at the longest."""
    drawn = random.lognormal(np.log(MEDIAN / LONGEST * longest), 0.6, count)
    return np.clip(drawn, 4, longest).astype(int).tolist()


def texts_of(count: int, tokenizer: PreTrainedTokenizerBase, args: BenchArguments, *, seed: int) -> Dataset:
    """Return texts of random tokens."""
    random = np.random.default_rng(seed)
    rows = [
        random.integers(10, len(tokenizer) - 10, n).tolist() for n in lengths(count, longest=args.longest, random=random)
    ]
    return Dataset.from_dict({"input_ids": rows})


def pairs_of(count: int, tokenizer: PreTrainedTokenizerBase, args: BenchArguments, *, seed: int) -> Dataset:
    """Return prompts with two answers each; a prompt has as many words as an answer on average."""
    random = np.random.default_rng(seed)
    words = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for"]

    def text(size: int) -> str:
        return " " + " ".join(random.choice(words, size))

    sizes = zip(*(lengths(count, longest=args.longest // 2, random=random) for _ in range(3)), strict=True)
    columns = zip(*([text(max(1, size - 2)) for size in row] for row in sizes), strict=True)
    return Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), map(list, columns), strict=True)))


def train(work: str, tokenizer: PreTrainedTokenizerBase, args: BenchArguments, way: str, *, seed: int) -> float:
    """Train for an epoch in one way, plain, sorted or private, and return the seconds for a row of the model's input."""
    # `DPOTrainer` adds an adapter to its model, so every run has a model of its own.
    model = build(args, vocabulary=len(tokenizer), lora=work.endswith("lora")).to(args.device)
    texts: Callable[..., Dataset] = pairs_of if work.startswith("dpo") else texts_of
    rows = texts(args.batch_size * args.accumulation * (args.steps + 1), tokenizer, args, seed=seed)
    clock = Clock(model)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": args.batch_size,
            "gradient_accumulation_steps": args.accumulation,
            "num_train_epochs": 1,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": args.device == "cpu",
        }
        privacy = {"noise_multiplier": 1.0, "low_pass_filter": "first-order-v1"}
        common |= privacy if way == "private" else {}
        make = _dpo if work.startswith("dpo") else _causal
        # Start lines and progress would hide the result.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trainer = make(model, rows, tokenizer, common, way=way, longest=args.longest)
            trainer.add_callback(clock)
            trainer.train()
    clock.hook.remove()
    return float(clock.per_example()[0])


def _causal(
    model: nn.Module, rows: Dataset, tokenizer: PreTrainedTokenizerBase, common: dict[str, Any], *, way: str, longest: int
) -> Trainer:
    if way == "sorted":
        common["train_sampling_strategy"] = "group_by_length"
    private = way == "private"
    return (DopplerTrainer if private else Trainer)(
        model=model,
        args=(DopplerTrainingArguments if private else TrainingArguments)(**common),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def _dpo(
    model: nn.Module, rows: Dataset, tokenizer: PreTrainedTokenizerBase, common: dict[str, Any], *, way: str, longest: int
) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer

    private = way == "private"
    common |= {"max_length": longest, "precompute_ref_log_probs": True, "gradient_checkpointing": False, "bf16": False}
    return (DopplerDPOTrainer if private else DPOTrainer)(
        model=model,
        args=(DopplerDPOConfig if private else DPOConfig)(**common),
        train_dataset=rows,
        processing_class=tokenizer,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train in turn, and print one line for each work and way."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        works = chosen("--works", args.works, WORKS)
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    torch.set_num_threads(args.threads)
    for work in works:
        ways = ("plain", "private") if work.startswith("dpo") else ("plain", "sorted", "private")
        seconds = np.array([[train(work, tokenizer, args, way, seed=seed) for way in ways] for seed in range(args.pairs)])
        *stock, private = np.median(seconds, axis=0).tolist()
        for place, (way, before) in enumerate(zip(ways, stock, strict=False)):
            q1, ratio, q3 = quartiles(seconds[:, -1] / seconds[:, place])
            times = f"{1000 * before:.4g} → {1000 * private:.4g} ms per row"
            print(f"{work}, beside {way}: time ×{ratio:.2f} ({q1:.2f} to {q3:.2f}): {times}", flush=True)
            result = {"work": work, "beside": way, "ratio": ratio, "ratio_quartiles": [q1, q3]}
            append_json_line(result | {"stock_s": before, "private_s": private} | settings(args), args.output)


if __name__ == "__main__":
    main()
