"""What several scripts do with tokenizers and models."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer that pads, on the right. GPT-2 and its kind are pretrained on unpadded text."""
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # On the left, padding would shift absolute positions by an amount that depends on the other examples.
    tokenizer.padding_side = "right"
    return tokenizer


def name_classes(model: Any, names: Sequence[str]) -> None:
    """Write the names of the classes into the model's config (modified in place)."""
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
