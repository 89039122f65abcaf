"""Rules for what transformers defines: GPT-2's `Conv1D`, and T5's relative position bias."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from doppler_hf.privacy.book import Book
from doppler_hf.privacy.layer_rules import Rule, transposed_linear
from doppler_hf.privacy.layers import substituted
from doppler_hf.privacy.repeated import repeated

HOST_RULES: dict[Callable[..., Any], Rule] = {Conv1D.forward: transposed_linear}


def has_relative_bias(module: nn.Module) -> bool:
    """Whether a module computes its position bias from a trained table, as T5's attention does."""
    table = module._modules.get("relative_attention_bias")
    return isinstance(table, nn.Embedding) and table.weight.requires_grad and hasattr(module, "compute_bias")


def relative_bias(
    book: Book, name: str, module: Any, compute_bias: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Return the bias of shape (1, heads, length, length), once for each example.

    The look-up inside has no batch dimension, and its first dimension may equal the batch size by chance.
    """
    table = module.relative_attention_bias
    if not book.is_watching:
        return compute_bias(*args, **kwargs)

    def bias_of(parameters: Mapping[str, Tensor]) -> Tensor:
        with book.unwatched(), substituted(table, parameters):
            return compute_bias(*args, **kwargs)

    book.repeated.append(name)
    return repeated(book, {"weight": table.weight}, bias_of)
