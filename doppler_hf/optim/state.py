"""What the optimizers here share in keeping their state: its precision, and how a checkpoint gets into it.

`torch.optim.Optimizer.load_state_dict` casts floating-point state to the dtype of its parameter. For a bfloat16 parameter
that would round the float32 state to 8 bits, so state is copied from the checkpoint here, uncast.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from doppler_hf.optim.galore import PROJECTOR_SOURCES, ProjectorSource

Base = Literal["sgd", "adam", "adam_bc"]
BASES: Final[tuple[Base, ...]] = get_args(Base)


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


def refuse_other_group(saved_group: dict[str, Any], group: dict[str, Any]) -> None:
    """Raises if a parameter group of a checkpoint is not one of a `DopplerOptimizer` with this rank and kind of filter.

    Raises:
        ValueError: With the mend.
    """
    if "rank" not in saved_group:
        raise ValueError(
            f"a group of the checkpoint has the options {sorted(saved_group)} and was not written by DopplerOptimizer: load "
            "one that was, or start afresh"
        )
    if saved_group["rank"] != group["rank"]:
        raise ValueError(
            f"the checkpoint is of rank {saved_group['rank']}, this optimizer of rank {group['rank']}: set "
            f"rank={saved_group['rank']}"
        )
    saved_taps, taps = (len(some["taps"]) if "taps" in some else None for some in (saved_group, group))
    if saved_taps != taps:
        of = "fixed coefficients" if saved_taps is None else f"{saved_taps} taps that the run finds"
        here = "fixed ones" if taps is None else f"{taps} taps that the run finds"
        raise ValueError(
            f"the checkpoint is of a filter with {of}, this optimizer's has {here}: set the low_pass_filter of the "
            "checkpoint's run"
        )


def refuse_other_state(
    saved: dict[str, Any], *, base: Base, order: int, filter_name: str, projector_source: ProjectorSource
) -> None:
    """Raises if a parameter's state in a checkpoint is not that of a `DopplerOptimizer` of this kind.

    Raises:
        ValueError: With the mend.
    """
    if not {"base", "filter_states", "bias_states"} <= saved.keys():
        raise ValueError(
            f"the checkpoint holds {sorted(saved)} for a parameter and was not written by DopplerOptimizer: load one that "
            "was, or start afresh"
        )
    saved_base, saved_order = BASES[saved["base"]], len(saved["filter_states"])
    if saved_base != base:
        raise ValueError(f"the checkpoint is of base {saved_base!r}, this optimizer of {base!r}: set base={saved_base!r}")
    if "projector_source" in saved and PROJECTOR_SOURCES[saved["projector_source"]] != projector_source:
        other = PROJECTOR_SOURCES[saved["projector_source"]]
        raise ValueError(
            f"the checkpoint is of projector_source {other!r}, this optimizer of {projector_source!r}: set "
            f"projector_source={other!r}"
        )
    if saved_order != order:
        raise ValueError(
            f"the checkpoint is of a filter of order {saved_order}, this optimizer's {filter_name} is of order {order}: set "
            "the low_pass_filter of the checkpoint's run"
        )
