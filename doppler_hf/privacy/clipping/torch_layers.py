"""Rules for torch's layers: how each kind notes its per-sample gradient during the one backward pass.

Every rule replaces the layer's own forward. It computes the same output through an autograd function that saves the layer's
input, as autograd would. Its backward pass returns the gradient of the input and notes the pair (input, gradient of the
output) in the `Notes`. It does not compute the ordinary gradient of the weights, which would be discarded.

Parameters are kept as attributes of the context and not among the saved tensors: for those, gradient checkpointing returns
other tensor objects, whose notes would be lost.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrize

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.copies import one_per_example
from doppler_hf.privacy.clipping.gradients import Notes, Standardization, formed
from doppler_hf.privacy.clipping.layers import trainable_of

Rule = Callable[..., Any]
# How many numbers of patches are in memory together: 2 MiB in float32. Between 1 and 8 MiB it made no difference.
_PATCHES_AT_ONCE: Final = 1 << 19


def over_time(x: Float[Tensor, "batch ..."], dims: int = 1) -> Float[Tensor, "batch time ..."]:
    """Return x of shape (batch, …, *last) as (batch, time, *last), where the last part has `dims` dimensions."""
    return x if x.ndim == dims + 2 else x.reshape(x.shape[0], -1, *x.shape[x.ndim - dims :])


def linear(notes: Notes, module: nn.Linear, input: Float[Tensor, "batch *time q"]) -> Float[Tensor, "batch *time p"]:
    """Compute Y = x Wᵀ + b."""
    return _Linear.apply(input, module.weight, module.bias, notes, False)


def product(
    notes: Notes, x: Float[Tensor, "batch *time q"], weight: Float[Tensor, "p q"], bias: Float[Tensor, " p"] | None
) -> Float[Tensor, "batch *time p"]:
    """Compute Y = x Wᵀ + b of a layer's parameters."""
    return _Linear.apply(x, weight, bias, notes, False)


def transposed_linear(notes: Notes, module: Any, x: Float[Tensor, "batch *time q"]) -> Float[Tensor, "batch *time p"]:
    """Compute Y = x W + b: transformers' Conv1D, the linear layer of GPT-2."""
    return _Linear.apply(x, module.weight, module.bias, notes, True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "batch *time q"],
        weight: Float[Tensor, "_ _"],
        bias: Float[Tensor, " p"] | None,
        notes: Notes,
        transposed: bool,
    ) -> Float[Tensor, "batch *time p"]:
        ctx.weight, ctx.bias, ctx.notes, ctx.transposed = weight, bias, notes, transposed
        # The input is kept in the dtype of the product. Without kernels, wide matrices share their input with each other.
        is_rounded = weight.requires_grad and is_cast(x)
        if is_rounded and (notes.in_kernels or notes.is_formed(x.shape[1:-1].numel(), *weight.shape)):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # A copy in float32 would take twice the memory.
        ctx.save_for_backward(x if weight.requires_grad else None)
        if is_cast(weight):
            weight = notes.cast(weight, torch.get_autocast_dtype(weight.device.type))
        output = F.linear(x, weight.t() if transposed else weight, bias)
        # A view of the product could not be changed in place by a later layer.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch *time p"]) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.weight.requires_grad:
            pair = (over_time(grad), over_time(x))
            ctx.notes.note_product(ctx.weight, *(reversed(pair) if ctx.transposed else pair))
        ctx.notes.note_sum(ctx.bias, over_time(grad))
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        weight = ctx.notes.cast(ctx.weight, grad.dtype)
        return torch.matmul(grad, weight.t() if ctx.transposed else weight), None, None, None, None


def embedding(notes: Notes, module: nn.Embedding, input: Int[Tensor, "rows *time"]) -> Float[Tensor, "batch *time dim"]:
    """Compute Y = W[ids]; indices of shape (1, …), such as positions, are looked up once for each example."""
    if input.shape[0] == 1:
        assert notes.batch_size is not None
        input = input.expand(notes.batch_size, *input.shape[1:])
    return _Embedding.apply(module.weight, input, module.padding_idx, notes)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Float[Tensor, "rows dim"], ids: Int[Tensor, "batch *time"], padding_idx: int | None, notes: Notes
    ) -> Float[Tensor, "batch *time dim"]:
        ctx.weight, ctx.padding_idx, ctx.notes = weight, padding_idx, notes
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch *time dim"]) -> tuple[None, ...]:
        ids, values = ctx.saved_tensors[0].reshape(len(grad), -1), over_time(grad)
        if ctx.padding_idx is not None:
            values = values.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0.0)
        ctx.notes.note_lookup(ctx.weight, ids, values)
        return (None,) * 4


def is_cast(x: Tensor) -> bool:
    """Return whether autocast multiplies a tensor in another dtype."""
    return x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)


def layer_norm(notes: Notes, module: nn.LayerNorm, input: Float[Tensor, "batch *rest"]) -> Float[Tensor, "batch *rest"]:
    """Compute Y = x̂ w + b, x̂ = (x − mean)/std over the last dimensions."""
    # Autocast converts the input of a normalization on CUDA in the same way.
    input = input.float() if input.is_cuda and torch.is_autocast_enabled("cuda") else input
    return _LayerNorm.apply(input, module.weight, module.bias, module, notes)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.LayerNorm, notes: Notes
    ) -> Float[Tensor, "batch *rest"]:
        ctx.weight, ctx.bias, ctx.shape, ctx.notes = weight, bias, tuple(module.normalized_shape), notes
        output, mean, rstd = torch.native_layer_norm(x, ctx.shape, weight, bias, module.eps)
        ctx.save_for_backward(x, mean, rstd)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch *rest"]) -> tuple[Tensor | None, ...]:
        x, mean, rstd = ctx.saved_tensors
        dims = len(ctx.shape)
        terms = [over_time(tensor, dims).flatten(2) for tensor in (x, mean, rstd, grad)]
        ctx.notes.note_normalized(ctx.weight, ctx.bias, terms)
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        # The mask requests only the gradient of the input.
        wanted = (True, False, False)
        arguments = (grad.contiguous(), x, ctx.shape, mean, rstd, ctx.weight, ctx.bias, wanted)
        return torch.ops.aten.native_layer_norm_backward(*arguments)[0], None, None, None, None


def rms_norm(notes: Notes, module: nn.RMSNorm, input: Float[Tensor, "batch *rest"]) -> Float[Tensor, "batch *rest"]:
    """Compute Y = x̂ w, x̂ = x/√mean(x²) over the last dimensions."""
    shape = tuple(module.normalized_shape)
    normalized = F.rms_norm(input, shape, None, module.eps)
    return normalized * one_per_example(notes, module.weight, (1,) * (input.ndim - 1 - len(shape)) + shape)


def group_norm(
    notes: Notes, module: nn.GroupNorm, input: Float[Tensor, "batch channels *positions"]
) -> Float[Tensor, "batch channels *positions"]:
    """Compute Y = x̂ w + b per channel, x̂ normalized over groups of channels."""
    # Autocast converts the input of a normalization on CUDA in the same way; this function replaces the call that it would
    # see.
    input = input.float() if input.is_cuda and torch.is_autocast_enabled("cuda") else input
    return _GroupNorm.apply(input, module.weight, module.bias, module, notes)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: nn.GroupNorm, notes: Notes
    ) -> Float[Tensor, "batch channels *positions"]:
        ctx.weight, ctx.bias, ctx.groups, ctx.notes = weight, bias, module.num_groups, notes
        x = x.contiguous()
        sizes = (len(x), x.shape[1], x.shape[2:].numel())
        output, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, module.num_groups, module.eps)
        ctx.save_for_backward(x, mean, rstd)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch channels *positions"]) -> tuple[Tensor | None, ...]:
        # The sums are made in float32, because torch would add up the gradients of half-precision weights in half precision.
        x, mean, rstd, weight = (in_float32(tensor) for tensor in (*ctx.saved_tensors, ctx.weight))
        examples, channels, positions = len(x), x.shape[1], x.shape[2:].numel()
        # Sensitivity: to torch this is one example, whose channels are those of all examples, each with a weight of its own.
        # The gradient of such a weight is read from the channel of one example and its gradient alone.
        terms = (in_float32(grad).contiguous(), x, mean.view(1, -1), rstd.view(1, -1), weight.repeat(examples))
        mask = (ctx.needs_input_grad[0], True, True)
        sizes = (1, examples * channels, positions, examples * ctx.groups)
        of_input, of_weight, of_bias = torch.ops.aten.native_group_norm_backward(*terms, *sizes, mask)
        for parameter, found in ((ctx.weight, of_weight), (ctx.bias, of_bias)):
            if parameter.requires_grad:
                ctx.notes.note_rows(parameter, found.view(examples, channels))
        return of_input.view_as(grad).to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None, None, None


def convolution(
    notes: Notes, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, input: Float[Tensor, "batch channels *positions"]
) -> Float[Tensor, "batch filters *outputs"]:
    """Compute a convolution: a linear layer of the patches, with the positions of the output as its time."""
    return convolved(notes, module, input, standard=None)


def convolved(
    notes: Notes,
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d,
    input: Float[Tensor, "batch channels *positions"],
    *,
    standard: Standardization | None,
) -> Float[Tensor, "batch filters *outputs"]:
    """Compute a convolution with the layer's weight, or with the weight that standardization has made of it."""
    geometry = (module.stride, module.padding, module.dilation, module.groups)
    return _Convolution.apply(input, module.weight, module.bias, geometry, notes, standard)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Any,
        notes: Notes,
        standard: Standardization | None,
    ) -> Float[Tensor, "batch filters *outputs"]:
        ctx.weight, ctx.bias, ctx.geometry, ctx.notes, ctx.standard = weight, bias, geometry, notes, standard
        ctx.save_for_backward(x)
        used = weight if standard is None else standard.weight.view_as(weight).to(weight.dtype)
        return (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3](x, used, bias, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "batch filters *outputs"]) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        if ctx.weight.requires_grad:
            patches_of = functools.partial(
                _patches, kernel_size=ctx.weight.shape[2:], dilation=dilation, padding=padding, stride=stride
            )
            left, x_of_grad = grad.flatten(2), x.to(grad.dtype)
            p, q, time = left.shape[1], ctx.weight[0].numel(), left.shape[2]
            if groups > 1 or ctx.notes.is_formed(time, p, q):
                pull_back = None if ctx.standard is None else ctx.standard.pulled_back
                found = _formed_in_blocks(left, x_of_grad, patches_of, q=q, groups=groups, pull_back=pull_back)
                ctx.notes.note_rows(ctx.weight, found)
            else:
                ctx.notes.note_product(ctx.weight, left.mT, patches_of(x_of_grad).mT, ctx.standard)
        ctx.notes.note_sum(ctx.bias, grad.flatten(2).mT)
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        weight = (ctx.weight if ctx.standard is None else ctx.standard.weight.view_as(ctx.weight)).to(grad.dtype)
        rest = (None, stride, padding, dilation, False, (0,) * len(stride), groups, (True, False, False))
        of_input = torch.ops.aten.convolution_backward(grad, x.to(grad.dtype), weight, *rest)[0]
        return of_input, None, None, None, None, None


def _formed_in_blocks(
    grad: Float[Tensor, "batch filters outputs"],
    x: Float[Tensor, "batch channels *positions"],
    patches_of: Callable[[Tensor], Float[Tensor, "_ channels_times_kernel outputs"]],
    *,
    q: int,
    groups: int,
    pull_back: Callable[[Tensor], Float[Tensor, "_ filters q"]] | None,
) -> Float[Tensor, "batch filters q"]:
    """Return each example's gradient of a convolution's weight, from the patches of a few examples at a time.

    `pull_back` makes of it the gradient of the parameter from which the weight is computed.

    All patches together are as many times the input as the kernel has places, and memory of that size, fresh from the
    operating system, takes longer to write than the product to compute. A block fits the cache and is used again.
    """
    filters = grad.shape[1]
    found = grad.new_empty(len(x), filters, q, dtype=torch.promote_types(grad.dtype, torch.float32))
    # A GPU is quickest with one large product.
    at_once = len(x) if x.is_cuda else max(1, _PATCHES_AT_ONCE // (groups * q * grad.shape[2]))
    for start in range(0, len(x), at_once):
        # Sensitivity: row i of a block is computed from row i of the input and of the gradient.
        rows = slice(start, start + at_once)
        left, right = (
            each.reshape(-1, each.shape[1] // groups, each.shape[2]) for each in (grad[rows], patches_of(x[rows]))
        )
        gradient = formed(left.mT, right.mT).view(-1, filters, q)
        found[rows] = gradient if pull_back is None else pull_back(gradient)
    return found


def _patches(
    x: Float[Tensor, "batch channels *positions"],
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Float[Tensor, "batch q outputs"]:
    """Return the patch of the input that each position of the output sees, for inputs of one to three dimensions.

    The patches are one view of the padded input, which is then copied row by row. `F.unfold` writes the same numbers one by
    one, which takes three to five times as long on a CPU.
    """
    if any(padding):
        x = F.pad(x, [each for size in reversed(padding) for each in (size, size)])
    x = x.contiguous()
    spans = zip(x.shape[2:], kernel_size, stride, dilation, strict=True)
    outputs = [(size - (kernel - 1) * apart - 1) // step + 1 for size, kernel, step, apart in spans]
    within = [gap * apart for gap, apart in zip(x.stride()[2:], dilation, strict=True)]
    between = [gap * step for gap, step in zip(x.stride()[2:], stride, strict=True)]
    # Sensitivity: the view has the input's own strides over the examples, so that row i is of example i alone.
    view = x.as_strided((*x.shape[:2], *kernel_size, *outputs), (*x.stride()[:2], *within, *between))
    return view.reshape(len(x), -1, math.prod(outputs))


# A rule replaces one function, so it is chosen by that function and not by a class's name or ancestors.
RULES: dict[Callable[..., Any], Rule] = {
    nn.Linear.forward: linear, nn.Embedding.forward: embedding, nn.LayerNorm.forward: layer_norm,
    nn.RMSNorm.forward: rms_norm, nn.GroupNorm.forward: group_norm,
    **dict.fromkeys((nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward), convolution),
}  # fmt: skip


def rule_for(module: nn.Module, rules: Mapping[Callable[..., Any], Rule]) -> Rule | None:
    """Return the rule that replaces the module's forward, or None."""
    if "forward" in vars(module) or parametrize.is_parametrized(module):
        return None
    own = re.compile(r"(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?" if isinstance(module, nn.RNNBase) else "weight|bias")
    if not all(own.fullmatch(name) for name, _ in trainable_of(module)):
        return None  # parameters from which a weight or bias is computed (pruning, weight norm)
    return None if is_unusual(module) else rules.get(type(module).forward)


def is_unusual(module: nn.Module) -> bool:
    """Return whether a layer pads a convolution otherwise than by zeros, or divides gradients by counts of the batch."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.padding_mode != "zeros" or isinstance(module.padding, str)
    return isinstance(module, nn.Embedding) and module.scale_grad_by_freq
