"""The choice of per-example loss for a model of transformers, from the model itself.

transformers finds a model's loss by `loss_type`, the end of its class's name (`PreTrainedModel.__init__`,
`loss/loss_utils.py`), and for older names by its tables of auto classes. This file does the same.
"""

import sys
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from doppler_hf.privacy.losses.losses import classification_losses, token_losses

TokenTask = Literal["causal_lm", "seq2seq_lm", "masked_lm", "token_classification"]

# Masked comes before causal: XLM's head is in both tables, and its labels are aligned with its inputs.
_LOSS_OF_TABLE = (
    (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, ForTokenClassification),
    (MODEL_FOR_MASKED_LM_MAPPING_NAMES, ForMaskedLMLoss),
    (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, ForCausalLMLoss),
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, ForCausalLMLoss),
)


def without_adapters(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or `model` itself if it has none, as when PEFT is not imported."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def token_task(model: nn.Module) -> TokenTask | None:
    """Return the task of a model that has one label per token, or None for any other model.

    Args:
        model: The model, without PEFT's wrapper.

    Returns:
        The task; a language model that is an encoder-decoder is `seq2seq_lm`.

    Example:
        >>> token_task(GPT2LMHeadModel(config))
        'causal_lm'
    """
    if not isinstance(model, PreTrainedModel):
        return None
    loss = LOSS_MAPPING.get(model.loss_type)
    if model.loss_type is None:  # GPT2LMHeadModel and others of its time, and subclasses with names of their own
        names = {cls.__name__ for cls in type(model).__mro__}
        loss = next((loss for table, loss in _LOSS_OF_TABLE if not names.isdisjoint(table.values())), None)
    if loss is ForTokenClassification:
        return "token_classification"
    if loss not in (ForCausalLMLoss, ForMaskedLMLoss):
        return None
    # T5 has the loss of a causal model in the table, T5Gemma that of a masked one; neither shifts its labels.
    if model.config.is_encoder_decoder:
        return "seq2seq_lm"
    return "causal_lm" if loss is ForCausalLMLoss else "masked_lm"


def per_sample_losses(model: nn.Module, inputs: dict[str, Any], *, base_model: PreTrainedModel) -> Float[Tensor, " batch"]:
    """Call the model once and return the loss of each example.

    Args:
        model: The model, with its wrappers.
        inputs: One micro-batch with `labels`: of shape (batch, length) for a task of tokens, otherwise as in
            `classification_losses`.
        base_model: The model without wrappers, whose class determines the task.

    Returns:
        Losses, shape (batch,), attached to the graph.

    Raises:
        ValueError: If there is no rule for the model's class, or a mixture of experts returns its router's logits.
    """
    task = token_task(base_model)
    labels = inputs.get("labels")
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    if task == "seq2seq_lm" and labels is not None and "decoder_input_ids" not in inputs:
        if hasattr(base_model, "prepare_decoder_input_ids_from_labels"):
            inputs["decoder_input_ids"] = base_model.prepare_decoder_input_ids_from_labels(labels)
        else:  # M2M100 and Whisper shift the labels inside their forward pass, whose loss is not used.
            inputs["labels"] = labels
    outputs = model(**inputs)
    logits = outputs.get("logits") if isinstance(outputs, dict) else None
    if labels is None or logits is None:
        raise _no_rule(base_model)
    if any(name.endswith("router_logits") for name in outputs):
        raise ValueError(
            f"{type(base_model).__name__} has output_router_logits=True: the balancing loss of its router is one number "
            "for the whole batch and cannot be split into examples. Set output_router_logits=False in its config."
        )
    if task is not None:
        return token_losses(logits, labels, shift=task == "causal_lm")
    if logits.ndim != 2 or logits.shape[-1] != getattr(base_model.config, "num_labels", None):
        raise _no_rule(base_model)
    return classification_losses(logits, labels, problem_type=base_model.config.problem_type)


def _no_rule(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"There is no per-example loss for {type(model).__name__}: it needs `labels`, and logits of shape (batch, "
        "num_labels) for sequence and image classification, or (batch, length, classes) for language models and token "
        "classification. Override compute_per_sample_loss for another task."
    )
