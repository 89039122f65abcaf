"""How the optimizer keeps its state: its precision, and loading it from a checkpoint.

`torch.optim.Optimizer.load_state_dict` casts floating-point state to the dtype of its parameter. For a bfloat16 parameter
that would round the float32 state to 8 bits, so state is copied from the checkpoint here, uncast.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.optim.galore import PROJECTOR_SOURCES
from doppler_hf.shards import rows_here

if TYPE_CHECKING:
    from doppler_hf.optim.optimizer import DopplerOptimizer

Base = Literal["sgd", "adam", "adam_bc"]
BASES: Final[tuple[Base, ...]] = get_args(Base)


def dense(grad: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the gradient itself, and refuse a sparse one."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"A gradient must be dense, as the noise in it is, got {grad.layout}. Build the embedding with sparse=False."
        )
    return grad


def full_dtype(p: Tensor) -> torch.dtype:
    """Return the parameter's dtype, or float32 for one of half precision."""
    return torch.float32 if p.itemsize < 4 else p.dtype


def loaded(saved: dict[str, Any], *, parameter: Tensor, like: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's saved state, with the names, devices and dtypes of a new state, `like`."""

    def copied(value: Any, new: Any) -> Any:
        if isinstance(new, list):
            return [copied(item, new_item) for item, new_item in zip(value, new, strict=True)]
        if not isinstance(new, Tensor):
            return value
        value = rows_here(value, like=parameter) if value.shape != new.shape else value
        refuse_other_parameters([*value.shape], [*new.shape], of="a tensor of shape")
        return value.to(new, copy=True)

    return {name: copied(saved[name], new) for name, new in like.items()}


def filter_name_of(state_dict: Mapping[str, Any]) -> str | None:
    """Return the name of the fixed filter of a `DopplerOptimizer`'s checkpoint; None where its taps follow gradients."""
    return state_dict["param_groups"][0].get("low_pass_filter")


def refuse_other_group(saved_group: dict[str, Any], group: dict[str, Any]) -> None:
    """Refuse a parameter group of a checkpoint that is not of a `DopplerOptimizer` with this rank and kind of filter."""
    if "rank" not in saved_group:
        raise ValueError(f"The options {sorted(saved_group)} were not written by DopplerOptimizer. Load another checkpoint.")
    _refuse_other("rank", saved_group["rank"], group["rank"])
    saved_taps, taps = (len(some["taps"]) if "taps" in some else None for some in (saved_group, group))
    if saved_taps != taps:
        there, here = ("fixed coefficients" if n is None else f"{n} taps that the run finds" for n in (saved_taps, taps))
        raise ValueError(
            f"The checkpoint's filter has {there}, this optimizer's {here}. Set the checkpoint's low_pass_filter."
        )


def refuse_other_parameters(saved: Sequence[int], own: Sequence[int], *, of: str = "groups of") -> None:
    """Refuse a checkpoint in which other parameters were trained, by their numbers in each group, or the shape of one."""
    if saved != own:
        raise ValueError(
            f"The checkpoint must be of the parameters that are trained now, got {of} {saved} in place of {own}. Freeze the "
            "same parameters as then, or start a new training from its weights (from_pretrained)."
        )


def refuse_other_state(saved: dict[str, Any], optimizer: "DopplerOptimizer", *, saved_filter_name: str | None) -> None:
    """Refuse a parameter's state in a checkpoint that is not of a `DopplerOptimizer` of this kind."""
    _refuse_other("base", BASES[saved["base"]], optimizer.base, of_trainer=", in a trainer's arguments base_optimizer")
    if "projector_source" in saved:
        _refuse_other("projector_source", PROJECTOR_SOURCES[saved["projector_source"]], optimizer.projector_source)
    saved_order, own = len(saved["filter_states"]), optimizer.low_pass_filter
    if saved_order != own.order:
        raise ValueError(
            f"The checkpoint is of a filter of order {saved_order}, this optimizer's {own} is of order {own.order}. Set "
            f"low_pass_filter={saved_filter_name!r}."
        )


def _refuse_other(name: str, saved: object, own: object, *, of_trainer: str = "") -> None:
    if saved != own:
        raise ValueError(
            f"The checkpoint is of {name} {saved!r}, this optimizer of {own!r}. Set {name}={saved!r}{of_trainer}."
        )
