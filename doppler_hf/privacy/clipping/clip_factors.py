"""From an example's norm to what its gradient is multiplied by, so that it contributes a vector of norm at most C.

    vanilla     clip(g) = min(1, C/‖g‖)·g                  (Abadi et al. 2016, https://arxiv.org/abs/1607.00133)
    automatic   clip(g) = C/(‖g‖ + γ)·g,  γ = 0.01         (Bu et al. 2023, https://arxiv.org/abs/2206.07136)

Norms are raised first by what rounding may have taken from them.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from doppler_hf.privacy.clipping.per_sample_gradient import Norms, PerSampleGradient, joint

Clipping = Literal["automatic", "vanilla"]

AUTOMATIC_CLIPPING_GAMMA = 0.01
SMALLEST_FACTOR = 2.0**-130
# Of a gradient with such a norm no product of its factors leaves the range of float32, unless its terms cancel to nothing.
LARGEST_NORM = 2.0**64
# Of C: from half of that below it to half above, an example counts less and less as one that is not clipped. The steeper,
# the more the count follows the rounding of a norm, and that the others' padding.
WITHIN = 1.0


def norms_of(
    gradients: Mapping[str, PerSampleGradient], group_of: Mapping[str, str]
) -> tuple[dict[str, Norms], Bool[Tensor, " batch"], bool]:
    """Return the norms of the examples by group of parameters, which were computed in float64, and whether any were."""

    def by_group(some: Iterable[tuple[str, PerSampleGradient]]) -> dict[str, Norms]:
        parts: dict[str, list[Norms]] = {}
        for name, gradient in some:
            parts.setdefault(group_of[name], []).append(gradient.norms())
        return {group: joint(norms) for group, norms in parts.items()}

    norms = by_group(gradients.items())
    # The norms and sums for which float32 does not suffice are computed in float64, for these examples alone: to the
    # others it makes no difference that they are there.
    beyond = ~torch.stack([norm.are_certain() for norm in norms.values()]).all(dim=0)
    any_beyond = bool(beyond.any())
    if any_beyond:
        again = by_group((name, gradient.of_examples(beyond).in_float64()) for name, gradient in gradients.items())
        norms = {
            group: Norms(*(mine.masked_scatter(beyond, other) for mine, other in zip(norm, again[group], strict=True)))
            for group, norm in norms.items()
        }
    return norms, beyond, any_beyond


def clip_factors(norms: Float[Tensor, " batch"], *, max_grad_norm: float, clipping: Clipping) -> Float[Tensor, " batch"]:
    """Return the factor that brings each norm to at most `max_grad_norm`."""
    if clipping == "vanilla":
        return (max_grad_norm / norms).clamp(max=1.0)
    return max_grad_norm / (norms + AUTOMATIC_CLIPPING_GAMMA)


def factors_of(
    norms: Mapping[str, Norms],
    weights: Float[Tensor, " batch"],
    *,
    max_grad_norm: float,
    clipping: Clipping,
    dtype: torch.dtype,
    in_float64: Bool[Tensor, " batch"],
) -> dict[str, Float[Tensor, " batch"]]:
    """Return the factors of the examples by group of parameters, each of which is clipped on its own."""
    # Sensitivity: factor·norm stays within the bound whatever rounding has taken from the norm, and times a weight of at
    # most 1.
    factors = {
        group: clip_factors(norm.raised(dtype), max_grad_norm=max_grad_norm, clipping=clipping) * weights
        for group, norm in norms.items()
    }
    # In float32 smaller ones are rounded by more than the norms are raised by. Such an example contributes nothing.
    return {group: factor.where(in_float64 | (factor >= SMALLEST_FACTOR), 0.0) for group, factor in factors.items()}


def faded(norms: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return factors that fall from 1 to 0 as a norm comes near the end of the range of float32.

    Whether a product overflows depends on its form, and so on what others pad the example to: long before, the contribution
    fades away.
    """
    return (2 - 2 * norms / LARGEST_NORM).clamp(0.0, 1.0)


def num_within(
    norms: Float[Tensor, " batch"], weights: Float[Tensor, " batch"] | None, *, max_grad_norm: float
) -> Float[Tensor, ""]:
    """Return how many of these examples are not clipped, less half of them: Σ wᵢ(bᵢ − ½), in float64."""
    # Sensitivity: a number within ±½ of each example, whatever its norm, and of one that is not finite −½; times its
    # weight. Not a step at C: what rounding follows from the others would move an example across it.
    within = (0.5 + (1 - norms.double() / max_grad_norm) / WITHIN).nan_to_num(nan=0.0).clamp(0, 1) - 0.5
    return within.sum() if weights is None else within @ weights.double()
