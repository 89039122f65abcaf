r"""State in bfloat16, rounded up or down at random so that what is lost on average is nothing.

    store(x) = ⌊x⌋ or ⌈x⌉ of bfloat16, with probability (⌈x⌉ - x) / (⌈x⌉ - ⌊x⌋) and the rest

Rounded to nearest, v_t = β₂ v_{t-1} + (1 - β₂) g_t² stands still: with β₂ = 0.999 a step changes v by a thousandth, and
half of bfloat16's spacing is two to four thousandths. The random bits are a hash of the gradient and of the number
itself, both of which carry the privacy noise: no generator to advance, nothing to keep in a checkpoint.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# Knuth's multiplier for hashing, the golden ratio times 2³², as a signed 32-bit number.
_GOLDEN = -1640531527
_LOW_BITS = 0xFFFF


def in_float32(state: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the state itself, or a float32 copy if it is of half precision."""
    return state.float() if state.itemsize < 4 else state


def store(state: Float[Tensor, "*shape"], value: Float[Tensor, "*shape"], entropy: Float[Tensor, "*shape"]) -> None:
    """Writes a value that was computed in float32 back to its state (modified in place).

    Args:
        state: Where to, bfloat16, or the value itself, and then nothing is to be done.
        value: What, float32.
        entropy: Numbers that differ from step to step, such as the private gradient, float32.

    Example:
        >>> value, state = torch.full((10_000,), 1.001), torch.zeros(10_000, dtype=torch.bfloat16)
        >>> store(state, value, torch.randn(10_000, generator=torch.Generator().manual_seed(0)))
        >>> round(state.float().mean().item(), 3)
        1.001
    """
    if state is value:
        return
    bits = value.view(torch.int32)
    hashed = (bits ^ entropy.view(torch.int32)) * _GOLDEN
    noise = (hashed >> 16) & _LOW_BITS
    # bfloat16 is the upper half of float32: a carry out of the lower half rounds up, in the direction away from zero.
    state.copy_(((bits + noise) & ~_LOW_BITS).view(torch.float32))
