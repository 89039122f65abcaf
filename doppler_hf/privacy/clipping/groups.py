"""Gradients of several parameters taken together, so that there are fewer kernels."""

from collections.abc import Mapping

import torch

from doppler_hf.privacy.clipping.per_sample_gradient import Dense, PerSampleGradient

Names = tuple[str, ...]


def in_groups(
    gradients: Mapping[str, PerSampleGradient], group_of: Mapping[str, str], *, small: int
) -> dict[Names, PerSampleGradient]:
    """Return the gradients by the names of their parameters, of which those in full of a group of clipping may be together.

    They are side by side, if each has fewer than `small` numbers.
    """
    found: dict[Names, PerSampleGradient] = {}
    together: dict[object, dict[str, Dense]] = {}
    for name, gradient in gradients.items():
        if isinstance(gradient, Dense) and gradient.values.numel() < small:
            together.setdefault((group_of[name], gradient.values.dtype), {})[name] = gradient
        else:
            found[name,] = gradient
    for dense in together.values():
        found[*dense] = Dense(torch.cat([each.values for each in dense.values()], dim=1))
    return found
