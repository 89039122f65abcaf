"""Tensors in shards (FSDP2): each process has a run of rows; the last run may be shorter or empty."""

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


class Place(NamedTuple):
    """Where in a whole tensor of `numel` coordinates the rows of this process begin."""

    begin: int
    numel: int


def place_of(tensor: DTensor) -> Place:
    """Return where in it the rows of this process are."""
    rows = -(-len(tensor) // tensor.device_mesh.size())
    begin = min(rows * tensor.device_mesh.get_local_rank(), len(tensor))
    return Place(begin * (tensor.numel() // len(tensor)), tensor.numel())


def part_here(tensor: Tensor) -> Tensor:
    """Return a tensor, or its rows on this process, detached."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


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
    """Return this process's rows of a whole tensor, cut like another one."""
    if not isinstance(like, DTensor):
        return whole
    # Cut by each process for itself, since all have the whole.
    return part_here(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None))
