"""The check before the first step: nine examples of the training set, through the user's own model, loss and collator.

Of short examples, eight or for a loss of the user's own as many as a micro-batch has, no loss may have a gradient in
others' rows. Losses and the engine's gradients of a short and the longest example are compared with plain autograd on each
alone. This finds what couples examples (norms and means over the batch or its tokens, padding, collators that mix rows),
statistics that a forward pass keeps, and a wrong rule of the engine.

Nothing about the examples is released: the outcome depends on model, loss, data set and collator.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from torch import Tensor, nn

from doppler_hf.linalg import highest_conv_precision, highest_matmul_precision, same, sums_of_bytes
from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.autograd_check.apart import place_of_others, read_by_others
from doppler_hf.privacy.autograd_check.as_in_training import is_random, moved, without_coins, without_dropout
from doppler_hf.privacy.autograd_check.at_fault import why_gradients_change
from doppler_hf.privacy.autograd_check.comparison import compare
from doppler_hf.privacy.autograd_check.plain_autograd import Losses
from doppler_hf.privacy.batching.probe import Probe
from doppler_hf.run.parameters import adapted_parameters
from doppler_hf.run.unreached import reached_by

# Relative, of losses and gradients: batches of one and of several are rounded differently.
ROUNDING: Final = 1e-3
ROUNDING_BF16: Final = 0.1


def check_before_training(
    clipped: ClippedGradients, model: nn.Module, losses_of: Losses, probe: Probe, *, number: int, in_bf16: bool
) -> set[str]:
    """Check the attached engine, and return the names of the trained parameters that a loss reaches.

    Args:
        clipped: The engine.
        model: The model.
        losses_of: A function that calls the model and returns one loss per example of a micro-batch.
        probe: Examples of the training set.
        number: How many rows a loss of the user's own is looked at with, as it may read only batches of the run's size.
        in_bf16: Whether the model computes in bfloat16.

    Raises:
        ValueError: If the model cannot be trained privately, by the name of the layer or tensor at fault.
    """
    whole = probe.collated([*itertools.islice(itertools.cycle(probe.short), number)])

    def look() -> tuple[Tensor, str | None]:
        return place_of_others(clipped, model, losses_of, whole, number=number)

    def is_random_now() -> bool:
        with clipped.unwatched():
            return is_random(losses_of, whole)

    def check(losses: Tensor, place: str | None) -> set[str]:
        if not losses.isfinite().any():
            raise ValueError(
                "The loss of an example must be finite, got none that is: nothing would be learnt. Look for NaN and "
                "infinities in the weights and the data, and for a division by zero in the loss."
            )
        if place is not None:
            with clipped.unwatched():
                together, each = probe.in_parts(probe.short)
                raise read_by_others(place, why_gradients_change(model, losses_of, parts=each, together=together))
        usable = (row for row, loss in zip(probe.short, losses.tolist(), strict=False) if 0.0 < abs(loss) < math.inf)
        together, each = probe.in_parts([next(usable, probe.short[0]), probe.longest])
        tolerance = ROUNDING_BF16 if in_bf16 else ROUNDING
        return compare(clipped, model, losses_of, alone=each, together=together, tolerance=tolerance)

    # TF32, which is cuDNN's default, would round more than the tolerance.
    with moved(model), highest_conv_precision(), highest_matmul_precision():
        with without_coins(model):
            with nothing_written(model, again=is_random_now):
                found = look()
            try:
                return check(*found)
            except ValueError:
                if not is_random_now():
                    raise
        with without_dropout(model):  # its coins are no attributes
            if not is_random_now():
                return check(*look())
    print(
        "The model draws random numbers in evaluation mode too, so losses together and alone cannot be compared. "
        "`doppler-hf check` tests whether each depends on its example alone."
    )
    _, place = look()
    if place is not None:
        raise read_by_others(place)
    with clipped.unwatched():
        return reached_by(whole, model, losses_of, names={*clipped.parameters})


@contextlib.contextmanager
def nothing_written(model: nn.Module, *, again: Callable[[], object]) -> Iterator[None]:
    """Refuse a forward pass that keeps statistics of the data in buffers or parameters, or replaces layers.

    Args:
        model: The model.
        again: Makes the same pass once more.

    Raises:
        ValueError: If it does, by name.
    """
    layers, buffers = dict(model.named_modules()), _copies(model)
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    rewritten = {parameter: sums_of_bytes(parameter.detach()).tolist() for parameter in adapted_parameters(model)}
    yield
    replaced = [name for name, module in model.named_modules() if layers.get(name) is not module]
    if replaced:
        raise ValueError(
            f"A forward pass must leave the layers of a model in place, got one that replaces {replaced[0]!r} for all later "
            "batches. Choose a setting with which it does not (for BigBird: attention_type='original_full')."
        )
    written = [
        name
        for name, parameter in model.named_parameters()
        if versions.get(name) != parameter._version
        and rewritten.get(parameter) != sums_of_bytes(parameter.detach()).tolist()
    ]
    changed = _changed(model, buffers)
    if changed:
        # A table that grows with the longest example, such as one of positions, stays as it is the next time.
        first, saved = _copies(model), model.state_dict().keys()
        again()
        written += [name for name in changed if name in saved] + _changed(model, first)
    if written:
        raise ValueError(
            f"The forward pass writes {written[0]!r}, which would keep statistics of the data that are neither clipped nor "
            "noised. Replace the layer by one that keeps none."
        )


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _changed(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    return [name for name, buffer in model.named_buffers() if name not in before or not same(buffer, before[name])]
