"""Compare the engine's gradients of a batch with plain autograd on each of its examples alone.

The comparison finds a wrong rule of the engine, and an example whose gradient changes with the other examples of its batch:
one more example would then change all the others.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from doppler_hf.errors import Refusal
from doppler_hf.linalg import in_float32
from doppler_hf.preflight.autograd_check.compared_examples import (
    ComparedExamples,
    gradients_of,
    norm_of,
    refuse_changed_losses,
    refuse_number_of_losses,
    why_gradients_change,
)
from doppler_hf.preflight.autograd_check.exact_sums import sums_in_float32
from doppler_hf.preflight.autograd_check.rounding import OF_ROUNDING, rounded_at_random
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients

# When gradients are compared, this share of the largest norm is added to the size of a parameter's gradient: some
# gradients, such as that of the bias of attention's keys, consist of rounding only.
LARGEST_NORM_SHARE: Final = 1e-2
# A norm below this is far below any clip norm, and its squares vanish in float32.
LEAST_NORM: Final = 1e-12
# A power of two, so that rounding changes no gradient that is in proportion to the loss.
_FACTOR: Final = -64.0


def compare(clipped: ClippedGradients, examples: ComparedExamples, *, tolerance: float) -> set[str]:
    """Compare an engine's gradients of a batch with ordinary gradients of its examples, each collated by itself.

    The examples should differ in length, so that a batch pads one of them, and the model should have no randomness. Nothing
    is clipped, and each example has a weight of its own. Whether the two agree, up to a tolerance relative to a parameter's
    own gradient, depends on model, loss and collator. Nothing about the examples is released.

    Returns:
        The names of the parameters that a loss reaches.

    Raises:
        ValueError: If the two disagree. The message names the parameter with the largest difference, or the first layer
            whose output for an example changes with the other examples.
    """
    model, losses_of, alone, together = examples
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # With equal weights, two examples whose gradients were exchanged would have the right sum.
    weights = [0.5**place for place in range(len(alone))]
    expected: dict[str, Tensor] = {}  # negative, so that the engine's sums become differences
    sizes = dict.fromkeys(trained, 0.0)
    reached: set[str] = set()
    norms_alone: list[float] = []
    losses_alone: list[Tensor] = []
    with clipped.unwatched(), sums_in_float32(model):
        for inputs, weight in zip(alone, weights, strict=True):
            losses = losses_of(dict(inputs))
            refuse_number_of_losses(losses, 1)
            losses_alone.append(losses.detach())
            gradients = gradients_of(-weight * losses, trained)
            norms = {name: norm_of([in_float32(gradient)]) for name, gradient in gradients.items()}
            norms_alone.append(math.hypot(*norms.values()) / weight)
            reached |= {*gradients}
            if not math.isfinite(norms_alone[-1]):  # such an example contributes nothing
                continue
            for name, gradient in gradients.items():
                # Add in place, since allocating memory for a large model takes longer than the addition.
                expected[name] = expected[name].add_(gradient) if name in expected else in_float32(gradient)
                sizes[name] += norms[name]
    with clipped.unclipped(expected):
        losses = losses_of(dict(together))
        refuse_number_of_losses(losses, len(alone))
        refuse_changed_losses(examples, losses.detach(), losses_alone, tolerance=tolerance)
        of_batch = clipped.backward(losses, weights=torch.tensor(weights, device=losses.device)).tolist()
        difference = {name: norm_of([total]) for name, total in clipped.sums.items()}
    largest = max([LEAST_NORM, *filter(math.isfinite, norms_alone)])
    wrong = {
        name: off for name, off in difference.items() if not off <= tolerance * (sizes[name] + LARGEST_NORM_SHARE * largest)
    }
    # Sensitivity: with a norm that is too small, an example would contribute more than the bound. Where terms cancel, norms
    # are too large by design.
    of_norms = max(
        of_one - norm if math.isfinite(of_one) else 0.0 for norm, of_one in zip(of_batch, norms_alone, strict=True)
    )
    if not wrong and of_norms <= tolerance * largest:
        return reached
    with clipped.unwatched():
        with sums_in_float32(model):
            rounding = _rounding(examples, weights, trained)
        if of_norms <= OF_ROUNDING * norm_of([torch.tensor([*rounding.values()])]) and all(
            off <= OF_ROUNDING * rounding.get(name, 0.0) for name, off in wrong.items()
        ):
            return reached
        reason = why_gradients_change(examples)
    if reason is not None:
        raise Refusal("depends-on-others", reason)
    place = max(wrong, key=lambda name: math.inf if math.isnan(wrong[name]) else wrong[name]) if wrong else None
    raise _disagreement(clipped, examples, trained, place=place, tolerance=tolerance)


def _disagreement(
    clipped: ClippedGradients,
    examples: ComparedExamples,
    trained: Mapping[str, nn.Parameter],
    *,
    place: str | None,
    tolerance: float,
) -> Refusal:
    """Return the refusal of gradients that disagree, most of all at a place, though no example depends on the others."""
    # The message has neither norms nor differences: they are about private examples, and messages end up in logs.
    hooked = [
        name for name, module in examples.model.named_modules() if module._backward_hooks or module._backward_pre_hooks
    ]
    if hooked:
        return Refusal(
            "gradient-hook",
            "The per-sample gradients disagree with autograd, probably because of the hook on the gradients of "
            f"{hooked[0] or 'the model'!r} (register_full_backward_hook). A hook sees the gradients of all records at once, "
            "so its result cannot be clipped for each record. Remove the hook.",
        )
    with clipped.unwatched():
        is_linear = _has_linear_backward(examples, trained, tolerance=tolerance)
    if not is_linear:
        return Refusal(
            "backward-not-linear",
            "The gradient of a loss times a number is not the number times the gradient of the loss, so something changes "
            "gradients in the backward pass, such as a clamp in a tensor's register_hook or in the backward of a "
            "torch.autograd.Function. Per-sample gradients come from one backward pass for all records, and must not be "
            "changed on the way. Remove the change: each record's whole gradient is clipped anyway.",
        )
    of_place, mend = "", ""
    if place is not None:
        of_place = f" of {place!r}"
        mend = f"Freeze it before train(): trainer.model.get_parameter({place!r}).requires_grad_(False). "
        if trained[place].itemsize == 2:
            mend = "Load the model with dtype=torch.float32, or f" + mend[1:]
    return Refusal(
        "wrong-gradients",
        f"The per-sample gradients{of_place} are wrong: engine={clipped.engine_name!r} disagrees with autograd, so clipping "
        f"would not bound them. {mend}Please report the model's class as a bug of doppler_hf.",
    )


def _has_linear_backward(examples: ComparedExamples, trained: Mapping[str, nn.Parameter], *, tolerance: float) -> bool:
    """Return whether the gradients of each example alone are in proportion to a factor of its loss."""
    for inputs in examples.alone:
        once, scaled = (gradients_of(factor * examples.losses_of(dict(inputs)), trained) for factor in (1.0, _FACTOR))
        off = [in_float32(scaled[name]) - _FACTOR * in_float32(gradient) for name, gradient in once.items()]
        if norm_of(off) > tolerance * abs(_FACTOR) * norm_of([in_float32(gradient) for gradient in once.values()]):
            return False
    return True


def _rounding(examples: ComparedExamples, weights: Sequence[float], trained: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Return by how much rounding alone changes each gradient, if all layers round at random."""
    found = []
    for is_drawn in (False, True):
        with rounded_at_random() if is_drawn else contextlib.nullcontext():
            losses = examples.losses_of(dict(examples.together))
            found.append(gradients_of(losses * torch.tensor(weights, device=losses.device), trained))
    return {name: norm_of([in_float32(gradient) - found[1][name]]) for name, gradient in found[0].items()}
