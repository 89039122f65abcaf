"""Plain autograd: the gradients that the engine is compared with before the first step."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.shards import gathered

# A function that calls the model with inputs and returns one loss per example.
Losses = Callable[[Mapping[str, Any]], Float[Tensor, " batch"]]
Inputs = Mapping[str, Any]


class Trial(NamedTuple):
    """Examples that are to have the same losses and gradients in one batch as each has alone."""

    model: nn.Module
    losses_of: Losses
    alone: Sequence[Inputs]  # each example as a batch of one
    together: Inputs  # all of them, in the same order


def refuse_number_of_losses(losses: Any, number: int) -> None:
    """Refuse more or fewer losses than examples, and what has no gradient."""
    if not isinstance(losses, Tensor) or not losses.requires_grad:
        kind = "one without a gradient" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ValueError(
            f"compute_per_sample_loss must return a tensor that is attached to the graph, got {kind}. Return one loss for "
            "each example, without detach(), item() or torch.no_grad()."
        )
    if losses.ndim == 0:
        raise ValueError(
            f"The losses of {number} collated examples must have shape ({number},), got a single number. Return one loss "
            "for each example, as reduction='none' gives: their mean would couple the examples."
        )
    if losses.shape != (number,):
        # Not their shape, which may hold the length of an example: messages end in logs.
        got, fix = (
            ("several a row", "Reduce an example's to one: losses.mean(dim=1) of classes, or the mean over its own tokens.")
            if losses.ndim > 1
            else ("more or fewer", "Let the collator return one row for each example (no packing).")
        )
        raise ValueError(
            f"The losses of {number} collated examples must have shape ({number},), got {got}. {fix} Let "
            "compute_per_sample_loss return one loss for each example."
        )


def gradients_of(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the ordinary gradients by name, from `.grad`: re-entrant checkpointing leaves them nowhere else."""
    used = {name: gathered(parameter) for name, parameter in parameters.items()}
    for parameter in used.values():
        parameter.grad = None
    losses.sum().backward()
    # Of weights in channels_last it lies as they do, and the sums of the engine do not.
    gradients = {name: parameter.grad.contiguous() for name, parameter in used.items() if parameter.grad is not None}
    for parameter in used.values():
        parameter.grad = None
    return gradients


def norm_of(tensors: Collection[Tensor]) -> float:
    """Return the joint norm, each row's in its own precision and the whole in float64."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1) if tensor.ndim else tensor for tensor in tensors]
    norm = math.hypot(*(float(torch.linalg.vector_norm(row, dtype=torch.float64)) for row in rows))
    if math.isfinite(norm):
        return norm
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))
