"""A model of random weights and a batch of random inputs, by its configuration alone: nothing but that is downloaded."""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from doppler_hf.workloads.lora import LoraArguments, add_lora


class _Task(NamedTuple):
    head: Any
    of_adapters: Any


TASKS: Final = {
    "text-classification": _Task(AutoModelForSequenceClassification, "SEQ_CLS"),
    "causal-lm": _Task(AutoModelForCausalLM, "CAUSAL_LM"),
    "image-classification": _Task(AutoModelForImageClassification, None),
}


class RandomModel:
    """A model of random weights, and batches for it.

    Args:
        name: Hub name or folder of the configuration.
        task: One of `TASKS`.
        length: Tokens of a text; None for images, whose size is that of the configuration.
        lora: The adapters; rank 0 for none.
        device: Where it lies.

    Attributes:
        model: The model, in training mode, with its adapters.
        base: The model without them.

    Raises:
        ValueError: If there is no such configuration, or the length does not fit the task.
    """

    def __init__(self, name: str, *, task: str, length: int | None, lora: LoraArguments, device: str) -> None:
        self._is_image, self._is_lm = task == "image-classification", task == "causal-lm"
        if self._is_image == (length is not None):
            need = "must be left out for images" if self._is_image else "must be given for texts"
            raise ValueError(f"--length {need}, got {length}. Images have the size of the configuration.")
        try:
            config = AutoConfig.from_pretrained(name)
        except OSError as error:
            raise ValueError(f"--model must be a hub name or a folder with a config.json, got {name!r}: {error}") from error
        self._config, self._length, self._device = config, length, device
        self.base: PreTrainedModel = TASKS[task].head.from_config(config)
        self.model: nn.Module = add_lora(self.base, lora, task_type=TASKS[task].of_adapters).to(device).train()

    def batch(self, size: int) -> dict[str, Tensor]:
        """Return a random batch of that many examples, all of the same length."""
        if self._is_image:
            side = self._config.image_size
            pixels = torch.randn(size, getattr(self._config, "num_channels", 3), side, side, device=self._device)
            return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.long, device=self._device)}
        assert self._length is not None
        vocabulary, ends = self._config.vocab_size, {self._config.pad_token_id, self._config.eos_token_id}
        word = next(number for number in range(vocabulary) if number not in ends)
        tokens = torch.full((size, self._length), word, device=self._device)
        labels = tokens if self._is_lm else torch.zeros(size, dtype=torch.long, device=self._device)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
