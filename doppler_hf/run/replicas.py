"""The same weights on every process, which each moves by itself from the same private gradient."""

import itertools
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from doppler_hf.run.parameters import look_again_at_what_is_trained, parameters_digest

# The digest takes a thousandth of a step or less, and waits for all.
COMPARED_EVERY: Final = 100


def give_all_the_weights_of_process_0(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Give every process the weights and buffers of process 0, as DDP would, but for what is in shards (in place).

    Args:
        model: The model.
        group: Of all processes, one that can send what is on the model's device; by default the one that was set up.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.data, src=0, group=group)


def refuse_different_replicas(model: nn.Module, *, step: int) -> None:
    """Refuse to go on with processes whose weights are not the same bits, called by all of them.

    Raises:
        RuntimeError: If there are others than on process 0, on every process.
    """
    look_again_at_what_is_trained(model)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, parameters_digest(model))
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        # Privacy: what each released is noised, but the gradients of some were computed at weights that are saved nowhere.
        raise RuntimeError(
            f"The weights must be the same on all processes, got others on process {', '.join(others)} than on process 0 "
            f"after step {step}: something changes them on one process alone, such as a callback, or a processor that "
            "computes otherwise. Let all do the same, and go on from a checkpoint before that with resume_from_checkpoint."
        )
