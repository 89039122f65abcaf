"""Models of transformers, tiny, and random examples for them.

A config gets small sizes field by field, by the names of the fields: what configs call a width, a head or a layer is much
the same. An example has what the model's forward pass names: tokens, a wave, a spectrogram or pixels, of unequal lengths.
"""

import dataclasses
import inspect
import re
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from doppler_hf.errors import Refusal
from doppler_hf.privacy.losses import task_of
from doppler_hf.privacy.token_losses import IGNORED_LABEL

LARGEST = 3_000_000  # parameters; what is larger has a size that no rule below knows
TOKENS, SAMPLES, FRAMES = (6, 14), (6000, 12000), (80, 160)  # the shortest and the longest example

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
    (r"window_size", 2),
    (r"image_size|resolution", 64),
    (r"patch_size|encoder_stride", lambda value: min(value, 8)),
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
WITHOUT_DEFAULT = {"head_dim": WIDTH // HEADS}


# --- models ---------------------------------------------------------------------------------------------------------------


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config like another with small sizes."""
    kind, default = type(config), vars(config)
    names = [one.name for one in dataclasses.fields(kind)]
    values = {name: tiny_value(name, default.get(name)) for name in names}
    small: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    # Multi-head attention stays what it is, and its compressed variants allow nothing else.
    if default.get("num_key_value_heads") == default.get("num_attention_heads") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small.get("num_attention_heads", HEADS)
    if isinstance(default.get("layer_types"), list) and "layer_types" in names:
        # One layer of each kind, where there are several.
        kinds = list(dict.fromkeys(default["layer_types"]))
        small |= {"layer_types": kinds * (2 // len(kinds) or 1)}
        small |= {name: len(small["layer_types"]) for name in ("num_hidden_layers", "n_layer") if name in names}
    return kind(**small)


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


def tiny_model(name: str, **settings: Any) -> PreTrainedModel:
    """Return a model with random weights.

    Args:
        name: Its class.
        **settings: Fields of its config that are other than by default.

    Raises:
        ValueError: If it is not tiny.
    """
    kind: Any = getattr(transformers, name)
    config: Any = tiny_config(kind.config_class())
    for field, value in settings.items():  # some that a model reads are none of its config's class
        setattr(config, field, value)
    config.use_cache = False  # as in training; not every default has an attention layer, which a cache needs
    if "Classification" in name:
        config.num_labels = 3
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    with torch.device("meta"):
        sizes = {key: parameter.numel() for key, parameter in kind(config).named_parameters()}
    if sum(sizes.values()) > LARGEST:
        largest = max(sizes, key=lambda key: sizes[key])
        raise Refusal(
            "model-too-large",
            f"A model must have {LARGEST:,} parameters at most, got {sum(sizes.values()):,}, of which {largest} has "
            f"{sizes[largest]:,}. Give FIELDS its size.",
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

    def size_of(*names: str, default: int) -> int:
        found = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        return next((size if isinstance(size, int) else size[0] for size in found), default)

    example: dict[str, Any] = {}
    if main == "input_ids" or ("input_ids" in accepted and not re.search("Image|Video|Audio|Speech", name)):
        example = {"input_ids": tokens(length), "attention_mask": torch.ones(length, dtype=torch.long)}
        example["input_ids"][-1] = 2  # heads of encoder-decoders look for the last end of a sentence
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
    task = task_of(model)
    if task in ("seq2seq_lm", "ctc"):
        example["labels"] = tokens(between((2, 5)))
    elif task == "semantic_segmentation":
        example["labels"] = torch.randint(0, config.num_labels, example[main].shape[-2:], generator=generator)
    elif task == "token_classification":
        example["labels"] = torch.randint(0, 3, (length,), generator=generator)
    elif task not in (None, "multiple_choice"):
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
