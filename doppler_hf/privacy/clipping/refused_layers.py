"""Refuse layers that cannot be trained privately."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from doppler_hf.errors import Refusal, page
from doppler_hf.privacy.clipping.layers import CONTAINERS, listed, modes_kept

_OTHER_ADAPTERS: Final = "Train adapters of another kind, such as LoRA"
_TIED_TOKENS: Final = "Leave trainable_token_indices out, and add the embeddings to LoRA's target_modules"


def refuse_layers(model: nn.Module) -> None:
    """Refuse layers that share parameters, mix examples, change weights without noise, or are compiled."""
    with modes_kept(model):
        in_training = {module for module in model.train().modules() if module.training}
    owners: dict[nn.Module, str] = {}
    mixing: dict[str, nn.Module] = {}
    rewriting: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            held = [key for key, parameter in child.named_parameters(recurse=False) if parameter.requires_grad]
            # If a layer inside another layer shares its parameters, each use would be noted for both.
            if isinstance(child, CONTAINERS) and held and owners.setdefault(child, name) != name:
                is_token = child_name == "trainable_tokens_delta"
                raise Refusal(
                    "shared-parameters",
                    f"The layer '{name}.{child_name}' shares its parameters with {owners[child]!r}, and shared parameters "
                    f"have no per-sample gradients. {_TIED_TOKENS if is_token else _OTHER_ADAPTERS}.",
                )
        refuse_compiled(module, name=name)
        if isinstance(module, torch.jit.ScriptModule):
            raise Refusal(
                "scripted-module",
                f"The {f'module {name!r}' if name else 'model'} was made by torch.jit, and its layers cannot be watched, so "
                "per-sample gradients cannot be computed. Use the module from before torch.jit.script or torch.jit.trace; "
                "its weights can be loaded with load_state_dict.",
            )
        # Sensitivity: frozen or not, in training mode such a layer normalizes one example by the others, or stores their
        # statistics. In evaluation mode, its statistics do not change.
        is_mixing = isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)
        if is_mixing and (module in in_training or module.running_mean is None):
            mixing[name] = module
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            rewriting[name] = module
    if mixing:
        raise Refusal(
            "layer-mixes-examples",
            f"The {named(mixing, 'mixes', 'mix')} the records of a batch, so clipping cannot bound what one record "
            f"contributes. Keep the statistics of pretraining fixed ({page('guides/images', 'batchnorm')}), or use "
            "GroupNorm or LayerNorm, for example with `model = opacus.validators.ModuleValidator.fix(model)`.",
        )
    if rewriting:
        raise Refusal(
            "embedding-max-norm",
            f"The {named(rewriting, 'has', 'have')} max_norm, which changes weights during the forward pass without noise. "
            "Set max_norm to None.",
        )


def refuse_compiled(module: nn.Module, *, name: str = "") -> None:
    """Refuse a compiled module with trained weights; the model has the name ''."""
    is_compiled = isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None
    if is_compiled and any(parameter.requires_grad for parameter in module.parameters()):
        raise Refusal(
            "compiled-module",
            f"The {f'module {name!r}' if name else 'model'} is compiled and trained, but per-sample gradients cannot be "
            "computed in compiled layers. Pass the model without torch.compile, or compile frozen modules only.",
        )


def named(layers: Mapping[str, nn.Module], one: str, several: str) -> str:
    """Return the names and classes of layers, with the verb in singular or plural."""
    kinds = ", ".join(sorted({type(module).__name__ for module in layers.values()}))
    noun, verb = ("layer", one) if len(layers) == 1 else ("layers", several)
    return f"{noun} {listed(layers)} ({kinds}) {verb}"
