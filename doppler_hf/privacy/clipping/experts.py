"""Mixtures of experts, whose router and experts see the tokens of all examples in one list.

A block is computed for one example after another, each with a copy of the trained parameters. The copy's ordinary gradient
is the per-sample gradient of everything in the block: router, fused experts of three dimensions, shared experts, adapters of
any of these. No expert has a capacity, so an example's tokens go where they would go in the batch.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from doppler_hf.privacy.clipping.copies import one_per_example
from doppler_hf.privacy.clipping.gradients import Notes
from doppler_hf.privacy.clipping.layers import substituted
from doppler_hf.privacy.clipping.other_layers import has_rows

# The attribute that Transformers sets in fused experts, and the adapters that PEFT wraps around them.
_MARK: Final = "_is_expert_parallel"
_ADAPTERS: Final = re.compile(r"(\.base_layer)+$")


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each block of router and fused experts with trained parameters."""
    for name, module in model.named_modules():
        if _MARK in vars(module):
            block_name = _ADAPTERS.sub("", name).rpartition(".")[0]
            block = model.get_submodule(block_name)
            if any(parameter.requires_grad for parameter in block.parameters()):
                yield block_name, block


class ExpertBlock:
    """Replaces the forward of one block."""

    def __init__(self, module: nn.Module, notes: Notes, *, forward: Callable[..., Any]) -> None:
        self._module, self._notes, self._forward = module, notes, forward
        numbers = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        self.fallback = f"{type(module).__name__}: one record after another; {numbers * 4 / 2**20:.3g} MiB for each record"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block's outputs for each example, and join them along the first dimension."""
        values, spec = pytree.tree_flatten((args, kwargs))
        rows = self._notes.batch_size
        if rows is None or not has_rows(values[0], rows):
            # Without a batch dimension, the example of a token is unknown.
            return self._forward(*args, **kwargs)  # The engine then refuses the parameters by name.
        trained = {name: each for name, each in self._module.named_parameters() if each.requires_grad}
        copies = {name: one_per_example(self._notes, each, tuple(each.shape)) for name, each in trained.items()}
        found = []
        for row in range(rows):
            of_one = [value[row : row + 1] if has_rows(value, rows) else value for value in values]
            args, kwargs = pytree.tree_unflatten(of_one, spec)
            with substituted(self._module, {name: copy[row] for name, copy in copies.items()}), self._notes.unwatched():
                found.append(self._forward(*args, **kwargs))
        return pytree.tree_map(lambda *outputs: torch.cat(outputs), *found)
