"""What the optimizers here share in keeping their state: its precision, and how a checkpoint gets into it.

`torch.optim.Optimizer.load_state_dict` casts floating-point state to the dtype of its parameter. For a bfloat16 parameter
that would round the float32 state to 8 bits, so state is copied from the checkpoint here, uncast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def dense(grad: Tensor) -> Tensor:
    """Returns a gradient that is dense.

    Raises:
        ValueError: If it is not.
    """
    if grad.layout != torch.strided:
        raise ValueError(
            f"a gradient has layout {grad.layout}, but privacy noise is dense: build the embedding with sparse=False"
        )
    return grad


def full_dtype(p: Tensor) -> torch.dtype:
    """Returns the parameter's dtype, or float32 for one of half precision."""
    return torch.float32 if p.itemsize < 4 else p.dtype


def copied_state(state: dict[str, Any], *, device: torch.device, dtype_of: Callable[[str], torch.dtype]) -> dict[str, Any]:
    """Returns a copy of one parameter's state on a device.

    Args:
        state: Numbers, tensors, and lists of them, by name.
        device: Where to.
        dtype_of: The dtype of the tensors of this name.
    """

    def copied(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [copied(name, item) for item in value]
        return value.to(device, dtype_of(name), copy=True) if isinstance(value, Tensor) else value

    return {name: copied(name, value) for name, value in state.items()}
