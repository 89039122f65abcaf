"""Overhead of privacy in time and memory: private steps against ordinary ones, in turn, in one process.

    python -m scripts.bench.engine --output out/bench.jsonl
    python -m scripts.bench.engine --works roberta-full,vit-full --engines book_keeping,opacus --pairs 10
    python -m scripts.bench.engine --device cuda --precision bf16 --works roberta-base,llama-1b-lora --pairs 100

A step is a forward and a backward pass that leave a gradient in `p.grad`: of the model's own loss for `plain`, the sum of
the clipped per-sample gradients for an engine, whose losses are computed as in a training. There is no noise and no
optimizer; `training.py` has both. A plain and a private step make a pair; the result is the median of the pairs' ratios,
with its quartiles. Memory is the most that a few steps add to model and batch, in a fresh process for each. Models have
random weights, and nothing is downloaded. `GradSampleModule` and `ghost clipping` are Opacus, as it comes.

On a CPU under Linux a step may spend more time on allocating memory than on privacy: glibc returns freed blocks to the
system, which costs page faults in the next step. With `--heap keep` it keeps them in both kinds of steps, as CUDA's
allocator, jemalloc and tcmalloc do; `--heap return` is glibc's default. Memory is always measured with the default.
"""

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    ResNetConfig,
    ResNetForImageClassification,
    set_seed,
)

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.losses import per_sample_losses, without_adapters
from scripts.bench.measure import (
    MIB,
    append_json_line,
    chosen,
    in_fresh_process,
    keep_freed_memory,
    memory_now,
    memory_peak,
    quartiles,
    seconds_in_turn,
    settings,
)
from scripts.studies.networks import Classifier, OfPixels, cifar_cnn, resnet50
from scripts.training.arguments import one_line_errors, parse_args
from scripts.training.lora import LoraArguments, add_lora


@dataclass(frozen=True)
class Work:
    """A model and a batch; `length` counts the tokens of an example, or the pixels of an image's side.

    `options` are more of the model's configuration. A `network` of the studies takes the place of a model of Transformers.
    """

    model_type: str
    head: type
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    lora_r: int = 0
    lora_target_modules: str | None = None  # by default PEFT's own choice, queries and values
    options: tuple[tuple[str, Any], ...] = ()
    network: Callable[[], nn.Module] | None = None


TEXT, IMAGE, LM = AutoModelForSequenceClassification, AutoModelForImageClassification, AutoModelForCausalLM
ROBERTA = Work("roberta", TEXT, layers=6, hidden=384, heads=6, vocabulary=50_265, length=64, batch=32)
WORKS = {
    "roberta-full": ROBERTA,
    "roberta-lora": replace(ROBERTA, lora_r=8),
    "vit-full": Work("vit", IMAGE, layers=12, hidden=192, heads=3, vocabulary=0, length=224, batch=16),
    # On these no rule of any engine was fitted.
    "gpt2-lm": Work("gpt2", LM, layers=4, hidden=256, heads=4, vocabulary=8_000, length=128, batch=16),
    "bert-long": Work("bert", TEXT, layers=4, hidden=512, heads=8, vocabulary=30_522, length=256, batch=8),
    "llama-lm": Work("llama", LM, layers=4, hidden=512, heads=8, vocabulary=8_000, length=256, batch=8),
    # Of Llama 3 the vocabulary, which is nine tenths of this model's products.
    "llama-words": Work("llama", LM, layers=2, hidden=512, heads=8, vocabulary=128_256, length=256, batch=4),
}
BASE = Work("roberta", TEXT, layers=12, hidden=768, heads=12, vocabulary=50_265, length=128, batch=32)
LARGE = replace(BASE, layers=24, hidden=1024, heads=16, batch=16)
LLAMA_1B = (("num_key_value_heads", 8), ("tie_word_embeddings", True))
QWEN_7B = (("num_key_value_heads", 4), ("intermediate_size", 18_944), ("dtype", torch.bfloat16))
# Of the sizes that people fine-tune, for a GPU: left out unless named.
LARGE_WORKS = {
    "roberta-base": BASE,
    "roberta-base-lora": replace(BASE, lora_r=8),
    "roberta-large": LARGE,
    "roberta-large-lora": replace(LARGE, lora_r=8),
    "bert-base": replace(BASE, model_type="bert", vocabulary=30_522),
    "vit-base": Work("vit", IMAGE, layers=12, hidden=768, heads=12, vocabulary=0, length=224, batch=32),
    "gpt2": Work("gpt2", LM, layers=12, hidden=768, heads=12, vocabulary=50_257, length=512, batch=8),
    "llama-1b-lora": Work("llama", LM, 16, 2048, 32, 128_256, length=512, batch=4, lora_r=8, options=LLAMA_1B),
    # Four examples, so that 80 GiB hold three such models in one process.
    "qwen-7b-lora": Work("qwen2", LM, 28, 3584, 28, 152_064, 512, 4, 16, "all-linear", QWEN_7B),
}


def groupnorm_resnet50() -> nn.Module:
    """Return Transformers' ResNet-50 for ten classes, with GroupNorm in the place of BatchNorm, which mixes examples."""
    return OfPixels(ModuleValidator.fix(ResNetForImageClassification(ResNetConfig(num_labels=10))))


# Trained from scratch: on CIFAR's images the CNN of De et al. with a quarter of its channels, and with all. BiT's ResNet-50
# standardizes its weights in every pass.
CNN = Work("cnn", IMAGE, 5, 16, 0, 0, length=32, batch=250, network=functools.partial(cifar_cnn, 10, width=16))
CONVOLUTIONS = {
    "cnn-quarter": CNN,
    "cnn": replace(CNN, batch=64, network=functools.partial(cifar_cnn, 10)),
    "resnet50": replace(CNN, batch=32, network=groupnorm_resnet50),
    "resnet50-224": replace(CNN, length=224, batch=4, network=groupnorm_resnet50),
    "bit-resnet50": replace(CNN, batch=16, network=resnet50),
}
ALL_WORKS = WORKS | LARGE_WORKS | CONVOLUTIONS
TINY = {
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "vocabulary": 64,
    "length": 32,
    "batch": 4,
    "options": (("num_key_value_heads", 1),),
}
MEMORY_STEPS = 3
PEERS = ("GradSampleModule", "ghost clipping")


@dataclass
class BenchArguments:
    """The settings of the measurement."""

    works: str = field(default=",".join(WORKS), metadata={"help": f"Of {', '.join(ALL_WORKS)}; comma separated."})
    engines: str = field(default="book_keeping", metadata={"help": f"Of ClippedGradients, or {', '.join(PEERS)}."})
    norm_rule: str = field(default="auto", metadata={"help": "auto, ghost or direct; for book_keeping only."})
    views: int = field(default=1, metadata={"help": "How many rows of a batch are views of one example."})
    pairs: int = field(default=30, metadata={"help": "How many pairs of steps."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    precision: str = field(
        default="float32",
        metadata={"help": "bf16 computes the forward pass under autocast.", "choices": ["float32", "bf16"]},
    )
    threads: int = field(default=2, metadata={"help": "torch's threads."})
    heap: str = field(
        default="keep",
        metadata={"help": "What glibc does with freed memory while steps are timed.", "choices": ["keep", "return"]},
    )
    scale: str = field(default="full", metadata={"help": "tiny tries out the script.", "choices": ["full", "tiny"]})
    output: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


def config_of(work: Work) -> PretrainedConfig:
    """Return the configuration of a work's model."""
    if work.head is IMAGE:
        inputs = {"image_size": work.length}
    else:  # GPT-2's own special tokens lie outside a smaller vocabulary
        inputs = {"vocab_size": work.vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    return AutoConfig.for_model(
        work.model_type,
        use_cache=False,  # as transformers' Trainer sets it
        num_hidden_layers=work.layers,
        hidden_size=work.hidden,
        num_attention_heads=work.heads,
        **{"intermediate_size": 4 * work.hidden} | inputs | dict(work.options),
    )


def build(work: Work, *, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in training mode and a batch, the same ones at every call."""
    set_seed(0)
    if work.network is not None:
        images = torch.randn(work.batch, 3, work.length, work.length, device=device)
        labels = torch.arange(work.batch, device=device) % 10
        return Classifier(work.network()).to(device).train(), {"inputs": images, "labels": labels}
    with torch.device(device):
        model = work.head.from_config(config_of(work))
        lora = LoraArguments(lora_r=work.lora_r, lora_target_modules=work.lora_target_modules)
        model = add_lora(model, lora, task_type="CAUSAL_LM" if work.head is LM else "SEQ_CLS").train()
    if work.head is IMAGE:
        batch = {"pixel_values": torch.randn(work.batch, 3, work.length, work.length)}
    else:
        ids = torch.randint(5, work.vocabulary, (work.batch, work.length))  # above the special tokens
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["labels"] = batch["input_ids"] if work.head is LM else torch.arange(work.batch) % 2
    return model, {name: tensor.to(device) for name, tensor in batch.items()}


def in_precision(batch: dict[str, Tensor], precision: str) -> torch.autocast:
    """Return the context of a forward pass."""
    return torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=precision == "bf16")


def losses_of(model: nn.Module, batch: dict[str, Tensor], *, precision: str = "float32") -> Tensor:
    """Return one loss per example as a training does, shape (batch,): logits are computed for some tokens at a time."""
    with in_precision(batch, precision):
        if isinstance(model, Classifier):
            return F.cross_entropy(model(batch["inputs"]).logits, batch["labels"], reduction="none")
        return per_sample_losses(model, batch, base_model=without_adapters(model))


def losses_of_all_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same losses from all logits at once, as whoever takes Opacus writes it."""
    if logits.ndim == 2:
        return F.cross_entropy(logits, labels, reduction="none")
    of_tokens = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return of_tokens.view(len(labels), -1).mean(dim=1)


@contextlib.contextmanager
def stepping(engine: str, model: nn.Module, batch: dict[str, Tensor], args: BenchArguments) -> Iterator[Callable[[], None]]:
    """Yield a function that makes one step: an ordinary one for "plain", else a private one without noise."""

    def plain() -> None:
        model.zero_grad(set_to_none=True)  # as Transformers does
        with in_precision(batch, args.precision):
            loss = model(**batch).loss
        loss.backward()

    if engine == "plain":
        yield plain
        return
    if engine in PEERS:
        yield opacus_step(engine, model, batch, args)
        return

    options: dict[str, Any] = {"norm_rule": args.norm_rule} if engine == "book_keeping" else {}
    with ClippedGradients(model, clipping="automatic", engine=engine, **options) as clipped:

        def private() -> None:
            model.zero_grad(set_to_none=True)
            clipped.backward(losses_of(model, batch, precision=args.precision), views=args.views)
            for name, total in clipped.sums.items():
                clipped.parameters[name].grad = total
            clipped.reset()

        yield private


def opacus_step(kind: str, model: nn.Module, batch: dict[str, Tensor], args: BenchArguments) -> Callable[[], None]:
    """Return a step of Opacus that clips and adds up, without noise."""
    is_ghost = kind == "ghost clipping"
    labels = batch["labels"]
    if "position_ids" in inspect.signature(without_adapters(model).forward).parameters:
        # Opacus needs a row for each example; of RoBERTa the first positions are of padding.
        first = model.config.pad_token_id + 1 if model.config.model_type == "roberta" else 0
        places = torch.arange(first, first + batch["input_ids"].shape[1], device=batch["input_ids"].device)
        batch = batch | {"position_ids": places.repeat(len(batch["input_ids"]), 1)}
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    hooked = (GradSampleModuleFastGradientClipping if is_ghost else GradSampleModule)(model)
    trained = [parameter for parameter in hooked.parameters() if parameter.requires_grad]
    optimizer = (DPOptimizerFastGradientClipping if is_ghost else DPOptimizer)(
        torch.optim.SGD(trained), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=len(labels)
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with in_precision(batch, args.precision):
            losses = losses_of_all_logits(hooked(**inputs).logits, labels)
        if is_ghost:
            hooked.enable_hooks()
            DPTensorFastGradientClipping(hooked, optimizer, losses).backward()
            optimizer.accumulate()
        else:
            losses.mean().backward()
            optimizer.clip_and_accumulate()
        for parameter in trained:
            parameter.grad = parameter.summed_grad

    return step


@contextlib.contextmanager
def steps_of(work: Work, engines: Sequence[str], args: BenchArguments) -> Iterator[list[Callable[[], None]]]:
    """Yield a plain step and each engine's, on equal models."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(stepping(kind, *build(work, device=args.device), args)) for kind in ("plain", *engines)]


def paired_seconds(work: Work, engines: Sequence[str], args: BenchArguments) -> np.ndarray:
    """Return the seconds of plain steps and of each engine's, in turn on equal models, shape (pairs, 1 + engines)."""
    with steps_of(work, engines, args) as steps:
        return seconds_in_turn(*steps, pairs=args.pairs, device=args.device)


def peak_memory(work: Work, engine: str, args: BenchArguments) -> float:
    """Return the memory that a few steps need beyond model and batch, in MiB, in a process that has done nothing else.

    On the CPU this is the highest resident memory of the process less what was resident before the first step. It is too
    much where building the model took more than the steps do, as for tiny works.
    """
    torch.set_num_threads(args.threads)
    model, batch = build(work, device=args.device)
    gc.collect()
    before = memory_now(args.device)
    with stepping(engine, model, batch, args) as step:
        for _ in range(MEMORY_STEPS):
            step()
    return (memory_peak(args.device) - before) / MIB


def measure(name: str, work: Work, engine: str, args: BenchArguments, *, plain_mib: float) -> dict[str, Any]:
    """Return time and memory of one engine on one work, and the settings of the measurement."""
    seconds = paired_seconds(work, [engine], args)
    q1, ratio, q3 = quartiles(seconds[:, 1] / seconds[:, 0])
    plain_s, private_s = np.median(seconds, axis=0).tolist()
    return {
        "work": name,
        "engine": engine,
        "ratio": ratio,
        "ratio_quartiles": [q1, q3],
        "plain_s": plain_s,
        "private_s": private_s,
        "plain_mib": plain_mib,
        "private_mib": in_fresh_process(peak_memory, work, engine, args),
        **settings(args),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every engine on every work, and print one line for each."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        works = chosen("--works", args.works, ALL_WORKS)
    torch.set_num_threads(args.threads)
    if args.device == "cpu" and args.heap == "keep":
        keep_freed_memory()
    for name in works:
        work = ALL_WORKS[name] if args.scale == "full" else replace(ALL_WORKS[name], **TINY)
        plain_mib = in_fresh_process(peak_memory, work, "plain", args)
        for engine in args.engines.split(","):
            result = measure(name, work, engine, args, plain_mib=plain_mib)
            q1, q3 = result["ratio_quartiles"]
            memory_ratio = result["private_mib"] / plain_mib
            print(
                f"{name:12} {engine:12} time ×{result['ratio']:.3f} ({q1:.3f} to {q3:.3f}): {result['plain_s']:.4g} → "
                f"{result['private_s']:.4g} s; memory ×{memory_ratio:.2f}: {plain_mib:.0f} → "
                f"{result['private_mib']:.0f} MiB",
                flush=True,
            )
            append_json_line(result, args.output)


if __name__ == "__main__":
    main()
