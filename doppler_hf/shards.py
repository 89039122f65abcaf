"""Tensors in shards (FSDP2): each process has a range of consecutive rows; the last ranges may be shorter or empty."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils.weak import WeakIdKeyDictionary

from doppler_hf.errors import Refusal

# Weight in shards → a weak reference to the `FSDPParam` by which torch manages it.
_KEEPERS: Final = WeakIdKeyDictionary()


def remember_keeper(parameter: Tensor, keeper: Any) -> None:
    """Remember the `FSDPParam` of a weight in shards, so that `gathered` can find the whole weight."""
    _KEEPERS[parameter] = weakref.ref(keeper)


def gathered(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters with which layers compute, and which therefore get per-sample notes and ordinary gradients.

    For a weight in shards this is the gathered weight: the same object in every pass, even while its memory is freed.

    Raises:
        ValueError: If a weight was not sharded by `DopplerTrainer`.
    """
    in_shards = {name: parameter for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    if not all(parameter in _KEEPERS for parameter in in_shards.values()):
        # Sensitivity: if some rows were taken for the whole weight, the norm would be too small.
        raise Refusal(
            "foreign-shards",
            "The model was already sharded before DopplerTrainer got it, so per-sample gradients cannot be computed. Give "
            "the trainer the whole model, and set fsdp=True.",
        )
    return {**parameters} | {name: _KEEPERS[parameter]()._unsharded_param for name, parameter in in_shards.items()}


def first_row(tensor: Tensor) -> int:
    """Return the index of this process's first row: 0 for a whole tensor, and its length if this process has no rows."""
    if not isinstance(tensor, DTensor):
        return 0
    rows = -(-len(tensor) // tensor.device_mesh.size())
    return min(rows * tensor.device_mesh.get_local_rank(), len(tensor))


def part_here(tensor: Tensor) -> Tensor:
    """Return a whole tensor itself, or the rows of a tensor in shards on this process, detached."""
    return parts_here([tensor])[0]


def parts_here(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return whole tensors themselves, and for tensors in shards the rows on this process, detached."""
    return [tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def in_shards(part: Tensor, *, like: Tensor) -> Tensor:
    """Return this process's rows as a tensor that is sharded like `like`, or unchanged if `like` is whole."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def whole_of(part: Tensor, *, like: Tensor) -> Tensor:
    """Return the whole tensor from every process's rows, which are sharded like `like`; all processes must call it."""
    found = in_shards(part, like=like)
    return found.full_tensor() if isinstance(found, DTensor) else found


def rows_here(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return a view of this process's rows of a whole tensor, if it were sharded like `like`."""
    return whole[first_row(like) :][: len(part_here(like))] if isinstance(like, DTensor) else whole


def added_up(own: Tensor, *, like: DTensor) -> Tensor:
    """Return this process's rows of the sum of every process's whole tensor (reduce-scatter); all processes must call it."""
    of_all = DTensor.from_local(own, like.device_mesh, [Partial()])
    return of_all.redistribute(placements=like.placements).to_local()
