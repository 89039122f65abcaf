"""A comparison of the engine on a batch with plain autograd on each of its examples alone, before the first step.

A wrong per-sample gradient would go unnoticed: the loss still falls, but the guarantee is void. So would a gradient that
changes with the examples beside it: the bound on each would hold, and one example more would change all the others. The
check runs on the user's own model, data and collator, with adapters, attention and checkpointing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping import at_fault
from doppler_hf.privacy.clipping.as_in_training import left_as_it_was, moved, without_coins
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Engine
from doppler_hf.privacy.clipping.factored import NormRule
from doppler_hf.privacy.clipping.ghost_norm import UNDERFLOW
from doppler_hf.privacy.clipping.plain_autograd import Losses, gradients_of, norm_of, refuse_number_of_losses

# The share of the largest norm that is added to the size of a parameter's gradient when the two are compared: some
# gradients, such as that of the bias of attention's keys, consist of rounding only.
OF_THE_WHOLE = 1e-2
# By how much the loss of one example is multiplied: a hook that divides gradients by a norm over the batch leaves nothing of
# the others' then, and nothing is lost of a power of two.
AMPLIFIED = 2.0**20


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
    loss that is scaled by the number of examples or tokens in the batch. The model is in training mode, without dropout.
    Weights near zero are moved a little during the check, because gradients that pass through weights of zero, such as
    those of new adapters, would agree whatever the engine does. An example whose gradient is not finite is compared with
    nothing, since it contributes nothing.

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
    with (
        left_as_it_was(model),
        moved(model),
        without_coins(model),
        ClippedGradients(model, engine=engine, norm_rule=norm_rule) as clipped,
    ):
        comparison = Comparison(clipped, model, losses_of, alone=alone, together=together, rows=range(len(alone)))
        comparison.refuse_difference(comparison.expected(), tolerance=tolerance)


class Expected(NamedTuple):
    """Ordinary gradients of examples, each alone.

    Attributes:
        sums: The sum of the gradients, weighted, by name of the parameter.
        norms: The norm of each example's gradient; not private.
        losses: The loss of each example; not private.
    """

    sums: dict[str, Tensor]
    norms: list[float]
    losses: list[Tensor]


@final
class Comparison:
    """A batch and the examples that it is made of.

    Args:
        clipped: The engine, attached to the model.
        model: The model, without coins.
        losses_of: A function that calls the model with inputs and returns one loss per example.
        alone: Some examples, each as a batch of one.
        together: A batch of them.
        rows: Which of them is each row of the batch; one may be there more than once.
    """

    def __init__(
        self,
        clipped: ClippedGradients,
        model: nn.Module,
        losses_of: Losses,
        *,
        alone: Sequence[Mapping[str, Any]],
        together: Mapping[str, Any],
        rows: Sequence[int],
    ) -> None:
        self._clipped, self._model, self._losses_of = clipped, model, losses_of
        self._alone, self._together, self._rows = alone, together, rows
        self._trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # Gradients that pass frozen layers in float16 would leave its range.
        is_narrow = any(parameter.dtype == torch.float16 for parameter in model.parameters())
        self._amplified = 1.0 if is_narrow else AMPLIFIED

    def expected(self) -> Expected:
        """Return the ordinary gradients of the examples."""
        found = Expected({}, [], [])
        for index, inputs in enumerate(self._alone):
            with self._clipped.unwatched():
                losses = self._losses_of(dict(inputs))
                refuse_number_of_losses(losses, 1)
                factor = self._factor(index)
                gradients = gradients_of(losses * factor, self._trainable)
            found.norms.append(norm_of(gradients.values()) / factor)
            found.losses.append(losses.detach())
            weight = sum(share for share, row in zip(self._weights, self._rows, strict=True) if row == index) / factor
            for name, gradient in gradients.items() if math.isfinite(found.norms[-1]) else ():
                # In place: fresh memory for a large model takes longer than what is computed in it.
                weighted = in_float32(gradient).mul_(weight)
                found.sums[name] = found.sums[name].add_(weighted) if name in found.sums else weighted
        return found

    @property
    def _weights(self) -> list[float]:
        return [0.5**row for row in range(len(self._rows))]

    def _factor(self, index: int) -> float:
        return self._amplified if index == 0 else 1.0

    def refuse_difference(self, expected: Expected, *, tolerance: float) -> None:
        """Compare the engine's gradients of the batch with the ordinary ones.

        Args:
            expected: The ordinary gradients.
            tolerance: The difference allowed, relative to a parameter's own gradient.

        Raises:
            ValueError: If they disagree; see `check_per_sample_gradients`.
        """
        norms_alone = [expected.norms[index] for index in self._rows]
        weights = [weight if math.isfinite(norm) else 0.0 for weight, norm in zip(self._weights, norms_alone, strict=True)]
        with self._clipped.unclipped():
            losses = self._losses_of(dict(self._together))
            refuse_number_of_losses(losses, len(self._rows))
            factors = torch.tensor([self._factor(index) for index in self._rows], device=losses.device)
            weighted = torch.tensor(weights, device=losses.device) / factors
            norms = (self._clipped.backward(losses * factors, weights=weighted) / factors).tolist()
            difference = self._clipped.sums
        sizes = {name: norm_of([total]) for name, total in difference.items()}
        for name, total in expected.sums.items():
            difference[name].sub_(total)
        largest = max(filter(math.isfinite, norms_alone), default=0.0)
        off = {name: norm_of([rest]) / max(sizes[name] + OF_THE_WHOLE * largest, 1e-30) for name, rest in difference.items()}
        worst = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
        if not off[worst] <= tolerance:
            alone = [self._alone[index] for index in self._rows]
            with self._clipped.unwatched():
                found = at_fault.in_gradients(
                    self._model,
                    self._losses_of,
                    alone,
                    self._together,
                    factors=factors.tolist(),
                    parameter=worst,
                    off=off[worst],
                )
            raise ValueError(found or self._of_the_engine(worst))
        for norm, norm_alone in zip(norms, norms_alone, strict=True):
            # A norm that is too small would let an example contribute more than the bound, one too large only less.
            lowest, highest = norm_alone * (1 - tolerance), norm_alone * (1 + tolerance) + UNDERFLOW
            if math.isfinite(norm_alone) and not lowest <= norm <= highest:
                # Neither of the norms: both are about one private example, and messages end in logs.
                size = "smaller" if norm < lowest else "larger"
                raise ValueError(
                    f"The norm of an example's gradient must be that of autograd, got a {size} one from engine="
                    f"{self._clipped.engine_name!r}, so that an example's contribution is not bounded. Try the other engine."
                )

    def refuse_crowd(self, crowd: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], *, tolerance: float) -> None:
        """Compare the losses of a larger batch with those of its parts.

        Two or three examples cannot show what is constant for so few, such as class weights that balance a batch, or a tenth
        of it that is left out.

        Args:
            crowd: The batch.
            parts: Its examples in the same order, in batches of other sizes.
            tolerance: The difference allowed, relative to the losses.

        Raises:
            ValueError: If a loss changes with the number of examples or with their content.
        """
        with self._clipped.unwatched(), torch.no_grad():
            of_parts = [self._losses_of(dict(inputs)) for inputs in parts]
            expected, found = torch.cat(of_parts), self._losses_of(dict(crowd))
            refuse_number_of_losses(found.requires_grad_(), len(expected))
            finite = expected.isfinite()
            change, sizes = (found - expected)[finite].abs(), expected[finite].abs()
            if not len(sizes) or bool((change <= tolerance * (sizes + 0.1 * sizes.max())).all()):
                return
            numbers = [len(losses) for losses in of_parts]
            raise ValueError(at_fault.in_losses(self._model, self._losses_of, parts, crowd, numbers=numbers))

    def refuse_another_order(self, batches: Iterable[Mapping[str, Any]], *, tolerance: float) -> None:
        """Compare the engine's gradients of batches of different examples with plain autograd's of the same batches.

        Of two examples, one of which stands there twice, most orders that follow from their content are that of the batch.

        Args:
            batches: Batches of examples whose losses are right.
            tolerance: As in `refuse_difference`.

        Raises:
            ValueError: If they disagree, as where a layer takes the rows in another order, sorted or in groups.
        """
        # Of one batch after another: added up, one that is right would hide another.
        for inputs in batches:
            with self._clipped.unclipped():
                losses = self._losses_of(dict(inputs))
                # Every second one by itself: a hook may clip a row's gradient, of which no other share is a share.
                weights = (torch.arange(len(losses), device=losses.device) % 2 == 0).float()
                norms = self._clipped.backward(losses, weights=weights)
                found = self._clipped.sums
            largest = float(norms.max())
            if not math.isfinite(largest):  # of autograd's sum nothing would be left
                continue
            with self._clipped.unwatched():
                expected = gradients_of(self._losses_of(dict(inputs)) * weights, self._trainable)
            for name, total in found.items():
                size = norm_of([total]) + OF_THE_WHOLE * largest
                off = norm_of([total - in_float32(expected[name]) if name in expected else total])
                if not off <= tolerance * max(size, 1e-30):
                    raise ValueError(
                        f"The per-sample gradients of {name!r} must be those of autograd in batches of different examples, "
                        f"got others from engine={self._clipped.engine_name!r}, so that an example's contribution is not "
                        "bounded, as where a layer takes the rows in an order that follows from what is in them, after "
                        "sorting or in groups. Let it take them as they stand, or freeze that parameter."
                    )

    def _of_the_engine(self, parameter: str) -> str:
        engine = self._clipped.engine_name
        return (
            f"The per-sample gradients of {parameter!r} are wrong: those of engine={engine!r} are not those of autograd, so "
            "that an example's contribution is not bounded. The engine does not fit one of the layers. Freeze that "
            "parameter, or try the other engine."
        )
