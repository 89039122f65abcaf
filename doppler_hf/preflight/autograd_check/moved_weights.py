"""Move a model's trained weights for a second check of what its losses depend on.

Initial weights can hide what a layer does: an adapter whose output is zero, a gate that is closed, a head that gives all
classes nearly equal logits. After some steps they hide nothing. So for the duration of a block, trained weights are moved by
random amounts that make their outputs as large as those of other layers.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from doppler_hf.shards import part_here

# A matrix larger than this hides nothing unless it is zero, and copying it would take longer than the check itself.
_LARGE: Final = 1 << 18
# The amount by which the numbers of a vector, such as a gate or a scale, are moved.
_OF_VECTORS: Final = 0.25


@contextlib.contextmanager
def moved_weights(model: nn.Module) -> Iterator[None]:
    """Move small trained parameters, and large parameters that are almost zero, and restore them bit for bit.

    If weights are sharded, each process moves its rows. The amounts are the same at every call and depend on no example.
    """
    generator = torch.Generator().manual_seed(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.is_floating_point()]
    chosen = ((parameter, part_here(parameter).detach()) for parameter in trained)
    moved = [(each, part) for each, part in chosen if each.numel() <= _LARGE or _is_almost_zero(part, _amount(each))]
    # Copy all parameters before moving any, since two parameters may share their storage.
    before = [part.clone() for _, part in moved]
    try:
        for parameter, part in moved:
            part.add_(_amount(parameter) * torch.randn(part.shape, generator=generator).to(part))
        yield
    finally:
        for (_, part), value in zip(moved, before, strict=True):
            part.copy_(value)


def _amount(parameter: Tensor) -> float:
    """Return how far the numbers of a parameter move; a matrix moves so far that its outputs are as large as its inputs."""
    return _OF_VECTORS if parameter.ndim < 2 else float(max(1, *parameter.shape[1:]) ** -0.5)


def _is_almost_zero(part: Tensor, amount: float) -> bool:
    """Return whether the middle of a parameter has zeros, or the noise that replaces them; the first row may be padding."""
    some = part.flatten()[part.numel() // 2 :][:64]
    return bool(some.abs().mean() < 0.1 * amount) if len(some) else True
