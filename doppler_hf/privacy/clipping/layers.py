"""A layer's own parameters and how to substitute them, modes and checkpointing of layers, and their names in messages."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# Containers have no forward, so their content counts as their owner's. Most of PEFT's adapters are in containers.
CONTAINERS = (nn.ParameterDict, nn.ParameterList)


def listed(names: Iterable[str]) -> str:
    """Return names in quotes; names that differ only in layer numbers appear once, with * for the number.

    Example:
        >>> listed(["layer.0.bias", "layer.1.bias", "head"])
        "'layer.*.bias' (2 of them), 'head'"
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return ", ".join(
        repr(found[0]) if len(found) == 1 else f"{pattern!r} ({len(found)} of them)" for pattern, found in alike.items()
    )


def trainable_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters that the module itself owns, including those in its dictionaries and lists.

    Parameters of a layer inside it belong to that layer, as in Opacus's recurrent layers, which name their cells'
    parameters.
    """
    if isinstance(module, CONTAINERS):
        return []
    held = {f"{name}.": child for name, child in module.named_children() if isinstance(child, CONTAINERS)}
    own = [
        (prefix + name, parameter)
        for prefix, owner in {"": module, **held}.items()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    layers = [child for child in module.children() if own and not isinstance(child, CONTAINERS)]
    within = {parameter for layer in layers for parameter in layer.parameters()}
    return [(name, parameter) for name, parameter in own if parameter not in within]


@contextlib.contextmanager
def substituted(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Substitute tensors for some of the parameters that the module itself owns."""
    # The dictionaries are changed directly, so that the parameters keep their order, on which optimizers rely.
    places = {name: (module.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2]) for name in tensors}
    before = {name: parameters[key] for name, (parameters, key) in places.items()}
    try:
        for name, (parameters, key) in places.items():
            parameters[key] = tensors[name]  # type: ignore[assignment]
        yield
    finally:
        for name, (parameters, key) in places.items():
            parameters[key] = before[name]


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Restore the mode of every module after the block; the block gets module → whether it was in training mode."""
    training = {module: module.training for module in model.modules()}
    try:
        yield training
    finally:
        for module, was_training in training.items():
            module.training = was_training


@contextlib.contextmanager
def checkpointing_off(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Switch gradient checkpointing inside a module off for the block, which gets the modules that had it on."""
    switched = [each for each in module.modules() if vars(each).get("gradient_checkpointing")]
    # With checkpointing, Transformers also has hooks by which the outputs of embeddings require gradients.
    hooked: list[Any] = [each for each in module.modules() if vars(each).get("_require_grads_hooks")]
    try:
        for each in switched:
            each.gradient_checkpointing = False  # type: ignore[assignment]
        for model in hooked:
            model.disable_input_require_grads()
        yield switched
    finally:
        for each in switched:
            each.gradient_checkpointing = True  # type: ignore[assignment]
        for model in hooked:
            model.enable_input_require_grads()
