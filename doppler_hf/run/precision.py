"""Estimate how coarsely a model rounds."""

from typing import Final

import torch
from torch import nn

# Relative errors of losses and gradients, because batches of different sizes are rounded differently.
ROUNDING: Final = 1e-3
ROUNDING_BF16: Final = 0.1


def rounding_of(model: nn.Module, mixed_precision: str) -> float:
    """Return the share of itself by which rounding may change a loss or a gradient."""
    return ROUNDING_BF16 if computes_in_bf16(model, mixed_precision) else ROUNDING


def computes_in_bf16(model: nn.Module, mixed_precision: str) -> bool:
    """Return whether a model computes in bfloat16, by autocast or with some weights, or rounds as coarsely.

    Layers in 8 bits round as coarsely: they round a row of activations to multiples of 1/127 of its largest. Weights in 4
    bits are constants, the same for all examples, so only the dtype in which they compute counts.

    Args:
        model: The model.
        mixed_precision: The precision of the accelerator, which may come from the launcher rather than from the arguments.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtypes |= {vars(module)["compute_dtype"] for module in model.modules() if "compute_dtype" in vars(module)}
    return mixed_precision == "bf16" or not dtypes.isdisjoint({torch.bfloat16, torch.float16, torch.int8})
