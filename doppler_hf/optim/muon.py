"""Muon: the update of a matrix, with singular values that are made about equal (https://kellerjordan.github.io/posts/muon).

    d ← ‖d‖ · O / ‖O‖,    O = U Vᵀ of d = U S Vᵀ, about, by torch's Newton-Schulz iteration

The size stays what the optimizer gave it. So under noise a step is as long as AdamBC's, and the same learning rate fits. A
gradient of low rank under noise has few large singular values; the update then moves all directions that stand out alike.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import norm


def orthogonalized(updates: Sequence[Float[Tensor, "_ ..."]]) -> list[Float[Tensor, "_ ..."]]:
    """Return each update as a new tensor; those of convolutions are matrices with a row for each output.

    Example:
        >>> (found,) = orthogonalized([torch.diag(torch.tensor([3.0, 4.0]))])
        >>> found.norm()
        tensor(5.)
    """
    zeros = [torch.zeros_like(d.flatten(1)) for d in updates]
    for zero, d in zip(zeros, updates, strict=True):
        zero.grad = d.flatten(1)
    # torch's optimizer without a momentum makes its own step of each zero: -O, by a factor of its own.
    torch.optim.Muon(zeros, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    # Of an update of zeros O is zero, too.
    sizes = [norm(d) / norm(step).clamp(min=torch.finfo(step.dtype).tiny) for step, d in zip(zeros, updates, strict=True)]
    return [step.mul_(-size).view_as(d) for step, size, d in zip(zeros, sizes, updates, strict=True)]
