"""A model as it is in training, but without what would spoil a comparison: coins, autocast, and traces of the comparison.

What couples examples may do so in training mode only: a router's capacity, MixUp under `if model.training`. So a comparison
must not be made in evaluation mode; it must not be random either. Every probability that a model or its config keeps is
therefore set to zero, in training mode. Weights must not be zero: what passes through them would agree whatever was wrong.
"""

import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from doppler_hf.privacy.clipping.held_coins import HeldCoins
from doppler_hf.shards import part_here

# dropout, drop_path_rate, attn_pdrop, layerdrop; router_jitter_noise; mask_time_prob of SpecAugment.
_PROBABILITY = re.compile(r"drop|jitter|mask_\w*prob")
# LayerDrop leaves out a layer of all rows, and SpecAugment rounds the number of its masks alike for all.
_FOR_ALL_ROWS = re.compile(r"layer_?drop|mask_\w*prob")
# expert_capacity; max_tokens_per_expert.
_CAPACITY = re.compile(r"capacity(?!_factor)|tokens_per_expert|expert_tokens|^max_tokens$")
# Adapters, gates and layer scales begin below this. Matrices begin at about 0.02 or more, and need not be copied.
NEARLY_ZERO = 0.01
_NARROW = (torch.bfloat16, torch.half)


@contextlib.contextmanager
def without_coins(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode with every probability at zero, and restore both."""
    with modes_kept(model):
        model.train()
        with replaced(model, is_probability, by=0.0):
            yield


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Give every module its mode back after the block, which gets them: whether each was in training."""
    training = {module: module.training for module in model.modules()}
    try:
        yield training
    finally:
        for module, was_training in training.items():
            module.training = was_training


@contextlib.contextmanager
def with_held_coins(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode with every probability at zero and torch's coins at their mean, and restore it."""
    with without_coins(model), HeldCoins():
        yield


@contextlib.contextmanager
def with_small_capacity(model: nn.Module) -> Iterator[None]:
    """Lower the capacity of a router's experts, so that a few examples exceed it, and restore it."""
    with replaced(model, lambda _, name, value: _CAPACITY.search(name) and type(value) is int and value > 2, by=2):
        yield


def is_probability(owner: object, name: str, value: object) -> bool:
    """Return whether an attribute of a module or a config says how often something is done at random."""
    return isinstance(value, float) and (_PROBABILITY.search(name) is not None or isinstance(owner, _DropoutNd))


@contextlib.contextmanager
def replaced(model: nn.Module, is_wanted: Callable[[object, str, object], object], *, by: float) -> Iterator[None]:
    """Replace some attributes of modules and their configs, and restore them."""
    owners = owners_of_options(model)
    found = [(vars(owner), owner, item) for owner in owners for item in vars(owner).items()]
    before = [(attributes, name, value) for attributes, owner, (name, value) in found if is_wanted(owner, name, value)]
    try:
        for attributes, name, _ in before:
            attributes[name] = by
        yield
    finally:
        for attributes, name, value in before:
            attributes[name] = value


def owners_of_options(model: nn.Module) -> list[Any]:
    """Return the modules of a model and their configs, those inside of configs too."""
    owners: dict[int, Any] = {id(module): module for module in model.modules()}
    ahead = list(owners.values())
    while ahead:
        for name, value in vars(ahead.pop()).items():
            if name.endswith("config") and "__dict__" in dir(value) and id(value) not in owners:
                owners[id(value)] = value
                ahead.append(value)
    return list(owners.values())


def probabilities_for_all_rows(model: nn.Module) -> list[str]:
    """Return the names of the probabilities in a model's configs at which rows share numbers, if they are not zero."""
    configs = [owner for owner in owners_of_options(model) if not isinstance(owner, nn.Module)]
    names = {name for config in configs for name, value in vars(config).items() if isinstance(value, float) and value}
    return sorted(name for name in names if _FOR_ALL_ROWS.search(name))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, but leave gradient checkpointing on: for models that keep coins elsewhere."""
    with modes_kept(model) as training:
        model.eval()
        for module, was_training in training.items():
            # Checkpointing reads the flag of the block that it wraps, dropout its own.
            module.training = was_training and bool(vars(module).get("gradient_checkpointing"))
        yield


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Give every module its attributes, submodules, hooks and buffers back, which forward passes may write."""
    before = [
        (
            module,
            dict(vars(module)),
            # The host installs hooks at the first forward pass, and notes that in an attribute: without its note, twice.
            [
                (held, dict(held))
                for name, held in vars(module).items()
                if isinstance(held, dict) and (name == "_modules" or "_hooks" in name)
            ],
            [(name, tensor, None if tensor is None else tensor.clone()) for name, tensor in module._buffers.items()],
            {name for name, parameter in module._parameters.items() if parameter is None},
            {*module._parameters},
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, attributes, dictionaries, buffers, empty, parameters in before:
                # Others may stand in their places in between, as those that FSDP gathers.
                module._parameters.update(dict.fromkeys(empty))
                for name in module._parameters.keys() - parameters:
                    del module._parameters[name]
                vars(module).clear()
                vars(module).update(attributes)
                for held, content in dictionaries:
                    held.clear()
                    held.update(content)
                for name, tensor, value in buffers:
                    module._buffers[name] = tensor
                    if tensor is not None and value is not None:
                        tensor.copy_(value)


@contextlib.contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Compute in float32: without autocast and casts, whoever asks for them, and with weights of fewer bits converted."""
    # Weights in shards are widened when they are gathered.
    own = (tensor for tensor in (*model.parameters(), *model.buffers()) if not isinstance(tensor, DTensor))
    tensors = [tensor for tensor in own if tensor.dtype in _NARROW]
    before = [(tensor, tensor.data) for tensor in tensors]
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    try:
        torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
        torch.autocast.__exit__ = lambda *exception: None  # type: ignore[method-assign]
        for tensor, data in before:
            tensor.data = data.float()
        with InFloat32():
            yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]
        for tensor, data in before:
            tensor.data = data


class InFloat32(TorchFunctionMode):
    """Takes float32 wherever code asks for a type of fewer bits, such as `x.to(torch.bfloat16)` in a forward pass."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with other types."""
        function = Tensor.float if function in (Tensor.bfloat16, Tensor.half) else function
        return function(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


def widened(value: Any) -> Any:
    """Return float32 in place of a type of fewer bits, and everything else as it is."""
    return torch.float32 if any(value is narrow for narrow in _NARROW) else value


@contextlib.contextmanager
def moved(model: nn.Module) -> Iterator[None]:
    """Move the trained parameters that are nearly zero throughout, and rows of zeros in others, and restore them exactly.

    Private training moves all of them, by its noise. An embedding's row of the padding is zero at the start, so that a model
    may read it without a mask; behind the first step an example would change with its padding.
    """
    trained = [part_here(parameter) for parameter in model.parameters() if parameter.requires_grad]
    trained = [parameter for parameter in trained if parameter.numel()]
    is_small = [is_nearly_zero(parameter.detach()) for parameter in trained]
    small = list(itertools.compress(trained, is_small))
    before = [parameter.detach().clone() for parameter in small]
    empty = {
        p: rows for p in itertools.compress(trained, map(operator.not_, is_small)) if len(rows := rows_of_zeros(p.detach()))
    }
    generator = torch.Generator().manual_seed(0)

    def noise(values: Tensor) -> Tensor:
        return torch.randn(values.shape, generator=generator).to(values)

    try:
        with torch.no_grad():
            for parameter in small:
                parameter.add_(0.02 * noise(parameter))
            for parameter, rows in empty.items():
                parameter[rows] = parameter.std() * noise(parameter[rows])
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(small, before, strict=True):
                parameter.copy_(value)
            for parameter, rows in empty.items():
                parameter[rows] = 0.0


def rows_of_zeros(values: Tensor) -> Tensor:
    """Return the indices of the rows that are zero; of most rows the first number tells."""
    if values.ndim < 2:
        return torch.empty(0, dtype=torch.long, device=values.device)
    rows = values.flatten(1)
    candidates = (rows[:, 0] == 0).nonzero().flatten()
    return candidates[~rows[candidates].any(dim=1)]


def is_nearly_zero(values: Tensor) -> bool:
    """Return whether no element is far from zero; of most tensors, the first ones tell."""
    return all(bool(part.abs().max() < NEARLY_ZERO) for part in (values.flatten()[:64], values))
