"""One copy per example of a tensor that is broadcast over the batch, so that its ordinary gradient is per-sample."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from doppler_hf.privacy.clipping.gradients import Notes


def one_per_example(notes: Notes, parameter: nn.Parameter, shape: tuple[int, ...]) -> Float[Tensor, "rows ..."]:
    """Return one copy per row of an elementwise parameter; the copy's ordinary gradient is noted as the row's gradient.

    A copy broadcasts with a row as `shape`.
    """
    assert notes.batch_size is not None
    return _OnePerExample.apply(notes, parameter, (notes.batch_size, *shape))


class _OnePerExample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, notes: Notes, parameter: nn.Parameter, shape: tuple[int, ...]) -> Float[Tensor, "rows ..."]:
        ctx.notes, ctx.parameter = notes, parameter
        return parameter.detach().view(shape[1:]).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "rows ..."]) -> tuple[None, ...]:
        ctx.notes.note_rows(ctx.parameter, gradient)
        return (None,) * 3


def output_per_example(
    notes: Notes, parameters: Mapping[str, nn.Parameter], output_of: Callable[[Mapping[str, Tensor]], Tensor]
) -> Float[Tensor, "batch ..."]:
    """Return a function of parameters alone, shape (1, …), once for each example, shape (batch, …).

    Such an output, of learned positions or T5's position bias, is broadcast over the batch later. Here each example's
    gradient is back-propagated through the function separately.
    """
    return _OutputPerExample.apply(notes, output_of, tuple(parameters), *parameters.values())


class _OutputPerExample(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        notes: Notes,
        output_of: Callable[[Mapping[str, Tensor]], Tensor],
        names: tuple[str, ...],
        *parameters: nn.Parameter,
    ) -> Float[Tensor, "batch ..."]:
        assert notes.batch_size is not None
        ctx.notes, ctx.parameters = notes, parameters
        # Gradient checkpointing would discard saved tensors, and recompute its whole block inside the map over examples.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            ctx.leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            ctx.output = output_of(dict(zip(names, ctx.leaves, strict=True)))
        return ctx.output.detach().repeat(notes.batch_size, *(1,) * (ctx.output.ndim - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch ..."]) -> tuple[None, ...]:
        # The result is linear in the gradient of the output, so each example is back-propagated separately.
        gradients = torch.autograd.grad(ctx.output, ctx.leaves, grad.unsqueeze(1), is_grads_batched=True, retain_graph=True)
        for parameter, gradient in zip(ctx.parameters, gradients, strict=True):
            ctx.notes.note_rows(parameter, gradient)
        return (None,) * (3 + len(gradients))
