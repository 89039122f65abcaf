"""Memory and time of a process that has all weights, and of one that has a share of them.

    torchrun --nproc_per_node 2 -m scripts.bench.processes [--shards] [--full] [--results out/processes.jsonl]

A RoBERTa of random weights is trained on random tokens, with LoRA or all of it; without a launcher in one process. What is
measured is of the process with the most: the bytes of frozen and of trained weights that it keeps, and of the optimizer's
states, its memory between two steps and at most in a step (on a CPU all that is resident, libraries included), and the
median seconds of a step. The first step is not counted. The check before it, which costs the same each time, is left out.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.utils import _pytree as pytree
from transformers import RobertaConfig, RobertaForSequenceClassification, TrainerCallback, default_data_collator, set_seed

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.shards import part_here
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.lora import LoraArguments, add_lora
from scripts.bench.measure import MIB, append_json_line, memory_now, memory_peak


@dataclass
class BenchArguments:
    """The settings of the training."""

    shards: bool = field(default=False, metadata={"help": "Share the weights (FSDP2)."})
    full: bool = field(default=False, metadata={"help": "Train all weights, without adapters."})
    batch_size: int = field(default=8, metadata={"help": "Expected examples of a process and step."})
    length: int = field(default=64, metadata={"help": "Tokens of an example."})
    steps: int = field(default=6, metadata={"help": "Steps that count."})
    layers: int = field(default=12, metadata={"help": "Layers of the model."})
    hidden: int = field(default=768, metadata={"help": "Width of the model; every head has 64 dimensions at most."})
    vocabulary: int = field(default=50_265, metadata={"help": "Rows of the embedding."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapters on query and value."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    results: str | None = field(default=None, metadata={"help": "File to which the result is added as a line of JSON."})


class Meter(TrainerCallback):
    """Notes the memory of a process between steps and in them, and their seconds."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._begin = 0.0
        self.seconds: list[float] = []
        self.between: list[int] = []
        self.frozen = self.trained = self.states = 0

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begin to count anew behind the first step."""
        assert model is not None
        if state.global_step == 1:
            self.seconds.clear()
            self.frozen = sum(part_here(value).nbytes for value in model.parameters() if not value.requires_grad)
            self.trained = sum(part_here(value).nbytes for value in model.parameters() if value.requires_grad)
            self.states = sum(
                value.nbytes for value in pytree.tree_leaves([*optimizer.state.values()]) if isinstance(value, torch.Tensor)
            )
            forget_peak(self._device)
        self.between.append(memory_now(self._device))
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the seconds of a step, to the end of what it queued on the device."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begin)

    def found(self) -> dict[str, float]:
        """Return what this process has measured."""
        return {
            "frozen_mib": self.frozen / MIB,
            "trained_mib": self.trained / MIB,
            "states_mib": self.states / MIB,
            "between_mib": float(np.median(self.between[1:])) / MIB,
            "peak_mib": memory_peak(self._device) / MIB,
            "seconds": float(np.median(self.seconds)),
        }


def forget_peak(device: str) -> None:
    """Let the most memory that was ever in use be what is in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def build(args: BenchArguments) -> Any:
    """Return the model, the same one on every process."""
    set_seed(0)
    config = RobertaConfig(
        vocab_size=args.vocabulary,
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
    )
    if args.full:
        return RobertaForSequenceClassification(config)
    lora = LoraArguments(lora_r=args.lora_r, lora_target_modules="query,value")
    return add_lora(RobertaForSequenceClassification(config), lora, task_type="SEQ_CLS")


def measured(args: BenchArguments) -> dict[str, float]:
    """Train, and return what this process has measured."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(5, args.vocabulary, size=(512, args.length))
    data = Dataset.from_list([{"input_ids": row.tolist(), "labels": int(row[0] % 2)} for row in tokens])
    meter = Meter(args.device)
    fsdp: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}} if args.shards else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = DopplerTrainer(
            model=build(args),
            args=DopplerTrainingArguments(
                output_dir=folder, use_cpu=args.device == "cpu", noise_multiplier=1.0, learning_rate=1e-3,
                per_device_train_batch_size=args.batch_size, max_steps=args.steps + 1, grad_sample_self_check=False,
                logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, **fsdp,
            ),
            train_dataset=data,
            data_collator=default_data_collator,
            callbacks=[meter],
        )  # fmt: skip
        trainer.train()
    return meter.found()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on every process, and print the most of all."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
    mine = measured(args)
    found: list[Any] = [mine]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    result = {name: max(each[name] for each in found) for name in mine}
    way = "shares" if args.shards else "all weights"
    print(
        f"{len(found)} processes, {way:11} frozen {result['frozen_mib']:.1f} MiB, trained {result['trained_mib']:.1f} MiB, "
        f"states {result['states_mib']:7.1f} MiB, memory {result['between_mib']:7.1f} MiB, "
        f"at most {result['peak_mib']:7.1f} MiB, {result['seconds']:.2f} s a step"
    )
    append_json_line({"processes": len(found), **result, "settings": asdict(args)}, args.results)


if __name__ == "__main__":
    main()
