"""What rounding alone does to gradients."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

# So many times what rounding changes is no error: what layers do inside is rounded too, and that several times.
OF_ROUNDING: Final = 25.0
# Units in the last place by which rounding changes a sum of some hundred numbers in its own precision.
OF_A_SUM: Final = 16.0


@contextlib.contextmanager
def rounded_at_random(seed: int = 0) -> Iterator[None]:
    """Change each number of the gradients of layers' outputs as the rounding of its sum may; losses stay as they are.

    Processors add up in orders of their own, which may follow from the shape of a batch and the place of a row. What cancels
    between two rows to the last bit on one of them is rounding on another.
    """
    generator = torch.Generator().manual_seed(seed)

    def rounded(gradient: Tensor) -> Tensor:
        # In half precision sums are of float32, and rounded once.
        most = (1.0 if gradient.itemsize < 4 else OF_A_SUM) * torch.finfo(gradient.dtype).eps
        return gradient + gradient * (most * (2 * torch.rand(gradient.shape, generator=generator) - 1)).to(gradient)

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(rounded)

    with register_module_forward_hook(watch):
        yield
