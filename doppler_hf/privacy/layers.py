"""Which layers of a model need a treatment of their own, and which cannot be trained privately at all."""

from collections import Counter

from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def trainable_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters that the module itself owns."""
    return [(name, p) for name, p in module.named_parameters(recurse=False) if p.requires_grad]


def untied_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """Return the trainable embeddings whose table no other module uses."""
    owners: Counter[Tensor] = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    return [
        module
        for module in model.modules()
        if type(module) is nn.Embedding and module.weight.requires_grad and owners[module.weight] == 1
    ]


def owners_of_bare_parameters(model: nn.Module) -> list[nn.Module]:
    """Return the modules that own trainable parameters beside having sub-modules."""
    return [
        module
        for module in model.modules()
        if next(module.children(), None) is not None
        and trainable_of(module)
        and type(module) not in GradSampleHooks.GRAD_SAMPLERS
    ]


def refuse_unsupported_layers(model: nn.Module) -> None:
    """Raise for layers that mix examples, or whose per-sample gradients neither Opacus nor this module can form.

    Raises:
        ValueError: With the layer's name and what to do instead.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        # Frozen or not: in training mode such a layer normalizes one example by the others, or remembers them.
        if isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats):
            raise ValueError(
                f"The layer {name!r} ({kind}) mixes the examples of a batch, which no clipping can bound. Replace it "
                "by GroupNorm or LayerNorm."
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ValueError(
                f"The layer {name!r} ({kind}) has max_norm={module.max_norm}, which rewrites the rows that a batch looks "
                "up, without clipping or noise. Set max_norm to None."
            )
        if not trainable_of(module) or type(module) in GradSampleHooks.GRAD_SAMPLERS:
            continue
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            raise ValueError(
                f"The layer {name!r} ({kind}) has no per-sample gradients; replace it by its namesake in opacus.layers."
            )
        if next(module.children(), None) is None:
            if next(module.buffers(), None) is not None:
                raise ValueError(
                    f"The layer {name!r} ({kind}) has parameters and buffers, for which Opacus has no per-sample "
                    "gradients. Freeze it with requires_grad_(False)."
                )
            continue
        for parameter_name, parameter in trainable_of(module):
            if parameter.ndim == 0 or parameter.shape[0] != 1:
                raise ValueError(
                    f"The parameter {name}.{parameter_name} of shape {tuple(parameter.shape)} belongs to {kind} itself "
                    "and does not start with a dimension of 1 that could hold the batch, so it has no per-sample "
                    "gradient. Freeze it with requires_grad_(False)."
                )
