"""Gradients of several parameters taken together, so that there are fewer kernels."""

from collections.abc import Mapping

import torch

from doppler_hf.privacy.clipping.book import SMALL, STACKED
from doppler_hf.privacy.clipping.per_sample_gradient import Dense, PerSampleGradient, Product

Names = tuple[str, ...]


def in_groups(
    gradients: Mapping[str, PerSampleGradient], group_of: Mapping[str, str], *, stacks: bool
) -> dict[Names, PerSampleGradient]:
    """Return the gradients by the names of their parameters, of which those in a group of clipping may be together.

    Small ones in full are side by side. With `stacks`, so are the factors of products of one shape, which are copied for it.
    """
    found: dict[Names, PerSampleGradient] = {}
    small: dict[object, dict[str, Dense]] = {}
    alike: dict[object, dict[str, Product]] = {}
    for name, gradient in gradients.items():
        group = group_of[name]
        if isinstance(gradient, Dense) and gradient.values.numel() < (STACKED if stacks else SMALL):
            small.setdefault((group, gradient.values.dtype), {})[name] = gradient
        elif isinstance(gradient, Product) and stacks and max(gradient.left.numel(), gradient.right.numel()) < STACKED:
            shapes = [(factor.shape, factor.dtype) for factor in (gradient.left, gradient.right)]
            alike.setdefault((group, *shapes), {})[name] = gradient
        else:
            found[name,] = gradient
    for dense in small.values():
        found[*dense] = Dense(torch.cat([each.values for each in dense.values()], dim=1))
    for products in alike.values():
        left, right = (torch.cat(factors) for factors in zip(*((p.left, p.right) for p in products.values()), strict=True))
        found[*products] = Product(left, right, stack=len(products))
    return found
