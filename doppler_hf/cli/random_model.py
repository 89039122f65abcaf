"""A model with random weights and batches of random inputs, made from its configuration: no weights are downloaded."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils import ADAPTER_CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from doppler_hf.cli.lora import lora_config
from doppler_hf.errors import Refusal
from doppler_hf.privacy.losses import ANSWER, per_sample_losses

# Task, as Transformers' pipelines and the hub name it → its class in Transformers, and its name in PEFT.
TASKS: Final[dict[str, tuple[Any, Any]]] = {
    "text-classification": (AutoModelForSequenceClassification, "SEQ_CLS"),
    "causal-lm": (AutoModelForCausalLM, "CAUSAL_LM"),
    "image-classification": (AutoModelForImageClassification, None),
    "text-generation": (AutoModelForCausalLM, "CAUSAL_LM"),  # the same as causal-lm
    "token-classification": (AutoModelForTokenClassification, "TOKEN_CLS"),
    "question-answering": (AutoModelForQuestionAnswering, "QUESTION_ANS"),
    "fill-mask": (AutoModelForMaskedLM, "FEATURE_EXTRACTION"),  # PEFT has no name for it, and its head is not new
    "text2text-generation": (AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM"),
    "multiple-choice": (AutoModelForMultipleChoice, None),
}
CHOICES: Final = 4  # answers of a record of multiple choice, as in SWAG


class RandomModel:
    """A model with random weights, and random batches of texts of `length` tokens, or of images of the model's size.

    Args:
        name: A hub name, or a folder with config.json.
        task: One of `TASKS`.
        length: Tokens per text; None for images.
        lora_r: Rank of adapters; 0 trains all weights.
        lora_target_modules: Layers with adapters, comma separated; by default PEFT's choice for the model.
        device: Device of the weights.

    Raises:
        ValueError: If no such model is found, or `length` or `lora_target_modules` does not suit the model.
    """

    def __init__(
        self,
        name: str,
        *,
        task: str,
        length: int | None,
        lora_r: int = 0,
        lora_target_modules: str | None = None,
        device: str,
    ) -> None:
        if lora_target_modules is not None and not lora_r:
            raise Refusal(
                "no-effect",
                f"--lora-target-modules {lora_target_modules} has no effect without LoRA adapters. Add --lora-r with the "
                "rank of the adapters.",
            )
        self._task, self._is_image = task, task == "image-classification"
        if self._is_image == (length is not None):
            raise Refusal(
                "length-of-images",
                f"--length {length} has no effect on images, whose size is in the configuration. Leave --length out."
                if self._is_image
                else "--length is missing. Give the number of tokens of a text, for example --length 128.",
            )
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            _refuse_adapter(name)
            if isinstance(error, ValueError):
                raise  # Transformers does not know this kind of model
            raise Refusal(
                "no-such-model", f"Expected a hub name or a folder with a config.json as --model; got {name!r}: {error}"
            ) from error
        positions = getattr(config, "max_position_embeddings", None)
        if length and positions and length > positions:
            raise Refusal(
                "length-too-large",
                f"--length must be at most the {positions} positions of this model; got {length}. Use --length {positions}.",
            )
        self._config, self._length = config, length
        self._generator = torch.Generator().manual_seed(0)
        head, task_type = TASKS[task]
        with torch.device(device):
            self.base: PreTrainedModel = head.from_config(config)
            self.model: nn.Module = self.base.train()
            if lora_r:
                from peft import get_peft_model

                adapters = lora_config(lora_r, target_modules=lora_target_modules, task_type=task_type)
                self.model = get_peft_model(self.base, adapters).train()

    def batch(self, size: int) -> dict[str, Tensor]:
        """Return a random batch of `size` examples, all of the same length."""
        if self._is_image:
            side, channels = self._config.image_size, getattr(self._config, "num_channels", 3)
            images = torch.randn(size, channels, side, side, generator=self._generator)
            inputs = {"pixel_values": images, "labels": self._numbers(self._config.num_labels, (size,))}
        else:
            assert self._length is not None
            # A model may have several end-of-sequence tokens.
            ends = [self._config.pad_token_id, *np.atleast_1d(self._config.eos_token_id)]
            words = torch.tensor([number for number in range(self._config.vocab_size) if number not in ends])
            choices = (CHOICES,) if self._task == "multiple-choice" else ()
            tokens = words[self._numbers(len(words), (size, *choices, self._length))]
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **self._labels(tokens)}
        return {name: values.to(self.base.device) for name, values in inputs.items()}

    def _labels(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return random labels of the task for texts."""
        size = len(tokens)
        match self._task:
            case "question-answering":
                return {name: self._numbers(tokens.shape[-1], (size,)) for name in ANSWER}
            case "text-classification":
                return {"labels": self._numbers(self._config.num_labels, (size,))}
            case "multiple-choice":
                return {"labels": self._numbers(CHOICES, (size,))}
            case "token-classification":
                return {"labels": self._numbers(self._config.num_labels, (*tokens.shape,))}
            case _:  # a language model
                return {"labels": tokens}

    def _numbers(self, below: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(below, shape, generator=self._generator)

    def losses_of(self, inputs: dict[str, Tensor], *, in_bf16: bool = False) -> Float[Tensor, " batch"]:
        """Return the per-sample losses of a batch, shape (batch,); in bfloat16 they are computed as with `bf16=True`."""
        with torch.autocast(self.base.device.type, dtype=torch.bfloat16, enabled=in_bf16):
            return per_sample_losses(self.model, inputs, base_model=self.base)


def _refuse_adapter(name: str) -> None:
    """Refuse a folder or a repository of the hub that has an adapter in place of a model."""
    try:
        file = find_adapter_config_file(name)
    except (OSError, ValueError):  # no such folder or repository
        return
    if file is None:
        return
    base = json.loads(Path(file).read_text("utf-8")).get("base_model_name_or_path")
    raise Refusal(
        "adapter-as-model",
        f"{name} has an adapter ({ADAPTER_CONFIG_NAME}) and no model. Give the model to which the adapter belongs: --model "
        f"{base or 'BASE'}. For a run that trains adapters, estimate takes their rank as --lora-r, and plan takes the "
        "number of trained weights as --trainable-parameters, in place of --model and --task.",
    )
