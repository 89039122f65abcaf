"""A comparison of the engine on a batch with plain autograd on each of its examples alone, before the first step.

A wrong per-sample gradient would go unnoticed: the loss still falls, but the guarantee is void. So would a gradient that
changes with the examples beside it: the bound on each would hold, and one example more would change all the others. The
check runs on the user's own model, data and collator, with adapters, attention and checkpointing.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Engine
from doppler_hf.privacy.clipping.factored import UNDERFLOW, NormRule

# The share of the largest norm that is added to the size of a parameter's gradient when the two are compared: some
# gradients, such as that of the bias of attention's keys, consist of rounding only.
OF_THE_WHOLE = 1e-2
# Norms may be too large by this much: some are raised by a bound on their rounding.
NORM_ALLOWANCE = 0.1
# Adapters, gates and layer scales begin below this. Matrices begin at about 0.02 or more, and need not be copied.
NEARLY_ZERO = 0.01

Losses = Callable[[Mapping[str, Any]], Float[Tensor, " batch"]]


def check_per_sample_gradients(
    model: nn.Module,
    losses_of: Losses,
    *,
    alone: Sequence[Mapping[str, Any]],
    together: Mapping[str, Any],
    engine: Engine,
    norm_rule: NormRule = "auto",
    tolerance: float = 1e-3,
) -> None:
    """Compare an engine's gradients of a batch with ordinary gradients of its examples, each collated by itself.

    The examples should differ in length, so that one of them is padded in the batch and the others are not. Nothing is
    clipped, and each example has a weight of its own, so that a gradient assigned to the wrong example is noticed, and a
    loss that is scaled by the number of examples or tokens in the batch. Weights near zero are moved a little during the
    check, because gradients that pass through weights of zero, such as those of new adapters, would agree whatever the
    engine does. An example whose gradient is not finite is compared with nothing, since it contributes nothing.

    Nothing about the examples is released: whether the two agree depends on model, loss and collator.

    Args:
        model: The model; it is left unchanged.
        losses_of: A function that calls the model with inputs and returns one loss per example.
        alone: Each example as a batch of one.
        together: All of them in one batch, in the same order.
        engine: As in `ClippedGradients`.
        norm_rule: As in `ClippedGradients`.
        tolerance: The difference allowed, relative to a parameter's own gradient; the default suits float32.

    Raises:
        ValueError: If the two disagree. The message names the parameter at which they do most, and the first layer whose
            output for an example changes with the examples beside it.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = 0.5 ** torch.arange(len(alone), dtype=torch.float32)
    with without_dropout(model), moved(trainable):
        expected: dict[str, Tensor] = {}
        norms_alone = []
        for index, inputs in enumerate(alone):
            losses = losses_of(dict(inputs))
            refuse_number_of_losses(losses, 1)
            gradients = gradients_of(losses, trainable)
            norms_alone.append(norm_of(gradients))
            if not math.isfinite(norms_alone[-1]):
                weights[index] = 0.0
                continue
            for name, gradient in gradients.items():
                # In place: fresh memory for a large model takes longer than what is computed in it.
                weighted = in_float32(gradient).mul_(weights[index])
                expected[name] = expected[name].add_(weighted) if name in expected else weighted
        # No norm reaches this bound, so nothing is clipped.
        with ClippedGradients(model, max_grad_norm=1e30, engine=engine, norm_rule=norm_rule) as clipped:
            losses = losses_of(dict(together))
            refuse_number_of_losses(losses, len(alone))
            norms = clipped.backward(losses, weights=weights.to(losses.device)).tolist()
            difference = clipped.sums
        sizes = {name: float(torch.linalg.vector_norm(total)) for name, total in difference.items()}
        for name, total in expected.items():
            difference[name].sub_(total)
        largest = max(filter(math.isfinite, norms_alone), default=0.0)
        off = {
            name: float(torch.linalg.vector_norm(rest)) / max(sizes[name] + OF_THE_WHOLE * largest, 1e-30)
            for name, rest in difference.items()
        }
        worst = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
        if not off[worst] <= tolerance:
            raise ValueError(_reason(model, losses_of, alone, together, parameter=worst, off=off[worst], engine=engine))
    for norm, norm_alone in zip(norms, norms_alone, strict=True):
        # A norm that is too small would let an example contribute more than the bound, one too large only less.
        lowest, highest = norm_alone * (1 - tolerance), norm_alone * (1 + max(tolerance, NORM_ALLOWANCE)) + UNDERFLOW
        if math.isfinite(norm_alone) and not lowest <= norm <= highest:
            # Neither of the norms: both are about one private example, and messages end in logs.
            size = "smaller" if norm < lowest else "larger"
            raise ValueError(
                f"The norm of an example's gradient must be that of autograd, got a {size} one from "
                f"engine={engine!r}, so that an example's contribution is not bounded. Try the other engine."
            )


def refuse_number_of_losses(losses: Any, number: int) -> None:
    """Refuse more or fewer losses than examples, and what has no gradient.

    Raises:
        ValueError: If `losses` are not a tensor of shape (number,) that is attached to the graph.
    """
    if not isinstance(losses, Tensor) or not losses.requires_grad:
        kind = "one without a gradient" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ValueError(
            f"compute_per_sample_loss must return a tensor that is attached to the graph, got {kind}. Return one loss for "
            "each example, without detach(), item() or torch.no_grad()."
        )
    if losses.shape != (number,):
        raise ValueError(
            f"The losses of {number} collated examples must have shape ({number},), got {tuple(losses.shape)}. Let the "
            "collator return one row for each example, and compute_per_sample_loss one loss."
        )


def _reason(
    model: nn.Module,
    losses_of: Losses,
    alone: Sequence[Mapping[str, Any]],
    together: Mapping[str, Any],
    *,
    parameter: str,
    off: float,
    engine: Engine,
) -> str:
    """Say what is at fault: the engine, the collator, the loss or a layer."""
    one = {parameter: dict(model.named_parameters())[parameter]}

    def relative_change(inputs: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> float:
        """Return how far autograd's gradient of a batch is from the sum of those of its examples."""
        expected = sum(gradients_of(losses_of(dict(part)), one).get(parameter, torch.zeros(())) for part in parts)
        found = gradients_of(losses_of(dict(inputs)), one).get(parameter, torch.zeros(()))
        return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected).clamp(min=1e-30))

    if relative_change(together, alone) < off / 10:
        return (
            f"The per-sample gradients of {parameter!r} are wrong: engine={engine!r} is off by {off:.2g} of their size, so "
            "that an example's contribution is not bounded. The engine does not fit one of the layers. Freeze that "
            "parameter, or try the other engine."
        )
    reason = (
        f"The gradient of one example changes with the examples beside it, at {parameter!r} by {off:.2g} of its size, so "
        "that one example more would change all others, and no noise covers that: "
    )
    if not all(is_row_of(together, inputs, index) for index, inputs in enumerate(alone)):
        return reason + (
            "the collator's row for an example is not the one that it makes of that example alone. Use a collator that "
            "mixes no examples (no MixUp, CutMix or packing), and pad on the right."
        )
    layer = first_difference(model, losses_of, alone[0], together)
    place = "the loss" if layer is None else f"the output of {layer}"
    doubled = {name: torch.cat([value, value]) if is_batched(value) else value for name, value in alone[0].items()}
    if relative_change(doubled, [alone[0], alone[0]]) > off / 100:
        return reason + (
            f"{place} depends on the number of examples, as in a mean, a norm or a capacity over the batch. Let each loss "
            "depend on its example alone, and replace the layer."
        )
    return reason + (
        f"{place} depends on the length to which an example is padded. Pad all examples to one length when they are "
        "tokenized or turned into features (padding='max_length'), or replace the layer (for rotary embeddings: another "
        "rope_type)."
    )


def is_batched(value: Any) -> bool:
    """Return whether an input of one example is a tensor with the batch in front."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == 1


def is_row_of(together: Mapping[str, Any], alone: Mapping[str, Any], index: int) -> bool:
    """Return whether an example's tensors are a row of the batch, apart from padding on the right."""
    return all(
        torch.equal(cut_to(together[name][index : index + 1], value.shape), value)
        for name, value in alone.items()
        if is_batched(value)
    )


def cut_to(value: Tensor, shape: torch.Size) -> Tensor:
    """Return the part of a tensor with the lowest indices that has at most this shape."""
    return value[tuple(slice(size) for size in shape)]


def first_difference(
    model: nn.Module, losses_of: Losses, alone: Mapping[str, Any], together: Mapping[str, Any]
) -> str | None:
    """Return the first layer whose output for the first example changes with the other examples, with its class."""
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    with torch.no_grad():
        outputs, outputs_alone = (outputs_of(model, losses_of, inputs) for inputs in (together, alone))
    for (name, output), (_, expected) in zip(outputs, outputs_alone, strict=False):
        part = cut_to(output, expected.shape)
        size = float(expected.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        if part.shape == expected.shape and not torch.allclose(part, expected, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
            return f"the layer {name!r} ({classes[name]})" if name else f"the model ({classes[name]})"
    return None


def outputs_of(model: nn.Module, losses_of: Losses, inputs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return every layer's first output with its name, in the order in which they are computed."""
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str, output: Any) -> None:
        values = (
            output.values() if isinstance(output, Mapping) else (output,) if isinstance(output, Tensor) else output or ()
        )
        tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel())
        outputs.extend((name, tensor.detach()) for tensor in itertools.islice(tensors, 1))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
            hooks.callback(handle.remove)
        losses_of(dict(inputs))
    return outputs


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
    norms = (float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients.values())
    return math.hypot(*norms)


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
    small = [parameter for parameter in parameters.values() if parameter.numel() and is_nearly_zero(parameter.detach())]
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


def is_nearly_zero(values: Tensor) -> bool:
    """Return whether no element is far from zero; of most tensors, the first ones tell."""
    return all(bool(part.abs().max() < NEARLY_ZERO) for part in (values.flatten()[:64], values))
