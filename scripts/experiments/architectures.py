"""Which of transformers' architectures train privately, which are refused, and why.

    python -m scripts.experiments.architectures --output out/architectures.jsonl

Every class of the installed transformers whose name ends as that of a task with a loss per example is built tiny from its
config class, gets random examples of unequal lengths, and is trained for two private steps on the CPU. Beside the outcome
stands the truth: by how much plain autograd, in float64 and in training mode without dropout, changes the gradient of one
example when another is beside it. A refusal for neighbours is true if it does; a model that trains although it does was
missed.

Multimodal models get text alone. Every model is one line of JSON, written as it ends, from a process of its own with a time
limit; what the file holds already is not run again. The last lines printed are the tables of the results page.
"""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import inspect
import json
import math
import multiprocessing
import os
import re
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.privacy.clipping.as_in_training import with_small_capacity, without_coins
from doppler_hf.privacy.clipping.self_check import gradients_of, moved, norm_of
from doppler_hf.privacy.losses import IGNORED_LABEL, per_sample_losses, token_task
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line

TASK_NAMES = re.compile(
    r"^(?!Auto|DataCollator|.*PreTrainedModel).*(For(Sequence|Image|Video|Audio|Token)Classification\w*|For(CausalLM|MaskedLM|ConditionalGeneration)"
    r"|LMHeadModel)$"
)
TASK_TABLES = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ")
LARGEST = 3_000_000  # parameters; what is larger has a size that no rule below knows
TOKENS, SAMPLES, FRAMES = (6, 14), (6000, 12000), (80, 160)  # the shortest and the longest example
LAYER = "a layer without a rule"  # the cause of refusals that say nothing about neighbours
# What rounding leaves of a change: some models compute a part in float32 whatever their dtype.
ROUNDING = {"torch.float64": 1e-6, "torch.float32": 1e-3}

# Fields of configs, by the first pattern that fits, and what they become: a number, or a function of the default.
WIDTH, HEADS = 32, 4
FIELDS: tuple[tuple[str, Any], ...] = (
    (r"(bos|decoder_start)_token_id", 1),
    (r"vocab_size(_per_layer_input)?|\w+_vocab_size|num_embeds", 64),
    (r"(max|num|n)_\w*position\w*|max_(source|target|seq|sequence)\w*|n_positions|n_ctx|seq_len|context_length", 64),
    (r"num_(key_value|kv)_heads|num_key_value_groups", 2),
    (r"\w*(head_dim|dim_head|d_kv|d_head|kv_channels|head_size)", WIDTH // HEADS),
    (r"\w*(n_|num_|attention_|linear_\w+_)?heads?", HEADS),
    (r"(num_|n_)?(hidden_|encoder_|decoder_|text_|speech_)*(layers?|blocks|depth)", 2),
    (r"(num|n|moe_num)_\w*experts|expert_capacity|num_latents|num_query_tokens", 4),
    (r"\w*(top_?k|experts_per_tok(en)?|moe_k)", 2),
    (r"window_size", 2),
    (r"n_groups?|topk_group|mamba_n_groups|num_self_attends_per_block|first_k_dense_replace", 1),
    (r"image_size|resolution", 64),
    (r"patch_size|encoder_stride", lambda value: min(value, 8)),
    (r"rotary_dim", WIDTH // HEADS),
    (r"num_frames|num_mel_bins|input_feat_per_channel", 8),
    (r"\w*(lora_rank|lora_dim|_rank)", 8),
    (
        r"\w*(size|dim|dims|width|d_model|d_latents|n_embd|d_ff|d_inner|channels|filters|units|features)",
        lambda value: min(value, WIDTH),
    ),
)
LISTS: tuple[tuple[str, Any], ...] = (
    (r"depths|\w*(layers|blocks)|layers_per_block", lambda values: [1] * len(values)),
    (r"\w*heads\w*", lambda values: [2] * len(values)),
    (
        r"\w*(sizes|dims|dim|channels|filters|size)",
        lambda values: [max(8, 8 * round(8 * value / max(values))) if value >= 16 else value for value in values],
    ),
)
# Fields that some classes leave to be None, although their layers need numbers.
WITHOUT_DEFAULT = {
    "head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "vocab_size": 64,
}  # fmt: skip
# What a family needs beside, by the beginning of its classes' names; also in its sub-configs, if they have such a field.
MAMBA = {"mamba_n_heads": HEADS, "mamba_d_head": 2 * WIDTH // HEADS, "mamba_num_heads": HEADS, "mamba_head_dim": 16}
OVERRIDES: dict[str, dict[str, Any]] = {
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "Bit": {"embedding_size": 32, "hidden_sizes": [32, 32, 32, 32]},
    "Blt": {"encoder_hash_byte_group_vocab": 64},
    "Bros": {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_sinusoid_emb_1d": 8, "dim_bbox_projection": 8},
    "FalconH1": MAMBA | {"mamba_d_ssm": 2 * WIDTH},
    "Gemma3n": {"intermediate_size": WIDTH, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "GPTNeoFor": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybrid": MAMBA,
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "Laguna": {"num_attention_heads_per_layer": [HEADS, HEADS]},
    "LayoutLMv3": {"coordinate_size": 6, "shape_size": 4, "hidden_size": 32, "input_size": 64},
    "LED": {"attention_window": 4},
    "Lilt": {"hidden_size": 48},
    "Mamba2": {"head_dim": 2 * WIDTH // HEADS},
    "Nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 12, "conv_kernel_size": 5},
    "Perceiver": {"num_cross_attention_heads": 1, "image_size": 64},
    "Reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "attention_head_size": 8, "num_attention_heads": HEADS,
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2, "hidden_size": 32,
        "is_decoder": False,
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "Xmod": {"default_language": "en_XX"},
}  # fmt: skip


@dataclass
class ArchitectureArguments:
    """The settings of the survey."""

    output: str = field(metadata={"help": "File of results, a line of JSON a model; what it holds is not run again."})
    models: list[str] = field(default_factory=list, metadata={"help": "Names of model classes; by default all."})
    jobs: int = field(default=1, metadata={"help": "Processes at a time."})
    timeout: float = field(default=120.0, metadata={"help": "Seconds for one model."})


# --- models ---------------------------------------------------------------------------------------------------------------


def model_names() -> list[str]:
    """Return the classes whose names or tables say that a rule of `privacy.losses` may be theirs."""
    names = {name for name in dir(transformers) if TASK_NAMES.match(name)}
    for table in TASK_TABLES:
        for found in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values():
            names.update([found] if isinstance(found, str) else found)
    return sorted(names)


def tiny_config(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a config like another with small sizes, its sub-configs' too."""
    kind, default = type(config), vars(config)
    small: dict[str, Any] = {
        name: tiny_config(default[name], overrides)
        for name in kind.sub_configs
        if isinstance(default.get(name), PreTrainedConfig)
    }
    usual = vars(kind())
    names = [one.name for one in dataclasses.fields(kind) if one.name not in small]
    for name in names:
        value = tiny_value(name, default.get(name))
        if value is not None:
            small[name] = value
        elif default.get(name) != usual.get(name):
            small[name] = default[name]  # what the model around it asks for
    # Multi-head attention stays what it is, and its compressed variants allow nothing else.
    if default.get("num_key_value_heads") == default.get("num_attention_heads") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small.get("num_attention_heads", HEADS)
    if isinstance(default.get("layer_types"), list) and "layer_types" in names:
        # One layer of each kind, where there are several.
        kinds = list(dict.fromkeys(default["layer_types"]))
        small |= {"layer_types": kinds * (2 // len(kinds) or 1)}
        small |= {name: len(small["layer_types"]) for name in ("num_hidden_layers", "n_layer") if name in names}
    rope = default.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope and {"rope_parameters", "vocab_size"} <= {*names}:
        small["rope_parameters"] = rope | {"mrope_section": [2, 1, 1]}  # where there are three kinds of positions
    return kind(**(small | {name: value for name, value in overrides.items() if name in names}))


def tiny_value(name: str, value: Any) -> Any:
    """Return a small value for the field of a config, or None to leave it as it is."""
    if name == "pad_token_id":
        return 0
    if name == "eos_token_id":
        return 2
    if value is None:
        return WITHOUT_DEFAULT.get(name)
    if isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
        return next((rule(value) for pattern, rule in LISTS if re.fullmatch(pattern, name)), None)
    if type(value) is not int or value <= 1:
        return None
    for pattern, rule in FIELDS:
        if re.fullmatch(pattern, name):
            return rule(value) if callable(rule) else rule
    # Of every other token a number of its own, above those in the data.
    return 32 + zlib.crc32(name.encode()) % 32 if re.search(r"_(id|index)$", name) else None


def tiny_model(name: str) -> PreTrainedModel:
    """Return a model with random weights.

    Raises:
        ValueError: If it is not tiny.
    """
    kind: Any = getattr(transformers, name)
    family = max((key for key in OVERRIDES if name.startswith(key)), key=len, default="")
    overrides = OVERRIDES["Reformer"] if family.startswith("Reformer") else {}
    config: Any = tiny_config(kind.config_class(), {**overrides, **OVERRIDES.get(family, {})})
    config.use_cache = False  # as in training; not every default has an attention layer, which a cache needs
    if "Classification" in name:
        config.num_labels = 3
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    with torch.device("meta"):
        sizes = {key: parameter.numel() for key, parameter in kind(config).named_parameters()}
    if sum(sizes.values()) > LARGEST:
        largest = max(sizes, key=lambda key: sizes[key])
        raise ValueError(
            f"A model must have {LARGEST:,} parameters at most, got {sum(sizes.values()):,}, of which {largest} has "
            f"{sizes[largest]:,}. Give FIELDS or OVERRIDES its size."
        )
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config)
    return model


# --- data -----------------------------------------------------------------------------------------------------------------


def examples_of(model: PreTrainedModel, *, number: int = 12) -> list[dict[str, Any]]:
    """Return random examples of unequal lengths for a model's inputs, with labels for its task."""
    generator = torch.Generator().manual_seed(0)
    return [one_example(model, share=index / (number - 1), generator=generator) for index in range(number)]


def one_example(model: PreTrainedModel, *, share: float, generator: torch.Generator) -> dict[str, Any]:
    """Return an example whose length lies a share of the way from the shortest to the longest."""

    def between(ends: tuple[int, int]) -> int:
        return ends[0] + round(share * (ends[1] - ends[0]))

    def tokens(length: int) -> Tensor:
        return torch.randint(5, 32, (length,), generator=generator)

    config, name = model.config, type(model).__name__
    accepted, main = inspect.signature(model.forward).parameters, model.main_input_name
    length = TOKENS[1] if "Image" in name else between(TOKENS)
    length = getattr(config, "segment_means_seq_len", length)  # Nystromformer's, of every example
    length -= length % getattr(config, "local_attn_chunk_length", 1)  # Reformer's, in training

    def size_of(*names: str, default: int) -> int:
        configs = (config, *(getattr(config, name) for name in config.sub_configs))
        found = [getattr(one, name) for one in configs for name in names if getattr(one, name, None) is not None]
        return next((size if isinstance(size, int) else size[0] for size in found), default)

    example: dict[str, Any] = {}
    if main == "input_ids" or ("input_ids" in accepted and not re.search("Image|Video|Audio|Speech", name)):
        example = {"input_ids": tokens(length), "attention_mask": torch.ones(length, dtype=torch.long)}
        example["input_ids"][-1] = 2  # heads of encoder-decoders look for the last end of a sentence
        if "bbox" in accepted:
            example["bbox"] = torch.randint(0, 5, (length, 4), generator=generator).cumsum(1)
            if "Bros" in name:
                example["bbox"] = example["bbox"] / 20.0
    if main == "input_values" and "input_ids" not in example:
        wave = between(SAMPLES)
        example = {main: torch.randn(wave, generator=generator), "attention_mask": torch.ones(wave, dtype=torch.long)}
        if "max_length" in vars(config):  # a spectrogram
            example = {main: torch.randn(config.max_length, config.num_mel_bins, generator=generator)}
    elif main == "input_features" and "input_ids" not in example:
        frames = between(FRAMES)
        bins = size_of("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", default=80)
        example = {main: torch.randn(frames, bins, generator=generator), "attention_mask": torch.ones(frames).long()}
        if "Whisper" in name:
            example = {main: torch.randn(bins, 2 * config.max_source_positions, generator=generator)}
    elif main == "pixel_values" or "input_ids" not in example:
        side = size_of("image_size", "crop_size", default=64)
        shape: tuple[int, ...] = (size_of("num_channels", default=3), side, side)
        if "Video" in name:
            shape = (size_of("num_frames", "frames_per_clip", default=8), *shape)
        example[main] = torch.randn(shape, generator=generator)
    task = token_task(model)
    if task == "seq2seq_lm":
        example["labels"] = tokens(between((4, 9)))
    elif task == "token_classification":
        example["labels"] = torch.randint(0, 3, (length,), generator=generator)
    elif task is not None:
        example["labels"] = example["input_ids"].clone() if "input_ids" in example else tokens(length)
    else:
        example["labels"] = torch.randint(0, 3, (), generator=generator)
    return {name: value for name, value in example.items() if name in accepted or name == "labels"}


def padded(examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate with padding on the right, labels with the ignored one."""
    return {
        name: nn.utils.rnn.pad_sequence(
            [example[name] for example in examples],
            batch_first=True,
            padding_value=IGNORED_LABEL if name == "labels" else 0,
        )
        if examples[0][name].ndim
        else torch.stack([example[name] for example in examples])
        for name in examples[0]
    }


# --- one model ------------------------------------------------------------------------------------------------------------


def changes_of(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]], *, dtype: torch.dtype) -> dict[str, float]:
    """Return by how much of its norm the gradient of the first example changes, in training mode without dropout.

    Returns:
        The change with another random state (`repeated`), beside an example of the same length (`beside`), and beside a
        longer one (`padded`).
    """
    first, longest = examples[0], examples[-1]
    other = {name: value.flip(0) if value.ndim else value for name, value in first.items()}
    model = copy.deepcopy(model).to(dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others have no float64
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def gradient(batch: list[dict[str, Tensor]], *, seed: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in padded(batch).items()}
        return gradients_of(per_sample_losses(model, inputs, base_model=model)[:1], trained)

    with moved(model), without_coins(model), with_small_capacity(model):
        alone = gradient([first])

        def change(found: dict[str, Tensor]) -> float:
            zero = torch.zeros((), dtype=dtype)
            rest = {name: found.get(name, zero) - alone.get(name, zero) for name in {*found, *alone}}
            return norm_of(rest.values()) / max(norm_of(alone.values()), 1e-30)

        changes = {
            "repeated": change(gradient([first], seed=1)),
            "beside": change(gradient([first, other])),
            "padded": change(gradient([first, longest])),
        }
    if any(map(math.isnan, changes.values())):
        raise ValueError("A gradient must be a number, got NaN. Compute it in float32.")
    return changes


def truth_of(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Return the changes of a gradient in float64, in float32 if the model knows no other, or why there are none."""
    for dtype in (torch.float64, torch.float32):
        try:
            return {"by": changes_of(model, examples, dtype=dtype), "dtype": str(dtype)}
        except Exception as error:
            reason = short(error)
    return {"reason": reason}


def train(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]]) -> None:
    """Train for two private steps."""
    with tempfile.TemporaryDirectory() as folder:
        args = DopplerTrainingArguments(
            output_dir=folder, noise_multiplier=1.0, per_device_train_batch_size=4, max_steps=2, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        DopplerTrainer(model=model, args=args, train_dataset=examples, data_collator=padded).train()


def is_ours(error: Exception) -> bool:
    """Return whether an error is a refusal of this package."""
    return isinstance(error, ValueError) and "doppler_hf" in traceback.extract_tb(error.__traceback__)[-1].filename


def mended(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]], message: str) -> dict[str, Any]:
    """Freeze what each message names, in all layers alike, until the model trains.

    Returns:
        The frozen names, their share of all parameters, and what the last message was if the model does not train.
    """
    frozen: list[str] = []
    while cause_of(message) == LAYER:
        named = next(iter(re.findall(r"'([\w.]+)'", message)), "")
        alike = re.compile(re.sub(r"\d+", r"\\d+", re.escape(named)) + r"(\..*)?")
        chosen = [parameter for name, parameter in model.named_parameters() if alike.fullmatch(name)]
        if not any(parameter.requires_grad for parameter in chosen):
            break
        for parameter in chosen:
            parameter.requires_grad_(False)
        frozen.append(re.sub(r"\.\d+(?=\.|$)", ".*", named))
        try:
            train(model, examples)
        except Exception as error:
            message = short(error)
            if not is_ours(error):
                break
        else:
            message = ""
            break
    still = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    return {"frozen": frozen, "share": round(still / model.num_parameters(), 3), "reason": message}


def survey(name: str) -> dict[str, Any]:
    """Build, train and compare one model, and return its line of the results."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    start, line = time.perf_counter(), {"model": name, "transformers": transformers.__version__}
    stage = "not built"
    try:
        model = tiny_model(name)
        line |= {"family": model.config.model_type, "parameters": model.num_parameters()}
        stage = "not run"
        examples = examples_of(model)
        line |= {"task": token_task(model) or "classification", "inputs": sorted(examples[0])}
        per_sample_losses(model, padded(examples[:3]), base_model=model).sum().backward()
        model.zero_grad()
        line["truth"] = truth_of(model, examples)
        stage = "failed"
        train(model, examples)
        line["result"] = "trained"
    except Exception as error:
        no_rule = is_ours(error) and "no per-example loss" in str(error)
        line |= {"result": "no rule" if no_rule else "refused" if is_ours(error) else stage, "reason": short(error)}
        if line["result"] == "refused" and cause_of(str(error)) == LAYER:
            line["mended"] = mended(model, examples, str(error))
    return line | {"seconds": round(time.perf_counter() - start, 2)}


def short(error: Exception) -> str:
    """Return an error's kind, where it was raised, and the beginning of its message."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {' '.join(str(error).split())[:600]}"


def send(name: str, results: Connection) -> None:
    """Survey a model, without what a run prints."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        line = survey(name)
    results.send(line)


def in_own_process(name: str, *, timeout: float) -> dict[str, Any]:
    """Survey a model where its crash, or its time, costs nothing but its own line."""
    # A process forked from a fresh one that has imported all: torch's threads do not survive a fork of this one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", DopplerTrainer.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(name, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return dict(receiver.recv())
        reason = f"no answer within {timeout:g} s"
    except EOFError:
        reason = "the process died"
    finally:
        process.kill()
        process.join()
    return {"model": name, "result": "failed", "reason": reason}


# --- the tables -----------------------------------------------------------------------------------------------------------


def verdict(line: dict[str, Any]) -> str:
    """Return a line's row in the table."""
    truth, result = line.get("truth", {}), str(line["result"])
    changed = max(truth["by"].values()) > ROUNDING[truth["dtype"]] if "by" in truth else None
    if result == "trained" and changed:
        return "trained, although its gradients change"
    if result != "refused":
        return result
    if cause_of(line["reason"]) == "neighbours":
        return {True: "refused truly", False: "refused falsely", None: "refused, truth unknown"}[changed]
    return f"refused for {cause_of(line['reason'])}"


def cause_of(message: str) -> str:
    """Return what a refusal is for: neighbours, random numbers, statistics of the data, or a layer that the engine lacks."""
    if re.search("changes with the examples beside it|in the places of others", message):
        return "neighbours"
    if "global generators" in message:
        return "random numbers of its own"
    return "statistics of the data" if re.search("mixes the examples|writes the", message) else LAYER


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Return the number of models of each verdict, by task."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in lines:
        counts[verdict(line)][line.get("task", "?")] += 1
    tasks = sorted({task for row in counts.values() for task in row})
    rows = [f"| | {' | '.join(tasks)} | all |", "|---" * (len(tasks) + 2) + "|"]
    for name, row in sorted(counts.items(), key=lambda item: -item[1].total()):
        rows.append(f"| {name} | {' | '.join(str(row[task]) for task in tasks)} | {row.total()} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Survey the models that the file lacks, and print the table."""
    with one_line_errors():
        (args,) = parse_args(ArchitectureArguments, argv=argv)
        known = model_names()
        for name in args.models:
            if name not in known:
                raise ValueError(f"--models must be of transformers' model classes with a loss per example, got {name!r}.")
    path = Path(args.output)
    done = {line["model"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    names = [name for name in args.models or known if name not in done]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = [pool.submit(in_own_process, name, timeout=args.timeout) for name in names]
        for future in concurrent.futures.as_completed(running):
            line = future.result()
            append_json_line(line, args.output)
            done[line["model"]] = line
            print(f"{line['model']}: {verdict(line)}", flush=True)
    print("", table(done.values()), sep="\n")


if __name__ == "__main__":
    main()
