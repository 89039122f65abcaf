"""Save sharded weights and optimizer states as whole tensors on process 0, and load them as rows on each process."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from doppler_hf.privacy.losses import without_adapters
from doppler_hf.shards import in_shards, rows_here, whole_of


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state to save of a sharded model, on process 0; from a base under adapters, only its embeddings."""
    base = without_adapters(model)
    embeddings: set[str] = set()
    if base is not model:
        embeddings = {name for name, module in model.named_modules() if module in embeddings_of(base)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Tensor] = {}
    gathered: dict[Tensor, Tensor] = {}  # a weight with two names stays one tensor in the saved state
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            parameter = parameters[name]
            if base is not model and not parameter.requires_grad and name.rpartition(".")[0] not in embeddings:
                continue
            if parameter not in gathered:
                gathered[parameter] = on_cpu_of_process_0(value.full_tensor())
            state[name] = gathered[parameter]
        else:
            state[name] = on_cpu_of_process_0(value)
    return state


def on_cpu_of_process_0(value: Tensor) -> Tensor:
    """Return a tensor in CPU memory on process 0, and an empty tensor on the other processes."""
    return value.cpu() if dist.get_rank() == 0 else value.new_empty(0)


@contextlib.contextmanager
def with_whole_states(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make the states of an optimizer whole in the block in which process 0 saves them; every process must call this."""
    own = optimizer.state
    whole: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for parameter, state in own.items():
        whole[parameter] = {name: whole_state_of(value, parameter) for name, value in state.items()}
    optimizer.state = whole
    try:
        yield
    finally:
        optimizer.state = own


def whole_state_of(value: Any, parameter: Tensor) -> Any:
    """Return a parameter's optimizer state with whole tensors, on process 0; every process must call this."""
    if isinstance(value, list):
        return [whole_state_of(each, parameter) for each in value]
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    return on_cpu_of_process_0(whole_of(value, like=parameter))


def shard_loaded_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole weights in a loaded state by this process's part of them (modified in place)."""
    for name, own in module.state_dict().items():
        value = state_dict.get(prefix + name)
        if isinstance(own, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            state_dict[prefix + name] = in_shards(rows_here(value.to(own.device), like=own), like=own)


def embeddings_of(base: nn.Module) -> list[nn.Module]:
    """Return the input and output embeddings of a model, if it has them."""
    if not isinstance(base, PreTrainedModel):
        return []
    return [module for module in (base.get_input_embeddings(), base.get_output_embeddings()) if module is not None]
