"""Rules for torch's layers by Opacus's samplers, which compute every gradient in full: `grad_sample_engine="opacus"`.

Nothing else of the engine differs: notes, norms, sums, and all layers that have no rule here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.gradients import Notes
from doppler_hf.privacy.clipping.layers import substituted, trainable_of
from doppler_hf.privacy.clipping.torch_layers import Rule, layer_norm

# A function of a layer, its inputs and the gradient of its output that returns parameter → per-sample gradients.
Sampler = Callable[[nn.Module, list[Tensor], Tensor], dict[nn.Parameter, Float[Tensor, "rows ..."]]]

_SAMPLED = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d
)  # fmt: skip


def opacus_rules() -> dict[Callable[..., Any], Rule]:
    """Return forward → the rule that replaces it."""
    from opacus.grad_sample import GradSampleHooks

    samplers = GradSampleHooks.GRAD_SAMPLERS
    return {kind.forward: functools.partial(sampled, samplers[kind]) for kind in _SAMPLED}


def sampled(
    sampler: Sampler, notes: Notes, module: nn.Module, input: Shaped[Tensor, "rows ..."]
) -> Float[Tensor, "batch ..."]:
    """Compute the layer's output; in the backward pass, note the per-sample gradients that a sampler computes."""
    if isinstance(module, nn.LayerNorm) and module.bias is None:
        return layer_norm(notes, module, input)  # Opacus's sampler assumes a bias.
    if isinstance(module, nn.Embedding) and input.shape[0] == 1:  # All examples share these indices, such as positions.
        assert notes.batch_size is not None
        input = input.expand(notes.batch_size, *input.shape[1:])
    own = dict(trainable_of(module))
    with substituted(module, {name: parameter.detach() for name, parameter in own.items()}):
        output = type(module).forward(module, input)
    return _Sampled.apply(output, input, sampler, module, notes, *own.values())


class _Sampled(torch.autograd.Function):
    """The identity on a layer's output; it takes the parameters too, so that its backward pass always runs."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, input: Tensor, sampler: Sampler, module: nn.Module, notes: Notes, *parameters: Tensor
    ) -> Float[Tensor, "batch ..."]:
        ctx.sampler, ctx.module, ctx.notes, ctx.number = sampler, module, notes, len(parameters)
        ctx.save_for_backward(input)
        return output.clone()  # Later layers may work in place.

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch ..."]) -> tuple[Tensor | None, ...]:
        (input,), values = ctx.saved_tensors, in_float32(grad)
        if (
            isinstance(ctx.module, nn.Embedding) and ctx.module.padding_idx is not None
        ):  # Torch does not train the padding row.
            values = values.masked_fill((input == ctx.module.padding_idx).unsqueeze(-1), 0.0)
        inputs = in_float32(input) if input.is_floating_point() else input
        # Sensitivity: a sampler's row i is computed from row i of the input and of the gradient. The sampler of convolutions
        # needs contiguous tensors: it takes wrong patches from an image whose channels are last in memory.
        for parameter, gradient in ctx.sampler(ctx.module, [inputs.contiguous()], values.contiguous()).items():
            ctx.notes.note_rows(parameter, gradient)
        return (grad, *(None,) * (4 + ctx.number))
