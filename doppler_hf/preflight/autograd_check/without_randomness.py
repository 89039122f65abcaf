"""Put a model into training mode without randomness for comparisons, since layers may couple examples only in that mode."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from doppler_hf.linalg import same
from doppler_hf.privacy.clipping.layers import modes_kept
from doppler_hf.privacy.randomness import states_of_generators
from doppler_hf.shards import first_row, part_here

# This matches dropout, drop_path_rate, attn_pdrop, layerdrop, router_jitter_noise, and mask_time_prob of SpecAugment.
_PROBABILITY: Final = re.compile(r"drop|jitter|mask_\w*prob")


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode with every probability of its modules and configs at zero, and restore both."""
    before = _probabilities(model)
    with modes_kept(model):
        model.train()
        try:
            for attributes, name, _ in before:
                attributes[name] = 0.0
            yield
        finally:
            for attributes, name, value in before:
                attributes[name] = value


def has_dropout(model: nn.Module) -> bool:
    """Return whether any probability of a model's modules and configs is above zero."""
    return any(value > 0.0 for _, _, value in _probabilities(model))


def _probabilities(model: nn.Module) -> list[tuple[dict[str, Any], str, float]]:
    """Return the attributes of modules and configs that have a probability, its name, and its value."""
    return [
        (vars(owner), name, value)
        for owner in owners_of_options(model)
        for name, value in vars(owner).items()
        if isinstance(value, float) and (_PROBABILITY.search(name) or isinstance(owner, _DropoutNd))
    ]


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode with gradient checkpointing on, if no attribute turns its randomness off."""
    with modes_kept(model) as training:
        model.eval()
        for module, was_training in training.items():
            # Checkpointing reads the flag of the block that it wraps, and dropout reads its own flag.
            module.training = was_training and bool(vars(module).get("gradient_checkpointing"))
        yield


def owners_of_options(model: nn.Module) -> list[Any]:
    """Return the modules of a model and their configs, including configs inside configs."""
    owners: dict[int, Any] = {id(module): module for module in model.modules()}
    ahead = list(owners.values())
    while ahead:
        for name, value in vars(ahead.pop()).items():
            if name.endswith("config") and "__dict__" in dir(value) and id(value) not in owners:
                owners[id(value)] = value
                ahead.append(value)
    return list(owners.values())


@contextlib.contextmanager
def away_from_zero(model: nn.Module) -> Iterator[None]:
    """Fill trained parameters that are all zero with small noise, and restore them: otherwise new adapters pass no gradient.

    The embedding of the padding is filled, too: noise moves it in training, so a model that reads it would show that only
    from the second step on.
    """
    generator = torch.Generator().manual_seed(0)
    trained = (part_here(parameter).detach() for parameter in model.parameters() if parameter.requires_grad)
    # The first 64 numbers of most parameters already show that they are not zero.
    zeros: list[Tensor] = [p for p in trained if not p.flatten()[:64].any() and not p.any()]
    for table in (module for module in model.modules() if isinstance(module, nn.Embedding)):
        if table.padding_idx is not None and table.weight.requires_grad:
            place = table.padding_idx - first_row(table.weight)  # only one process has this row of a sharded table
            row = part_here(table.weight).detach()[max(0, place) : max(0, place + 1)]
            zeros += [] if row.any() else [row]
    for parameter in zeros:
        parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        for parameter in zeros:
            parameter.zero_()


def is_random(losses_of: Any, inputs: dict[str, Any], *, again: int = 3) -> bool:
    """Return whether the losses of a batch are random, by computing them again, so many times at most."""
    with torch.no_grad():
        first = losses_of(dict(inputs))
        # Repeat several times, since a layer that is only sometimes left out does not show every time.
        return any(not same(losses_of(dict(inputs)), first) for _ in range(again))


def draws_numbers(losses_of: Any, inputs: dict[str, Any]) -> bool:
    """Return whether the losses of a batch take numbers from a global generator, even if these did not change them."""
    with torch.no_grad():
        before = states_of_generators()
        losses_of(dict(inputs))
        return states_of_generators() != before
