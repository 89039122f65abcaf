"""What is at fault where an example's loss or gradient changes with the examples beside it: data, loss, or a layer."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from doppler_hf.privacy.clipping.plain_autograd import Losses, gradients_of
from doppler_hf.privacy.rows import has_rows

Inputs = Mapping[str, Any]

MIXED_ROWS = (
    "the row that data set and collator make of an example is not the one that they make of it alone. Use a data set and a "
    "collator that mix no examples (no MixUp, CutMix or packing), and pad on the right."
)


def in_gradients(
    model: nn.Module,
    losses_of: Losses,
    alone: Sequence[Inputs],
    together: Inputs,
    *,
    factors: Sequence[float],
    parameter: str,
    off: float,
) -> str | None:
    """Return what makes a parameter's gradient change with the batch, as a sentence, or None if plain autograd's does not.

    Args:
        model: The model, without the engine's stand-ins.
        losses_of: A function that calls the model with inputs and returns one loss per example.
        alone: Each example as a batch of one.
        together: All of them in one batch, in the same order.
        factors: By how much the loss of each is multiplied.
        parameter: The parameter's name.
        off: By how much of its size its gradient changes.
    """
    one = {parameter: model.get_parameter(parameter)}

    def relative_change(inputs: Inputs, parts: Sequence[Inputs]) -> float:
        """Return how far autograd's gradient of a batch is from the sum of those of its examples."""
        losses = losses_of(dict(inputs))
        scaled = losses * torch.tensor(factors[: len(losses)], device=losses.device)
        of_parts = [gradients_of(losses_of(dict(part)) * factor, one) for part, factor in zip(parts, factors, strict=False)]
        expected = sum(each.get(parameter, torch.zeros(())) for each in of_parts)
        found = gradients_of(scaled, one).get(parameter, torch.zeros(()))
        # Of the batch's size, as `off` is: it may be far below that of the examples.
        return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(found).clamp(min=1e-30))

    off = min(off, 1.0)  # of a size that may be close to zero
    if relative_change(together, alone) < off / 10:
        return None
    reason = (
        # Neither by how much: that is computed from two private examples, and messages end in logs.
        f"The gradient of one example changes with the examples beside it, at {parameter!r}, so that one example more would "
        "change all others, and no noise covers that: "
    )
    if not are_first_rows(together, alone, numbers=[1] * len(alone)):
        return reason + MIXED_ROWS
    layer = place(model, losses_of, alone[0], together)
    padded = {name: value[:1] if has_rows(alone[0].get(name), 1) else value for name, value in together.items()}
    if relative_change(padded, alone[:1]) > off / 100:
        return reason + (
            f"{layer} depends on the length to which an example is padded. Pad all examples to one length when they are "
            "tokenized or turned into features (padding='max_length'), or replace the layer (for rotary embeddings: another "
            "rope_type)."
        )
    return reason + (
        f"{layer} depends on the number of examples, or on what they are, as in a mean, a norm or a capacity over the "
        "batch. Let each loss depend on its example alone, and replace the layer."
    )


def in_losses(
    model: nn.Module, losses_of: Losses, parts: Sequence[Inputs], together: Inputs, *, numbers: Sequence[int]
) -> str:
    """Return what makes the losses of a batch others than in parts of `numbers` examples, as a sentence."""
    reason = (
        "The loss of one example changes with the examples beside it, in a batch of several, so that one example more would "
        "change all others, and no noise covers that: "
    )
    if not are_first_rows(together, parts, numbers=numbers):
        return reason + MIXED_ROWS
    return reason + (
        f"{place(model, losses_of, parts[0], together)} depends on them, as with class weights that balance a batch. Let "
        "each loss depend on its example alone, and replace the layer."
    )


def place(model: nn.Module, losses_of: Losses, alone: Inputs, together: Inputs) -> str:
    """Return the first layer whose output for the first example changes with the others, or the loss if there is none."""
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    with torch.no_grad():
        outputs, outputs_alone = (outputs_of(model, losses_of, inputs) for inputs in (together, alone))
    for (name, output), (_, expected) in zip(outputs, outputs_alone, strict=False):
        part = cut_to(output, expected.shape)
        size = float(expected.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        if part.shape == expected.shape and not torch.allclose(part, expected, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
            return (
                f"the output of the layer {name!r} ({classes[name]})"
                if name
                else f"the output of the model ({classes[name]})"
            )
    return "the loss"


def are_first_rows(together: Inputs, parts: Sequence[Inputs], *, numbers: Sequence[int]) -> bool:
    """Return whether the tensors of parts are the first rows of a batch, in order, apart from padding on the right."""
    return all(
        torch.equal(cut_to(together[name][end - number : end], value.shape), value)
        for end, number, inputs in zip(itertools.accumulate(numbers), numbers, parts, strict=True)
        for name, value in inputs.items()
        if has_rows(value, number)
    )


def cut_to(value: Tensor, shape: torch.Size) -> Tensor:
    """Return the part of a tensor with the lowest indices that has at most this shape."""
    return value[tuple(slice(size) for size in shape)]


def outputs_of(model: nn.Module, losses_of: Losses, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Return every layer's first output with its name, in the order in which they are computed."""
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str, output: Any) -> None:
        values = (
            output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else (output,)
        )
        tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel())
        outputs.extend((name, tensor.detach()) for tensor in itertools.islice(tensors, 1))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
            hooks.callback(handle.remove)
        losses_of(dict(inputs))
    return outputs
