"""A comparison of the engine with plain autograd on two examples, before the first step.

A wrong per-sample gradient would go unnoticed: the loss still falls, but the guarantee is void. The check runs on the user's
own model, with its adapters, attention and checkpointing.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Engine
from doppler_hf.privacy.clipping.factored import NormRule

# The share of the clip norm that is added to the size of a parameter's gradient when the two are compared: some gradients,
# such as that of the bias of attention's keys, consist of rounding only.
OF_THE_WHOLE = 1e-2
# Adapters, gates and layer scales begin below this. Matrices begin at about 0.02 or more, and need not be copied.
NEARLY_ZERO = 0.01


def check_per_sample_gradients(
    model: nn.Module,
    losses_of: Callable[[Mapping[str, Any]], Float[Tensor, " batch"]],
    inputs: Mapping[str, Any],
    *,
    engine: Engine,
    norm_rule: NormRule = "auto",
    tolerance: float = 1e-3,
) -> None:
    """Compare an engine's clipped sum of two examples with that of ordinary gradients, one example at a time.

    Both examples are clipped to half the smaller norm, so that each one's share in the sum is known and a gradient assigned
    to the wrong example is noticed. Weights near zero are moved a little during the check, because gradients that pass
    through weights of zero, such as those of new adapters, would agree whatever the engine does.

    Nothing about the two examples is released: whether the engine is right depends on the architecture.

    Args:
        model: The model; it is left unchanged.
        losses_of: A function that calls the model with inputs and returns one loss per example.
        inputs: Two examples, collated; tensors of length 2 have the batch in front.
        engine: As in `ClippedGradients`.
        norm_rule: As in `ClippedGradients`.
        tolerance: The difference allowed, relative to a parameter's own gradient; the default suits float32.

    Raises:
        ValueError: If the two disagree. The message has the parameter's name and the difference.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with without_dropout(model), moved(trainable):
        # Every pass is made twice, the first time for the norm only, so that memory holds no more than one example's
        # gradient and the sum: less than in a step of training.
        norms = [norm_of(gradients_of(losses_of(row(inputs, index)), trainable)) for index in range(2)]
        bound = min(norms) / 2 or 1.0  # a gradient of exactly zero cannot be clipped
        with ClippedGradients(model, max_grad_norm=bound, engine=engine, norm_rule=norm_rule) as clipped:
            clipped.backward(losses_of(dict(inputs)))
            difference = clipped.sums
        sizes = {name: float(torch.linalg.vector_norm(total)) for name, total in difference.items()}
        for index, norm in enumerate(norms):
            for name, gradient in gradients_of(losses_of(row(inputs, index)), trainable).items():
                difference[name].add_(gradient, alpha=-bound / max(norm, bound))
    for name, rest in difference.items():
        error, size = float(torch.linalg.vector_norm(rest)), sizes[name]
        if not error <= tolerance * (size + OF_THE_WHOLE * bound):
            raise ValueError(
                f"The per-sample gradients of {name!r} are wrong: for two examples the clipped sum of engine={engine!r} is "
                f"off by {error / (size + OF_THE_WHOLE * bound):.2g} of its size, so that an example's contribution is not "
                "bounded. Either the loss of one example depends on the other (a mean or a norm over the batch), or the "
                "engine does not fit one of the layers. Freeze that parameter, or try the other engine."
            )


def row(inputs: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return one of two collated examples as a batch of one."""
    return {
        name: value[index : index + 1] if isinstance(value, Tensor) and value.ndim and len(value) == 2 else value
        for name, value in inputs.items()
    }


def gradients_of(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the ordinary gradients by name, from `.grad`: re-entrant checkpointing leaves them nowhere else."""
    for parameter in parameters.values():
        parameter.grad = None
    losses.sum().backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """Return the joint norm."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and the like, but leave gradient checkpointing on."""
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for module, was_training in training:
            # Checkpointing reads the flag of the block that it wraps, dropout its own.
            module.training = was_training and bool(vars(module).get("gradient_checkpointing"))
        yield
    finally:
        for module, was_training in training:
            module.training = was_training


@contextlib.contextmanager
def moved(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Add a little fixed noise to the parameters that are nearly zero throughout, and restore them exactly afterwards."""
    small = [p for p in parameters.values() if p.numel() and max(-p.detach().min(), p.detach().max()) < NEARLY_ZERO]
    before = [parameter.detach().clone() for parameter in small]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in small:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(small, before, strict=True):
                parameter.copy_(value)
