"""Whether a loss reads the rows of other examples, exactly: its gradient there is zero, or the examples are coupled.

A comparison of numbers allows for rounding. A term such as 1e-4·⟨z_i, Σ_j z_j⟩ hides in that, although it grows with the
batch, and one record then moves what all others contribute. Zeros need no allowance: a sum of products with zero is zero in
any order and precision.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from doppler_hf.privacy.autograd_check.at_fault import CHANGES, OF_OTHERS, Inputs
from doppler_hf.privacy.autograd_check.plain_autograd import Losses, refuse_number_of_losses
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients
from doppler_hf.privacy.clipping.other_layers import has_rows, is_floating
from doppler_hf.privacy.generators import filled_generators
from doppler_hf.privacy.losses import without_adapters

# In units of eps: of a sum of n terms in another order, in pairs, some log2(n) of its additions are rounded otherwise.
ROUNDING_OF_SUMS: Final = 64
SMALLEST, LARGEST = 8, 64


def some_of(number: int) -> Bool[Tensor, " number"]:
    """Return a half of some rows by chance, so that no order of labels or lengths is that of the halves.

    Neither the first nor the last row is among them, which some losses compare all others with.
    """
    chance = torch.rand(number, generator=torch.Generator().manual_seed(0))
    chance[[0, -1]] = 1.0
    return chance.argsort().argsort() < number // 2


def place_of_others(
    clipped: ClippedGradients, model: nn.Module, losses_of: Losses, inputs: Inputs, *, number: int
) -> tuple[Tensor, str | None]:
    """Return the losses of `number` examples, and where half of them have a gradient in the rows of the others, or None.

    The others' rows are looked at where each trained parameter is used, and in the model's inputs, since layers in between
    may be frozen. It takes one backward pass.
    """
    with _differentiated(model, inputs, number=number) as (watched, places):
        losses = losses_of(watched)
    refuse_number_of_losses(losses, number)
    examined = some_of(number).to(losses.device)
    coupled = clipped.coupled(losses, examined=examined)
    slopes = (place.grad.unflatten(0, (number, -1)) for place in places if place.grad is not None)
    # As `has_terms`: 0·∞ is none of others.
    is_read = any(((slope != 0) & slope.isfinite())[~examined.to(slope.device)].any() for slope in slopes)
    return losses.detach(), repr(coupled[-1]) if coupled else "the model's inputs" if is_read else None


def read_by_others(place: str, reason: str | None = None) -> ValueError:
    """Return the refusal of losses that have a gradient in the rows of others, by a reason that is known or the place."""
    return ValueError(
        reason
        or f"The loss of one example has a gradient in the places of others at {place}. Let each loss depend on its example "
        "alone, and let the inputs of layers begin with the batch: docs/start/troubleshooting.md#losses."
    )


@contextlib.contextmanager
def _differentiated(model: nn.Module, inputs: Inputs, *, number: int) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Let the block differentiate by a batch's numbers and frozen embeddings; yield the batch, and leaves with gradients."""
    places: list[Tensor] = []

    def of_leaf(value: Tensor) -> Tensor:
        places.append(value.detach().requires_grad_())
        return places[-1] * 1  # which a layer may write into

    def embedded(_module: nn.Module, _args: Any, output: Any) -> Any:
        # Of choices and of answers there are several rows for each example.
        is_frozen = is_floating(output) and not output.requires_grad and len(output) % number == 0
        return of_leaf(output) if is_frozen and torch.is_grad_enabled() else None

    base, table = without_adapters(model), None
    with contextlib.suppress(AttributeError, NotImplementedError):  # as of models of images
        table = base.get_input_embeddings()
    handle = table.register_forward_hook(embedded) if isinstance(table, nn.Module) else None
    try:
        rows = {name: of_leaf(value) for name, value in inputs.items() if is_floating(value) and has_rows(value, number)}
        yield {**inputs, **rows}, places
    finally:
        if handle is not None:
            handle.remove()


def refuse_loss_of_others(model: nn.Module, losses_of: Losses, inputs: Inputs, *, number: int, size: int) -> None:
    """Refuse a loss whose gradient, by the model's outputs, reads other examples of a batch of `size`, of 8 to 64.

    The model is called once, and its outputs for `number` examples are repeated, so that the size costs next to nothing.
    What reads others without a gradient, such as a mean that is detached, or only in larger batches, shows here.

    Raises:
        ValueError: If the gradient is not zero in the rows of others, or changes by more than rounding when another example
            takes their place. At the same place in tensors of the same shapes, all that may differ is where a sum is cut.
    """
    outputs: list[Any] = []
    with contextlib.ExitStack() as hook, torch.no_grad():
        hook.callback(model.register_forward_hook(lambda _model, _args, output: outputs.append(output)).remove)
        losses_of(dict(inputs))
    rows = torch.arange(min(max(SMALLEST, size), LARGEST)) % number
    examined = some_of(len(rows))

    def slopes_at(rows: Int[Tensor, " rows"]) -> list[Tensor]:
        leaves: list[Tensor] = []

        def repeated(value: Any) -> Any:
            if isinstance(value, list) and len(value) == number:  # such as texts, for the loss alone
                return [value[row] for row in rows.tolist()]
            if not isinstance(value, Tensor) or value.ndim == 0 or len(value) % number:
                return value
            return value.unflatten(0, (number, -1))[rows.to(value.device)].flatten(0, 1)

        def replayed(*_args: Any, **_kwargs: Any) -> Any:
            found = tree_map(repeated, next(again))
            tensors = (each for each in tree_leaves(found) if is_floating(each) and each.ndim and len(each) % len(rows) == 0)
            leaves.extend(each.requires_grad_() for each in tensors)
            return found

        again = iter(outputs)
        with mock.patch.dict(vars(model), forward=replayed), filled_generators(0):
            losses = losses_of({name: repeated(value) for name, value in inputs.items()})
        chosen = losses[examined.to(losses.device)].sum()
        slopes = torch.autograd.grad(chosen, leaves, allow_unused=True) if chosen.requires_grad and leaves else ()
        return [slope.unflatten(0, (len(rows), -1)).flatten(1).cpu() for slope in slopes if slope is not None]

    for before, after in zip(slopes_at(rows), slopes_at(rows.where(examined, rows[number // 2])), strict=True):
        change, sizes = (after - before)[examined].abs().amax(1), before[examined].abs().amax(1)
        is_changed = change > ROUNDING_OF_SUMS * torch.finfo(before.dtype).eps * (
            sizes + 0.1 * sizes.nan_to_num(posinf=0).max()
        )
        if is_changed.any() or before[~examined].nan_to_num(posinf=0, neginf=0).any():
            raise ValueError(CHANGES.format(what="loss") + OF_OTHERS.format(place="the loss"))
