r"""A second moment in bfloat16, rounded up or down at random so that what is lost on average is nothing.

    store(x) = ⌊x⌋ or ⌈x⌉ of bfloat16, with probability (⌈x⌉ - x) / (⌈x⌉ - ⌊x⌋) and the rest

Rounded to nearest, v_t = β₂ v_{t-1} + (1 - β₂) g_t² stands still: with β₂ = 0.999 a step changes v by a thousandth, and
half of bfloat16's spacing is two to four thousandths. (A filter's states change by a tenth or more, and are rounded to
nearest.) The random bits are a hash of the gradient and of the number itself, both of which carry the privacy noise: no
generator to advance, nothing to keep in a checkpoint.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# Knuth's multiplier for hashing, the golden ratio times 2³², as a signed 32-bit number.
_GOLDEN = -1640531527
_LOW_BITS = 0xFFFF


def store(state: Float[Tensor, "*shape"], value: Float[Tensor, "*shape"], *, entropy: Float[Tensor, "*shape"]) -> None:
    """Write a number to a state of half precision, rounded at random (modified in place).

    Args:
        state: Where to, bfloat16.
        value: What, float32, at least 0.
        entropy: Numbers that differ from step to step, such as the private gradient, float32.

    Example:
        >>> value, state = torch.full((10_000,), 1.001), torch.zeros(10_000, dtype=torch.bfloat16)
        >>> store(state, value, entropy=torch.randn(10_000, generator=torch.Generator().manual_seed(0)))
        >>> round(state.float().mean().item(), 3)
        1.001
    """
    bits = value.view(torch.int32)
    noise = ((bits ^ entropy.view(torch.int32)) * _GOLDEN >> 16) & _LOW_BITS
    # bfloat16 is the upper half of float32: a carry out of the lower half rounds up.
    state.copy_((bits + noise & ~_LOW_BITS).view(torch.float32))
