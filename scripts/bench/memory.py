"""Peak memory of a private step, of a plain one, and of one that forms each example's gradient: exact, and without memory.

    python -m scripts.bench.memory
    python -m scripts.bench.memory --works qwen-7b --layers 2 --output out/memory.jsonl

Tensors have shapes and no memory (`doppler_hf.run.planning.memory`), so that a model of any size is measured anywhere. A
step is a draw of two micro-batches. Weights, two states of the optimizer for each trained one, gradients or clipped sums,
and all that a pass keeps are counted: AdamW has two states, too. *Formed* is the plain step and the gradient of each example
of a micro-batch, which Opacus keeps; not measured, but added up. RoBERTa-base and GPT-2 compute in float32. Llama and Qwen
compute in bfloat16, and with LoRA their frozen weights are bfloat16.
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.losses import per_sample_losses, without_adapters
from doppler_hf.run.planning.memory import move_in, without_memory
from scripts.bench.measure import MIB, append_json_line, chosen
from scripts.training.arguments import one_line_errors, parse_args

# Of each the type of model, its configuration, and whether it computes in bfloat16.
WORKS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "roberta-base": ("roberta", {"vocab_size": 50_265, "max_position_embeddings": 4098, "type_vocab_size": 1}, False),
    "gpt2": ("gpt2", {"n_positions": 4096}, False),
    "llama-1b": ("llama", {
        "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "tie_word_embeddings": True,
    }, True),
    "qwen-7b": ("qwen2", {
        "vocab_size": 152_064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18_944, "tie_word_embeddings": False,
    }, True),
}  # fmt: skip
SIZES = ((8, 512), (1, 4096))  # examples, tokens of each
WAYS = ("lora", "full")
COLUMNS = ("", "examples × tokens", "plain, MiB", "private", "formed", "private / plain", "formed / plain")
CONTRACT = {"lora": 1.05, "full": 1.15}  # of a plain step's peak, at most


@dataclass
class BenchArguments:
    """What is measured."""

    works: str = field(default=",".join(WORKS), metadata={"help": f"Of {', '.join(WORKS)}; comma separated."})
    ways: str = field(default=",".join(WAYS), metadata={"help": "lora, of rank 16 on all linear layers, and full."})
    layers: int = field(default=0, metadata={"help": "Layers of each model; 0 for its own."})
    output: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


def build(name: str, way: str, *, layers: int, **changes: Any) -> nn.Module:
    """Return a model without memory."""
    model_type, options, in_bf16 = WORKS[name]
    more = {"num_hidden_layers": layers} if layers else {}
    config = AutoConfig.for_model(model_type, **options | more | changes)
    config.use_cache = False
    head = AutoModelForSequenceClassification if model_type == "roberta" else AutoModelForCausalLM
    with torch.device("meta"):
        model = head.from_config(config, dtype=torch.bfloat16 if in_bf16 and way == "lora" else torch.float32)
        if way == "lora":
            task = "SEQ_CLS" if model_type == "roberta" else "CAUSAL_LM"
            lora = LoraConfig(r=16, target_modules="all-linear", task_type=task, fan_in_fan_out=model_type == "gpt2")
            model = get_peft_model(model, lora)
    return model.train()


def peak_bytes(name: str, way: str, *, size: int, length: int, is_private: bool, **of_model: Any) -> tuple[int, int]:
    """Return the most bytes in use during a step, and how many weights are trained."""
    model = build(name, way, **of_model)
    base, in_bf16 = without_adapters(model), WORKS[name][2]
    with without_memory(on_cuda=True) as peak, contextlib.ExitStack() as stack:
        move_in(model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        states = [torch.zeros(weight.shape) for weight in trained for _ in range(2)]
        ids = torch.zeros(size, length, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids[:, 0] if WORKS[name][0] == "roberta" else ids}
        clipped = ClippedGradients(model)
        clipped.on_accelerator = True
        if is_private:
            stack.enter_context(clipped)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16):
                losses = per_sample_losses(model, inputs, base_model=base) if is_private else model(**inputs).loss
            if is_private:
                clipped.backward(losses)
            else:
                losses.backward()
            del losses
        del states
    return peak.most, sum(weight.numel() for weight in trained)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a line of the table for each."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        works, ways = chosen("--works", args.works, WORKS), chosen("--ways", args.ways, WAYS)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name, way, (size, length) in itertools.product(works, ways, SIZES):
        common = {"size": size, "length": length, "layers": args.layers}
        (plain, trained), (private, _) = (peak_bytes(name, way, is_private=each, **common) for each in (False, True))
        formed = plain + 4 * size * trained
        print(
            f"| {name}, {way} | {size} × {length:,} | {plain / MIB:,.0f} | {private / MIB:,.0f} | {formed / MIB:,.0f} | "
            f"**{private / plain:.2f}** | {formed / plain:.2f} |",
            flush=True,
        )
        row = {"work": name, "way": way, **common, "plain": plain, "private": private, "formed": formed}
        append_json_line(row, args.output)


if __name__ == "__main__":
    main()
