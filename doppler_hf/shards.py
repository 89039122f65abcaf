"""Tensors in shards (FSDP2): each process has a run of rows; the last run may be shorter or empty."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils.weak import WeakIdKeyDictionary

from doppler_hf.errors import Refusal

# By the weight in shards, a reference to torch's own keeper of it, an `FSDPParam`, which has the weight.
_KEEPERS: Final = WeakIdKeyDictionary()


def remember_keeper(parameter: Tensor, keeper: Any) -> None:
    """Let `gathered` find the whole of a weight in shards."""
    _KEEPERS[parameter] = weakref.ref(keeper)


def gathered(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what layers compute with, and so what has their notes and ordinary gradients.

    For a weight in shards this is the gathered one: the same object in every pass, even while its memory is freed.

    Raises:
        ValueError: If somebody else has cut it.
    """
    in_shards = {name: parameter for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    if not all(parameter in _KEEPERS for parameter in in_shards.values()):
        # Sensitivity: of rows that are taken for a whole the norm would be too small.
        raise Refusal(
            "foreign-shards",
            "Trained parameters must be whole, or cut by DopplerTrainer, got one in shards of another origin. Give the "
            "trainer the whole model, and set fsdp=True.",
        )
    return {**parameters} | {name: _KEEPERS[parameter]()._unsharded_param for name, parameter in in_shards.items()}


def first_row(tensor: Tensor) -> int:
    """Return where in it the rows of this process begin: 0 of a whole one, the length if this process has none."""
    if not isinstance(tensor, DTensor):
        return 0
    rows = -(-len(tensor) // tensor.device_mesh.size())
    return min(rows * tensor.device_mesh.get_local_rank(), len(tensor))


def part_here(tensor: Tensor) -> Tensor:
    """Return a tensor, or its rows on this process, detached."""
    return parts_here([tensor])[0]


def parts_here(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors, of those in shards the rows on this process, detached."""
    return [tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def in_shards(part: Tensor, *, like: Tensor) -> Tensor:
    """Return this process's rows as a tensor sharded like another one, or unchanged if that one is whole."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def whole_of(part: Tensor, *, like: Tensor) -> Tensor:
    """Return the whole tensor from every process's rows, sharded like another tensor; all processes must call it."""
    found = in_shards(part, like=like)
    return found.full_tensor() if isinstance(found, DTensor) else found


def rows_here(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return a view of this process's rows of a whole tensor, cut like another one."""
    return whole[first_row(like) :][: len(part_here(like))] if isinstance(like, DTensor) else whole


def added_up(own: Tensor, *, like: DTensor) -> Tensor:
    """Return this process's rows of the sum of every process's whole tensor (reduce-scatter); all processes must call it."""
    of_all = DTensor.from_local(own, like.device_mesh, [Partial()])
    return of_all.redistribute(placements=like.placements).to_local()
