"""Muon: makes the singular values of a matrix's update about equal (https://kellerjordan.github.io/posts/muon).

    d ← ‖d‖ · O / ‖O‖,    O ≈ U Vᵀ of d = U S Vᵀ, by torch's Newton-Schulz iteration

The norm of the update stays as it was. So under noise a step is as long as that of AdamBC, and the same learning rate fits.
A gradient of low rank under noise has few large singular values; the update then moves all these directions equally far.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import norm


def orthogonalized(updates: Sequence[Float[Tensor, "_ ..."]]) -> list[Float[Tensor, "_ ..."]]:
    """Return each update, orthogonalized, as a new tensor; a convolution's update is a matrix with one row per output.

    Example:
        >>> (found,) = orthogonalized([torch.diag(torch.tensor([3.0, 4.0]))])
        >>> found.norm()
        tensor(5.)
    """
    zeros = [torch.zeros_like(d.flatten(1)) for d in updates]
    for zero, d in zip(zeros, updates, strict=True):
        zero.grad = d.flatten(1)
    # Torch's Muon without momentum turns each zero into -O, times a factor that is removed below.
    torch.optim.Muon(zeros, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    # If an update is zero, O is zero too, so the division needs the clamp.
    sizes = [norm(d) / norm(step).clamp(min=torch.finfo(step.dtype).tiny) for step, d in zip(zeros, updates, strict=True)]
    return [step.mul_(-size).view_as(d) for step, size, d in zip(zeros, sizes, updates, strict=True)]
