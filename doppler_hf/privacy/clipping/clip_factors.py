"""From an example's norm to the factor of its gradient, so that it contributes a vector of norm at most C.

    vanilla     clip(g) = min(1, C/‖g‖)·g                  (Abadi et al. 2016, https://arxiv.org/abs/1607.00133)
    automatic   clip(g) = C/max(‖g‖, γ)·g                  (after Bu et al. 2023, https://arxiv.org/abs/2206.07136)

γ is a typical norm. If none is known it is next to nothing, and all gradients are brought to norm C. Norms are first raised
by the most that rounding may have taken from them.
"""

from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Clipping = Literal["automatic", "vanilla"]

SMALLEST_TYPICAL_NORM: Final = 0.01
# By how much norms are raised, in units of eps, so that rounding leaves them above the true ones: a thousandth in float32.
RAISED_BY: Final = 2**13


def raised(norms: Float[Tensor, " batch"], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """Return norms that rounding in this dtype leaves above those of what is added up."""
    return norms * (1 + RAISED_BY * torch.finfo(dtype).eps)


def clip_factors(
    norms: Float[Tensor, " batch"], *, max_grad_norm: float, clipping: Clipping, typical_norm: float = SMALLEST_TYPICAL_NORM
) -> Float[Tensor, " batch"]:
    """Return the factor that brings each norm to at most `max_grad_norm`; `typical_norm` is γ."""
    if clipping == "vanilla":
        return (max_grad_norm / norms).clamp(max=1.0)
    return max_grad_norm / norms.clamp(min=typical_norm)
