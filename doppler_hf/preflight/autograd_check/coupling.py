"""Check exactly whether a loss reads the rows of other examples: unless its gradient there is zero, examples are coupled.

A comparison of numbers must allow for rounding. A term such as 1e-4·⟨z_i, Σ_j z_j⟩ can hide in this tolerance, although it
grows with the batch, and one record then changes what all others contribute. Zeros need no tolerance: a sum of products with
zero is zero in any order and precision.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from doppler_hf.errors import Refusal, page
from doppler_hf.preflight.autograd_check.compared_examples import Inputs, Losses, refuse_number_of_losses
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients
from doppler_hf.privacy.clipping.other_layers import has_rows, is_floating
from doppler_hf.privacy.losses import without_adapters


def random_half(number: int) -> Bool[Tensor, " number"]:
    """Return a random half of the rows, so that it cannot coincide with an order of labels or lengths.

    The first and the last row are never in it, because some losses compare all other rows with one of these.
    """
    chance = torch.rand(number, generator=torch.Generator().manual_seed(0))
    chance[[0, -1]] = 1.0
    return chance.argsort().argsort() < number // 2


def place_of_coupling(
    clipped: ClippedGradients, model: nn.Module, losses_of: Losses, inputs: Inputs, *, number: int
) -> tuple[Tensor, str | None]:
    """Return the losses of `number` examples, and where half of them have a gradient in rows of the others, or None.

    The check looks at the rows where each trained parameter is used, and at the model's inputs, since layers in between may
    be frozen. It takes one backward pass.
    """
    try:
        with _differentiated(model, inputs, number=number) as (watched, places):
            losses = losses_of(watched)
    except RuntimeError as error:
        # Speech models set the flag themselves on tensors computed from their inputs, so the inputs cannot be examined.
        if "requires_grad flags of leaf" not in str(error):
            raise
        losses, places = losses_of(inputs), []
    refuse_number_of_losses(losses, number)
    examined = random_half(number).to(losses.device)
    coupled = clipped.coupled(losses, examined=examined)
    slopes = (place.grad.unflatten(0, (number, -1)) for place in places if place.grad is not None)
    # As in `has_terms`, a product 0·∞ is NaN although it has no term of another example.
    is_read = any(((slope != 0) & slope.isfinite())[~examined.to(slope.device)].any() for slope in slopes)
    return losses.detach(), repr(coupled[-1]) if coupled else "the model's inputs" if is_read else None


def coupling_refusal(place: str, reason: str | None = None) -> Refusal:
    """Return the refusal of losses that have a gradient in the rows of others, with the known reason or else the place."""
    return Refusal(
        "depends-on-others",
        reason
        or f"The loss of one record has a gradient in the rows of other records at {place}, so the noise would not protect "
        "it. Make each loss depend only on its own record, and keep the batch as the first dimension of every layer's "
        f"input: {page('start/troubleshooting', 'losses')}.",
    )


@contextlib.contextmanager
def _differentiated(model: nn.Module, inputs: Inputs, *, number: int) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Make a batch's numbers and frozen embeddings differentiable in the block; yield the batch and its leaf tensors."""
    places: list[Tensor] = []

    def leaf_copy(value: Tensor) -> Tensor:
        places.append(value.detach().requires_grad_())
        return places[-1] * 1  # a layer may write into this product, but not into a leaf

    def embedded(_module: nn.Module, _args: Any, output: Any) -> Any:
        # An example with several choices or answers has several rows.
        is_frozen = is_floating(output) and not output.requires_grad and len(output) % number == 0
        return leaf_copy(output) if is_frozen and torch.is_grad_enabled() else None

    with contextlib.ExitStack() as hooks:
        with contextlib.suppress(AttributeError, NotImplementedError):  # image models have no input embeddings
            hooks.enter_context(without_adapters(model).get_input_embeddings().register_forward_hook(embedded))
        rows = {name: leaf_copy(value) for name, value in inputs.items() if is_floating(value) and has_rows(value, number)}
        yield {**inputs, **rows}, places
