"""A layer's own parameters, and the layers that cannot be trained privately."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def trainable_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters that the module itself owns."""
    return [(name, p) for name, p in module.named_parameters(recurse=False) if p.requires_grad]


@contextlib.contextmanager
def substituted(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Substitute tensors for some of the parameters that the module itself owns."""
    before = {name: module._parameters[name] for name in tensors}
    # Straight into the dictionary, so that the parameters keep their places in the order that optimizers rely on.
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(before)


def refuse_layers(model: nn.Module) -> None:
    """Refuse layers that mix examples, write values that no noise covers, are compiled, or have no per-sample gradients."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None:
            raise ValueError(
                f"The module {name or 'itself'!r} is compiled, but per-sample gradients are computed in the layers' own "
                "forwards. Pass the model without torch.compile."
            )
        # Frozen or not: in training mode such a layer normalizes one example by the others, or stores their statistics.
        if isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats):
            raise ValueError(
                f"The layer {name!r} ({kind}) mixes the examples of a batch, so that clipping bounds nothing. Replace it "
                "by GroupNorm or LayerNorm."
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ValueError(
                f"The layer {name!r} ({kind}) has max_norm={module.max_norm}, which rewrites the rows that a batch looks "
                "up, without clipping or noise. Set max_norm to None."
            )
        if trainable_of(module) and isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            raise ValueError(
                f"The layer {name!r} ({kind}) has no per-sample gradients. Freeze it with requires_grad_(False), or replace "
                "it by its namesake in opacus.layers."
            )
