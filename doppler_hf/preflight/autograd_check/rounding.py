"""Estimate how much rounding alone changes gradients."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

# A difference of up to so many times the effect of rounding is not an error, since layers also round inside, several times.
OF_ROUNDING: Final = 25.0
# The number of units in the last place by which rounding changes a sum of some hundred numbers in its own precision.
OF_A_SUM: Final = 16.0


@contextlib.contextmanager
def rounded_at_random(seed: int = 0) -> Iterator[None]:
    """Change the gradients of layers' outputs as rounding may change their sums; losses stay as they are.

    Processors add up in different orders, which may depend on the shape of a batch and the place of a row. Terms that cancel
    between two rows to the last bit on one processor may leave a rounding error on another.
    """
    generator = torch.Generator().manual_seed(seed)

    def rounded(gradient: Tensor) -> Tensor:
        # In half precision, sums are computed in float32 and rounded once.
        most = (1.0 if gradient.itemsize < 4 else OF_A_SUM) * torch.finfo(gradient.dtype).eps
        return gradient + gradient * (most * (2 * torch.rand(gradient.shape, generator=generator) - 1)).to(gradient)

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(rounded)

    with register_module_forward_hook(watch):
        yield
