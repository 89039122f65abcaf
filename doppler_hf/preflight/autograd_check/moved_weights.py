"""A model whose trained weights have moved, for a second look at what its losses depend on.

Weights at the start of a training can hide what a layer does: an adapter whose output is zero, a gate that is closed, a
head that gives all classes nearly equal logits. After some steps they hide nothing. So for the duration of a block trained
weights are moved by random amounts that make their outputs as large as those of other layers.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from doppler_hf.shards import part_here

# A larger matrix passes something on unless it is zero, and to copy it would take longer than the look itself.
_LARGE: Final = 1 << 18
# How far a number of a vector moves, such as a gate or a scale.
_OF_VECTORS: Final = 0.25


@contextlib.contextmanager
def moved_weights(model: nn.Module) -> Iterator[None]:
    """Move small trained parameters, and large ones that are next to zero, and restore each of them bit for bit.

    In shards each process moves its rows. The numbers are the same at every call, and none is of an example.
    """
    generator = torch.Generator().manual_seed(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.is_floating_point()]
    chosen = ((parameter, part_here(parameter).detach()) for parameter in trained)
    moved = [(each, part) for each, part in chosen if each.numel() <= _LARGE or _is_next_to_zero(part, _amount(each))]
    # All copies first: two parameters may share their storage.
    before = [part.clone() for _, part in moved]
    try:
        for parameter, part in moved:
            part.add_(_amount(parameter) * torch.randn(part.shape, generator=generator).to(part))
        yield
    finally:
        for (_, part), value in zip(moved, before, strict=True):
            part.copy_(value)


def _amount(parameter: Tensor) -> float:
    """Return how far the numbers of a parameter move: of a matrix so far that its outputs are as large as its inputs."""
    return _OF_VECTORS if parameter.ndim < 2 else float(max(1, *parameter.shape[1:]) ** -0.5)


def _is_next_to_zero(part: Tensor, amount: float) -> bool:
    """Return whether numbers in the middle are zeros, or the noise in their place; the first row may be of the padding."""
    some = part.flatten()[part.numel() // 2 :][:64]
    return bool(some.abs().mean() < 0.1 * amount) if len(some) else True
