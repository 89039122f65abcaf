"""Compute gradients of examples alone and together by plain autograd, and explain why a loss or gradient changes."""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.errors import Refusal, page
from doppler_hf.linalg import norm
from doppler_hf.privacy.clipping.other_layers import has_rows, is_floating
from doppler_hf.shards import gathered

# A function that calls the model with inputs and returns one loss per example.
Losses = Callable[[Mapping[str, Any]], Float[Tensor, " batch"]]
Inputs = Mapping[str, Any]


OF_OWN_TOKENS: Final = "losses.view(labels.shape).sum(1) / (labels != -100).sum(1).clamp(min=1)"
"""How the losses of tokens, with reduction='none', become one loss per row."""


class ComparedExamples(NamedTuple):
    """Examples that should have the same losses and gradients in one batch as each has alone."""

    model: nn.Module
    losses_of: Losses
    alone: Sequence[Inputs]  # Each example as a batch of its own.
    together: Inputs  # All examples in one batch, in the same order.


def refuse_number_of_losses(losses: Any, number: int) -> None:
    """Refuse more or fewer losses than examples, and losses without a gradient."""
    if not isinstance(losses, Tensor) or not losses.requires_grad:
        kind = "a tensor without a gradient" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise Refusal(
            "loss-without-graph",
            f"compute_per_sample_loss must return a tensor that is attached to the graph; got {kind}. Return one loss for "
            "each row, without detach(), item() or torch.no_grad().",
        )
    if losses.shape != (number,):
        # The message leaves out the shape, which may hold the length of an example: messages end up in logs.
        got, fix = (
            (
                "a single number",
                "Set reduction='none': a mean would couple the records. A loss that compares the records of a batch, "
                "such as MultipleNegativesRankingLoss, has no loss per record, and cannot be trained with privacy."
                + (" If it is set, squeeze() has removed the batch dimension: use squeeze(-1)." if number == 1 else ""),
            ),
            (
                "more or fewer",
                f"If these are losses of tokens, take the mean over each row's own tokens: {OF_OWN_TOKENS}. Otherwise make "
                "the collator return one row for each record (no packing).",
            ),
            ("several per row", f"Take their mean: losses.mean(dim=1) over classes, or {OF_OWN_TOKENS} over tokens."),
        )[min(losses.ndim, 2)]
        if losses.shape == (number, number):
            got, fix = "one for each pair of rows", "Logits of shape (rows, 1) were combined with labels of shape (rows,)."
            fix += " Give both one shape: logits.squeeze(-1)."
        raise Refusal(
            "other-number-of-losses",
            f"Expected one loss per row from compute_per_sample_loss, shape ({number},) for {number} rows; got {got}. {fix}",
        )


def gradients_of(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the ordinary gradients by name, read from `.grad`, since re-entrant checkpointing leaves them nowhere else."""
    used = gathered(parameters)
    for parameter in used.values():
        parameter.grad = None
    losses.sum().backward()
    # The gradient of a channels_last weight has that memory format, and the engine's sums do not.
    gradients = {name: parameter.grad.contiguous() for name, parameter in used.items() if parameter.grad is not None}
    for parameter in used.values():
        parameter.grad = None
    return gradients


def norm_of(tensors: Collection[Tensor]) -> float:
    """Return the joint norm, computed in float32 or better for each tensor and in float64 over all of them."""
    return math.hypot(*(float(norm(tensor)) for tensor in tensors))


def refuse_changed_losses(
    examples: ComparedExamples, found: Tensor, expected: Sequence[Tensor], *, tolerance: float
) -> None:
    """Refuse losses of a batch, shape (batch,), that differ in the smaller batches into which it was cut."""
    whole = torch.cat(list(expected))
    finite = whole.isfinite()
    change, sizes = (found - whole)[finite].abs(), whole[finite].abs()
    if not len(sizes) or bool((change <= tolerance * (sizes + 0.1 * sizes.max())).all()):
        return
    raise Refusal("depends-on-others", why_losses_change(examples))


def why_losses_change(examples: ComparedExamples, *, further: Sequence[tuple[Inputs, bool]] = ()) -> str:
    """Return a sentence that says why losses change with the batch.

    In the `further` batches the first example is the first row, or the last row if the second entry is true.
    """
    batches = [(examples.together, False), *further]
    layers = (first_changing_layer(examples, inputs, is_last=is_last) for inputs, is_last in batches)
    return _why(examples, "loss", next(filter(None, layers), "the loss"))


def why_gradients_change(examples: ComparedExamples) -> str | None:
    """Return a sentence that says why gradients change with the batch, or None if no layer's output changes."""
    layer = first_changing_layer(examples, examples.together)
    return None if layer is None else _why(examples, "gradient", layer)


def _why(examples: ComparedExamples, what: str, layer: str) -> str:
    part, together = examples.alone[0], examples.together
    mask = together.get("attention_mask")
    # Take the first example without the others, but padded as in the batch: a remaining change comes from its padding.
    number = next((len(value) for value in part.values() if isinstance(value, Tensor) and value.ndim), 1)
    padded = {name: value[:number] if has_rows(part.get(name), number) else value for name, value in together.items()}
    whole = [name for name, value in part.items() if _is_of_a_batch(value) and not _is_same(value, together.get(name))]
    own = padded | {name: part[name] for name in whole}
    if whole and first_changing_layer(examples, own) is None and not _changes_with_padding(examples, own):
        reason = (
            f"{whole[0]!r}, one value for the whole batch from data_collator, such as its number of rows. Leave it out: "
        )
        reason += "a private run itself divides the sum of all gradients by the expected batch size."
    elif layer == "the loss" and _changes_with_padding(examples, padded):
        reason = "the length to which a row is padded, as a mean over all tokens does. Divide by the row's own tokens: "
        reason += f"{OF_OWN_TOKENS}."
    elif first_changing_layer(examples, padded) is None:
        reason = "the other records, through a mean over the batch, a rank, a threshold, a count or a shared capacity. "
        reason += (
            "Compute each loss from its own row. Weights that depend only on the row are fine, as in focal loss. Choosing "
            "the hardest records of a batch, or counting its classes, is not possible with privacy: use constants."
            if layer == "the loss"
            else "Make each loss depend only on its own record, and replace the layer."
        )
    elif isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask[:, 0] == 0).any()):
        reason = "the padding on the left. Pad on the right: tokenizer.padding_side = 'right'."
    else:
        reason = (
            "the length to which a row is padded. Pad all rows to one length (tokenize with padding='max_length'), or "
            "replace the layer."
        )
    return (
        f"The {what} of one record changes with the other records of the batch, so the noise would not protect it "
        f"({page('start/troubleshooting', 'losses')}): {layer} depends on {reason}"
    )


def _is_of_a_batch(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _is_same(value: Any, other: Any) -> bool:
    return bool(_is_of_a_batch(other) and value == other)


def _changes_with_padding(examples: ComparedExamples, padded: Inputs) -> bool:
    """Return whether the loss of the first example is another one if the example is padded."""
    with torch.no_grad():
        found, expected = (examples.losses_of(dict(inputs)).float() for inputs in (padded, examples.alone[0]))
    return found.shape == expected.shape and not torch.allclose(found, expected, rtol=1e-3, atol=0.0, equal_nan=True)


def first_changing_layer(examples: ComparedExamples, together: Inputs, *, is_last: bool = False) -> str | None:
    """Return in words the first layer whose output for the first example differs in a batch, or None if there is none.

    With `is_last` the example is the last row of that batch.
    """
    classes = {name: type(module).__name__ for name, module in examples.model.named_modules()}
    with torch.no_grad():
        outputs, alone = (
            _outputs_of(examples.model, examples.losses_of, inputs) for inputs in (together, examples.alone[0])
        )
    # The two lists may differ in length, since some models call more layers for more rows.
    for (name, output), (_, expected) in zip(outputs, alone, strict=False):
        if not expected.ndim or len(output) < len(expected):
            continue
        found = output[-len(expected) :] if is_last else output
        found = found[tuple(map(slice, expected.shape))]
        size = float(expected.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        most = max(1e-3, 16 * torch.finfo(found.dtype).eps)
        if found.shape == expected.shape and not torch.allclose(
            found, expected, rtol=most, atol=0.1 * most * size, equal_nan=True
        ):
            return f"the output of the {f'layer {name!r}' if name else 'model'} ({classes[name]})"
    return None


def _outputs_of(model: nn.Module, losses_of: Losses, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Return every layer's first output with its name, in the order in which they are computed."""
    outputs: list[tuple[str, Tensor]] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
        tensors = (value for value in values if is_floating(value) and value.numel())
        outputs.extend((names[module], tensor.detach()) for tensor in itertools.islice(tensors, 1))

    with contextlib.ExitStack() as hooks:
        for module in names:  # torch's hook for all modules would run before hooks of a module that change its output
            hooks.enter_context(module.register_forward_hook(note))
        losses_of(dict(inputs))
    return outputs
