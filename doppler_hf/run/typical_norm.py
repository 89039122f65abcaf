"""About the norm of an example's gradient before training, by which automatic clipping leaves small ones small.

Where all gradients are brought to one norm, examples that are fitted pull as hard as others: a classifier runs to the class
that is more frequent. At even odds the gradient of a logit is half the inputs of the head. Their norm is found on made-up
inputs, so that it is a public number, and no bound: what is longer is clipped.
"""

import contextlib
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss

from doppler_hf.privacy.clipping.clip_factors import SMALLEST_TYPICAL_NORM
from doppler_hf.privacy.clipping.refused_layers import modes_kept
from doppler_hf.privacy.losses import without_adapters

_NUMBER, _TOKENS, _SIDE = 8, 64, 64


def typical_norm(model: nn.Module, *, has_own_loss: bool) -> float:
    """Return half the norm of what enters the trained linear head of a classifier of Transformers with its loss.

    For other models, for those that do not take the made-up inputs, for regression and for several labels at once it is next
    to nothing.
    """
    base = without_adapters(model)
    loss = LOSS_MAPPING.get(base.loss_type) if isinstance(base, PreTrainedModel) else None
    if has_own_loss or loss is not ForSequenceClassificationLoss or base.config.num_labels == 1:
        return SMALLEST_TYPICAL_NORM
    if base.config.problem_type not in (None, "single_label_classification"):
        return SMALLEST_TYPICAL_NORM
    heads = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad and layer.out_features == base.config.num_labels
        if "lora_" not in name
    ]
    norms: list[float] = []
    if heads:
        hook = heads[-1].register_forward_pre_hook(
            lambda _, inputs: norms.append(float(inputs[0].float().norm(dim=-1).median()))
        )
        # Any error is of an input that we made up, and without a norm the run clips as it does for other models.
        with hook, modes_kept(model), torch.no_grad(), contextlib.suppress(Exception):
            model.eval()
            model(**made_up_inputs(base))
    # Sensitivity: a norm that is not a number would make sums that are none.
    return max(norms[-1] / 2, SMALLEST_TYPICAL_NORM) if norms and math.isfinite(norms[-1]) else SMALLEST_TYPICAL_NORM


def made_up_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return random tokens or pixels, the same for every process and training."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", _SIDE)
        size = (_NUMBER, getattr(config, "num_channels", 3), *([side] * 2 if isinstance(side, int) else side))
        return {"pixel_values": torch.randn(size, generator=generator).to(model.device)}
    # None of them ends a text or is padding, which have the first and last numbers.
    shape = (_NUMBER, min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS) // 2)
    tokens = torch.randint(config.vocab_size // 4, 3 * config.vocab_size // 4, shape, generator=generator)
    return {"input_ids": tokens.to(model.device), "attention_mask": torch.ones_like(tokens).to(model.device)}
