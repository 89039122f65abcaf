"""A second moment in bfloat16, rounded at random so that nothing is lost on average.

    store(x) = ⌊x⌋ or ⌈x⌉ of bfloat16, with probability (⌈x⌉ - x) / (⌈x⌉ - ⌊x⌋) and the rest

Rounded to nearest, v_t = β₂ v_{t-1} + (1 - β₂) g_t² stands still: with β₂ = 0.999 a step changes v by a thousandth, below
half of bfloat16's spacing. The random bits are a hash of the gradient and of the number itself, both of which carry the
privacy noise: no generator to advance or save.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# Knuth's multiplier for hashing, the golden ratio times 2³², as a signed 32-bit number.
_GOLDEN = -1640531527
_LOW_BITS = 0xFFFF


def store(state: Float[Tensor, "*shape"], value: Float[Tensor, "*shape"], *, entropy: Float[Tensor, "*shape"]) -> None:
    """Write a float32 value ≥ 0 to a bfloat16 state (modified in place), rounded at random by a hash of `entropy`."""
    bits = value.view(torch.int32)
    noise = ((bits ^ entropy.view(torch.int32)) * _GOLDEN >> 16) & _LOW_BITS
    # bfloat16 is the upper half of float32: a carry out of the lower half rounds up.
    state.copy_((bits + noise & ~_LOW_BITS).view(torch.float32))
