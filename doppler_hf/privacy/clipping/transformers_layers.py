"""Rules for layers of transformers and PEFT.

These are GPT-2's `Conv1D`, T5's position bias, DoRA's magnitude, prompts, windows, and BiT's convolutions and norms.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.copies import one_per_example, output_per_example
from doppler_hf.privacy.clipping.gradients import Notes, Standardization
from doppler_hf.privacy.clipping.layers import substituted
from doppler_hf.privacy.clipping.torch_layers import Rule, convolved, group_norm, transposed_linear

# Methods that compute a position bias from a trained table: of T5's attention and its like, and of MPNet's encoder.
_POSITION_BIASES = ("compute_bias", "compute_position_bias")
# Parts whose inputs are the tokens, or the windows, of all examples, one after another.
_IN_ROWS = {
    "opt.modeling_opt.OPTDecoderLayer": ("fc1", "fc2", "final_layer_norm"),
    **dict.fromkeys(("swin.modeling_swin.SwinAttention", "swinv2.modeling_swinv2.Swinv2Attention"), ("",)),
    "donut.modeling_donut_swin.DonutSwinAttention": ("",),
}


def dora(
    notes: Notes,
    module: Any,
    x: Float[Tensor, "batch *time q"],
    *,
    lora_A: nn.Module,
    lora_B: nn.Module,
    scaling: float,
    base_layer: Any,
    base_result: Float[Tensor, "batch *time p"] | None = None,
    adapter_name: str = "default",
) -> Float[Tensor, "batch *time p"]:
    """Compute Y = m/n · (W x + s·BA x) − W x, n the row norms of W + s·BA, without their gradient (Liu et al. 2024, §4.3).

    PEFT adds this to W x. Its own forward flattens m, so that there could not be one copy per example.
    """
    from peft.utils.integrations import dequantize_module_weight

    with torch.no_grad():
        weight = dequantize_module_weight(base_layer).to(x.dtype)
        low_rank = module.get_lora_weight(lora_A=lora_A, lora_B=lora_B, adapter_name=adapter_name).to(x.dtype)
        norms = module.get_weight_norm(weight=weight, lora_weight=low_rank, scaling=scaling, adapter_name=adapter_name)
    if base_result is None:  # with dropout, x is not what the base layer has seen
        base_result = F.linear(x, weight.T if module.fan_in_fan_out else weight)
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    shape = (1,) * (x.ndim - 2) + tuple(module.weight.shape)
    magnitude = one_per_example(notes, module.weight, shape)
    return magnitude * (torch.add(base_result, lora_B(lora_A(x)), alpha=scaling) / norms) - base_result


def standardized_convolution(
    notes: Notes, module: Any, hidden_state: Float[Tensor, "batch channels *positions"]
) -> Float[Tensor, "batch filters *outputs"]:
    """Compute the convolution of BiT, whose weight is standardized first."""
    with torch.no_grad():
        # Transformers standardizes by this function, too: rows of the weight take the place of its channels.
        rows = in_float32(module.weight).flatten(1).unsqueeze(0)
        standard, _, rstd = torch.native_batch_norm(rows, None, None, None, None, True, 0.0, module.eps)
    padded = hidden_state if module.pad is None else module.pad(hidden_state)
    return convolved(notes, module, padded, standard=Standardization(standard.squeeze(0), rstd))


def group_norm_and_activation(
    notes: Notes, module: Any, hidden_state: Float[Tensor, "batch channels *positions"]
) -> Float[Tensor, "batch channels *positions"]:
    """Compute BiT's normalization, with its activation function."""
    return module.activation(group_norm(notes, module, hidden_state))


def transformers_rules() -> dict[Callable[..., Any], Rule]:
    """Return the rules by the forward that each replaces; those of PEFT and of BiT only if these are imported."""
    rules: dict[Callable[..., Any], Rule] = {Conv1D.forward: transposed_linear}
    if (defines_bit := sys.modules.get("transformers.models.bit.modeling_bit")) is not None:
        rules[defines_bit.WeightStandardizedConv2d.forward] = standardized_convolution
        rules[defines_bit.BitGroupNormActivation.forward] = group_norm_and_activation
    if (defines_dora := sys.modules.get("peft.tuners.lora.dora")) is not None:
        rules[defines_dora.DoraLinearLayer.forward] = dora
    return rules


def relative_bias_method(module: nn.Module) -> str | None:
    """Return the method by which a module computes its position bias from a trained table, as T5's attention does."""
    table = module._modules.get("relative_attention_bias")
    if not isinstance(table, nn.Embedding) or not table.weight.requires_grad:
        return None
    return next((name for name in _POSITION_BIASES if hasattr(module, name)), None)


def relative_bias(
    notes: Notes, name: str, module: Any, compute_bias: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Float[Tensor, "rows heads queries keys"]:
    """Return the bias of shape (1, heads, length, length), or as often as there are examples, once for each example.

    The look-up inside has no batch dimension, and its first dimension may equal the batch size by chance.
    """
    table = module.relative_attention_bias
    if not notes.is_watching:
        return compute_bias(*args, **kwargs)

    def bias_of(parameters: Mapping[str, Tensor]) -> Float[Tensor, "1 heads queries keys"]:
        with notes.unwatched(), substituted(table, parameters):
            return compute_bias(*args, **kwargs)[:1]

    notes.repeated.append(name)
    return output_per_example(notes, {"weight": table.weight}, bias_of)


def without_checkpointing(module: Any) -> Callable[..., Any] | None:
    """Return a layer's forward without the checkpointing around it, as transformers 5.23 and newer wrap it, or None."""
    forward = type(module).forward
    is_wrapped = isinstance(module, GradientCheckpointingLayer) and "checkpointing" in forward.__code__.co_name
    return functools.partial(forward.__wrapped__, module) if is_wrapped else None


def checkpointing(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a stand-in that was made of `without_checkpointing`, with checkpointing around it if the layer has that.

    Within, what stands in for the layer's parameters would be missing when the layer is computed again.
    """
    if module.gradient_checkpointing and module.training:
        return module._gradient_checkpointing_func(functools.partial(forward, **kwargs), *args)
    return forward(*args, **kwargs)


def prompt(
    notes: Notes, get_prompt: Callable[..., Tensor], batch_size: int, *args: Any, **kwargs: Any
) -> Float[Tensor, "batch places dim"]:
    """Return the prompt once for each example.

    PEFT looks it up at indices of shape (1, places), for which the rule of embeddings returns a row for each example, and
    would repeat these rows once more.
    """
    return get_prompt(1 if notes.is_watching else batch_size, *args, **kwargs)


def parts_in_rows(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module whose input has several rows for each example, one after another: tokens, or windows."""
    path = f"{type(module).__module__}.{type(module).__name__}".removeprefix("transformers.models.")
    return [module.get_submodule(name) for name in _IN_ROWS.get(path, ())]


def in_rows(notes: Notes, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute one of `parts_in_rows`."""
    before, notes.batch_size = notes.batch_size, len(hidden_states)
    try:
        return forward(hidden_states, *args, **kwargs)
    finally:
        notes.batch_size = before
