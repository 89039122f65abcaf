"""Functions of parameters alone, whose output has no batch: learned positions, T5's position bias.

Such an output, of shape (1, …), is broadcast over the batch later. Here it is repeated for each example instead, and each
example's gradient is back-propagated through the function separately.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from doppler_hf.privacy.clipping.book import Book


def repeated(
    book: Book, parameters: Mapping[str, nn.Parameter], output_of: Callable[[Mapping[str, Tensor]], Tensor]
) -> Tensor:
    """Return a function of parameters alone, shape (1, …), once for each example, shape (batch, …)."""
    return _Repeated.apply(book, output_of, tuple(parameters), *parameters.values())


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        book: Book,
        output_of: Callable[[Mapping[str, Tensor]], Tensor],
        names: tuple[str, ...],
        *parameters: nn.Parameter,
    ) -> Tensor:
        assert book.batch_size is not None
        ctx.book, ctx.parameters = book, parameters
        with torch.enable_grad():
            ctx.leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            ctx.output = output_of(dict(zip(names, ctx.leaves, strict=True)))
        return ctx.output.detach().repeat(book.batch_size, *(1,) * (ctx.output.ndim - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        # Linear in the gradient of the output, so every example's is back-propagated separately.
        gradients = torch.autograd.grad(ctx.output, ctx.leaves, grad.unsqueeze(1), is_grads_batched=True, retain_graph=True)
        for parameter, gradient in zip(ctx.parameters, gradients, strict=True):
            ctx.book.note_copy(parameter, gradient)
        return (None,) * (3 + len(gradients))
