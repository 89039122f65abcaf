"""From an example's norm to the factor of its gradient, so that it contributes a vector of norm at most C.

    vanilla     clip(g) = min(1, C/‖g‖)·g                  (Abadi et al. 2016, https://arxiv.org/abs/1607.00133)
    automatic   clip(g) = C/max(‖g‖, γ)·g                  (after Bu et al. 2023, https://arxiv.org/abs/2206.07136)

γ is next to nothing, so automatic clipping brings all gradients to norm C: examples that are fitted would pull as hard as
others, and a classifier run to the class that is more frequent. So those of a classifier are also multiplied by
`shares_of_error`. Norms are first raised by the most that rounding may have taken from them.
"""

from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Clipping = Literal["automatic", "vanilla"]

SMALLEST_NORM: Final = 0.01
# By how much norms are raised, in units of eps, so that rounding leaves them above the true ones: a thousandth in float32.
RAISED_BY: Final = 2**13


def raised(norms: Float[Tensor, " batch"], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """Return norms that rounding in this dtype leaves above those of what is added up."""
    return norms * (1 + RAISED_BY * torch.finfo(dtype).eps)


def clip_factors(norms: Float[Tensor, " batch"], *, max_grad_norm: float, clipping: Clipping) -> Float[Tensor, " batch"]:
    """Return the factor that brings each norm to at most `max_grad_norm`."""
    if clipping == "vanilla":
        return (max_grad_norm / norms).clamp(max=1.0)
    return max_grad_norm / norms.clamp(min=SMALLEST_NORM)


def shares_of_error(losses: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Return min(1, 2(1 − p)) of cross-entropies −log p: 1 where the right class has at most even odds, and 0 at no loss.

    The gradient of a logit is in proportion to 1 − p. A loss that is not a number has the share 1, so that it is counted.
    """
    losses = losses.detach().to(torch.promote_types(losses.dtype, torch.float32))
    return (-2 * torch.expm1(-losses)).nan_to_num(nan=1.0).clamp(0.0, 1.0)
