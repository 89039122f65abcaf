"""A comparison of the engine on a batch with plain autograd on each of its examples alone, before the first step.

A wrong per-sample gradient would go unnoticed: the loss still falls, but the guarantee is void. So would a gradient that
changes with the examples beside it: the bound on each would hold, and one example more would change all the others. The
check runs on the user's own model, data and collator, with adapters, attention and checkpointing.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.as_in_training import left_as_it_was, without_coins
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Engine
from doppler_hf.privacy.clipping.factored import UNDERFLOW, NormRule

# The share of the largest norm that is added to the size of a parameter's gradient when the two are compared: some
# gradients, such as that of the bias of attention's keys, consist of rounding only.
OF_THE_WHOLE = 1e-2
# Norms may be too large by this much: some are raised by a bound on their rounding.
NORM_ALLOWANCE = 0.1
# Adapters, gates and layer scales begin below this. Matrices begin at about 0.02 or more, and need not be copied.
NEARLY_ZERO = 0.01

MIXED_ROWS = (
    "the row that data set and collator make of an example is not the one that they make of it alone. Use a data set and a "
    "collator that mix no examples (no MixUp, CutMix or packing), and pad on the right."
)

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

    def expected(self) -> Expected:
        """Return the ordinary gradients of the examples."""
        found = Expected({}, [], [])
        for index, inputs in enumerate(self._alone):
            with self._clipped.unwatched():
                losses = self._losses_of(dict(inputs))
                refuse_number_of_losses(losses, 1)
                gradients = gradients_of(losses, self._trainable)
            found.norms.append(norm_of(gradients.values()))
            found.losses.append(losses.detach())
            weight = sum(share for share, row in zip(self._weights, self._rows, strict=True) if row == index)
            for name, gradient in gradients.items() if math.isfinite(found.norms[-1]) else ():
                # In place: fresh memory for a large model takes longer than what is computed in it.
                weighted = in_float32(gradient).mul_(weight)
                found.sums[name] = found.sums[name].add_(weighted) if name in found.sums else weighted
        return found

    @property
    def _weights(self) -> list[float]:
        return [0.5**row for row in range(len(self._rows))]

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
            norms = self._clipped.backward(losses, weights=torch.tensor(weights, device=losses.device)).tolist()
            difference = self._clipped.sums
        sizes = {name: norm_of([total]) for name, total in difference.items()}
        for name, total in expected.sums.items():
            difference[name].sub_(total)
        largest = max(filter(math.isfinite, norms_alone), default=0.0)
        off = {name: norm_of([rest]) / max(sizes[name] + OF_THE_WHOLE * largest, 1e-30) for name, rest in difference.items()}
        worst = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
        if not off[worst] <= tolerance:
            with self._clipped.unwatched():
                raise ValueError(self._reason(worst, off[worst]))
        for norm, norm_alone in zip(norms, norms_alone, strict=True):
            # A norm that is too small would let an example contribute more than the bound, one too large only less.
            lowest, highest = norm_alone * (1 - tolerance), norm_alone * (1 + max(tolerance, NORM_ALLOWANCE)) + UNDERFLOW
            if math.isfinite(norm_alone) and not lowest <= norm <= highest:
                # Neither of the norms: both are about one private example, and messages end in logs.
                size = "smaller" if norm < lowest else "larger"
                raise ValueError(
                    f"The norm of an example's gradient must be that of autograd, got a {size} one from engine="
                    f"{self._clipped.engine_name!r}, so that an example's contribution is not bounded. Try the other engine."
                )

    def refuse_crowd(self, crowd: Mapping[str, Any], first: Sequence[Mapping[str, Any]], *, tolerance: float) -> None:
        """Compare the losses of the first examples of a larger batch with those that they have alone.

        Two or three examples cannot show what is constant for so few, such as class weights that balance a batch.

        Args:
            crowd: The batch.
            first: Its first examples, each as a batch of one.
            tolerance: The difference allowed, relative to the losses.

        Raises:
            ValueError: If a loss changes with the number of examples or with their content.
        """
        with self._clipped.unwatched():
            expected = torch.cat([self._losses_of(dict(inputs)).detach() for inputs in first])
            found = self._losses_of(dict(crowd)).detach()[: len(first)]
            finite = expected.isfinite()
            change, sizes = (found - expected)[finite].abs(), expected[finite].abs()
            if not len(sizes) or bool((change <= tolerance * (sizes + 0.1 * sizes.max())).all()):
                return
            reason = (
                "The loss of one example changes with the examples beside it, in a batch of several, so that one example "
                "more would change all others, and no noise covers that: "
            )
            if not all(is_row_of(crowd, inputs, row) for row, inputs in enumerate(first)):
                raise ValueError(reason + MIXED_ROWS)
            raise ValueError(
                f"{reason}{self._place(first[0], crowd)} depends on them, as with class weights that balance a batch. Let "
                "each loss depend on its example alone, and replace the layer."
            )

    def _reason(self, parameter: str, off: float) -> str:
        """Say what is at fault: the engine, the collator, the loss or a layer."""
        alone, one, engine = self._alone, {parameter: self._trainable[parameter]}, self._clipped.engine_name

        def relative_change(inputs: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> float:
            """Return how far autograd's gradient of a batch is from the sum of those of its examples."""
            expected = sum(gradients_of(self._losses_of(dict(part)), one).get(parameter, torch.zeros(())) for part in parts)
            found = gradients_of(self._losses_of(dict(inputs)), one).get(parameter, torch.zeros(()))
            # Of the batch's size, as `off` is: it may be far below that of the examples.
            return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(found).clamp(min=1e-30))

        if relative_change(self._together, [alone[index] for index in self._rows]) < off / 10:
            return (
                f"The per-sample gradients of {parameter!r} are wrong: engine={engine!r} is off by {off:.2g} of their size, "
                "so that an example's contribution is not bounded. The engine does not fit one of the layers. Freeze that "
                "parameter, or try the other engine."
            )
        reason = (
            f"The gradient of one example changes with the examples beside it, at {parameter!r} by {off:.2g} of its size, "
            "so that one example more would change all others, and no noise covers that: "
        )
        if not all(is_row_of(self._together, alone[index], row) for row, index in enumerate(self._rows)):
            return reason + MIXED_ROWS
        place = self._place(alone[0], self._together)
        padded = {name: value[:1] if is_batched(alone[0].get(name)) else value for name, value in self._together.items()}
        if relative_change(padded, [alone[0]]) > off / 100:
            return reason + (
                f"{place} depends on the length to which an example is padded. Pad all examples to one length when they are "
                "tokenized or turned into features (padding='max_length'), or replace the layer (for rotary embeddings: "
                "another rope_type)."
            )
        return reason + (
            f"{place} depends on the number of examples, or on what they are, as in a mean, a norm or a capacity over the "
            "batch. Let each loss depend on its example alone, and replace the layer."
        )

    def _place(self, alone: Mapping[str, Any], together: Mapping[str, Any]) -> str:
        layer = first_difference(self._model, self._losses_of, alone, together)
        return "the loss" if layer is None else f"the output of {layer}"


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
            # Not their shape, which may hold the length of an example: messages end in logs.
            f"The losses of {number} collated examples must have shape ({number},), got {losses.ndim} dimensions or another "
            "number. Let the collator return one row for each example, and compute_per_sample_loss one loss."
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


def norm_of(tensors: Collection[Tensor]) -> float:
    """Return the joint norm, each row's in its own precision and the whole in float64."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1) if tensor.ndim else tensor for tensor in tensors]
    norm = math.hypot(*(float(torch.linalg.vector_norm(row, dtype=torch.float64)) for row in rows))
    if math.isfinite(norm):
        return norm
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))


@contextlib.contextmanager
def moved(model: nn.Module) -> Iterator[None]:
    """Add a little fixed noise to the trained parameters that are nearly zero throughout, and restore them exactly."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small = [parameter for parameter in trained if parameter.numel() and is_nearly_zero(parameter.detach())]
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
