"""Clipped sums of trained weights that lie in shards: a layer at a time, each process keeps the sum of its own rows.

Each process has its own examples and, layer by layer, whole weights, so that norms are local. Once they are known, a layer's
sum over the examples of this process is formed, and added to those of all others, of which each gets its rows alone
(reduce-scatter). So no process ever holds more than one layer's whole sum.

Sensitivity. An example is on one process, whose factors clip it by the norm over all layers before a sum is formed. The rows
are added up, never averaged, in float32 or better, each once. So the sum over all processes equals one process's sum, and
one example moves its rows together by at most C. All processes take part for every layer in each pass; a process with
nothing to add sends zeros.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from doppler_hf.shards import Place, part_here, place_of

# By the weight in shards, a reference to torch's own keeper of it.
_KEEPERS: Final = WeakIdKeyDictionary()


def remember_keeper(parameter: Tensor, keeper: Any) -> None:
    """Let `gathered` find the whole of a weight in shards, as an attribute of torch's `FSDPParam`."""
    _KEEPERS[parameter] = weakref.ref(keeper)


def gathered(parameter: Tensor) -> Tensor:
    """Return what layers compute with, and so what has their notes and ordinary gradients.

    For a weight in shards this is the gathered one: the same object in every pass, even while its memory is freed.
    """
    keeper = _KEEPERS[parameter]() if parameter in _KEEPERS else None
    return getattr(keeper, "_unsharded_param", parameter)


@final
class ShardedSums:
    """How the sums of trained weights in shards are added up over the processes."""

    def __init__(self, layers: Sequence[Mapping[str, DTensor]]) -> None:
        self._layers = layers
        self._parameters = {name: parameter for layer in layers for name, parameter in layer.items()}

    @property
    def places(self) -> dict[str, Place]:
        """By name, where in a parameter the rows of this process are."""
        return {name: place_of(parameter) for name, parameter in self._parameters.items()}

    def add_up(self, own: Callable[[str], Tensor | None], *, names: Iterable[str], sums: dict[str, Tensor]) -> None:
        """Add what a pass has found on all processes."""
        found: dict[str, Tensor] = {}
        for layer in self._layers:
            found |= self._rows_of_layer(layer, own)
        found |= {name: total for name in names if name not in found and (total := own(name)) is not None}
        for name, total in found.items():
            sums[name] = sums[name].add_(total) if name in sums else total

    def _rows_of_layer(self, layer: Mapping[str, DTensor], own: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
        # Cut as torch cuts the weights: a process behind the last row has none, and the zeros for it are no coordinates.
        processes = dist.get_world_size()
        rows = {name: -(-len(parameter) // processes) for name, parameter in layer.items()}
        sizes = [rows[name] * (parameter.numel() // len(parameter)) for name, parameter in layer.items()]
        first = next(iter(layer.values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        of_all = torch.zeros(processes, sum(sizes), dtype=dtype, device=first.device)
        for name, of_processes in zip(layer, of_all.split(sizes, dim=1), strict=True):
            if (total := own(name)) is not None:
                for to, part in zip(of_processes, total.split(rows[name]), strict=False):
                    to[: part.numel()] = part.flatten()
        mine = torch.empty_like(of_all[0])
        dist.reduce_scatter_single(mine, of_all.view(-1), op=dist.ReduceOp.SUM)
        parts = [part_here(parameter) for parameter in layer.values()]
        return {
            name: values[: part.numel()].view(part.shape)
            for name, values, part in zip(layer, mine.split(sizes), parts, strict=True)
        }
