"""Loading the optimizer's state from a checkpoint without a cast, and refusing the checkpoint of a different optimizer.

`torch.optim.Optimizer.load_state_dict` casts floating-point state to the dtype of its parameter. For a bfloat16 parameter
this would round the float32 state to 8 bits, so the state is copied from the checkpoint here, without a cast.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from doppler_hf.errors import Refusal
from doppler_hf.filters import LowPassFilter
from doppler_hf.optim.update import BASES, Base
from doppler_hf.shards import rows_here


def loaded(saved: dict[str, Any], *, parameter: Tensor, like: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's saved state, with the names, devices and dtypes of a new state, `like`."""

    def copied(value: Any, new: Any) -> Any:
        if isinstance(new, list):
            return [copied(item, new_item) for item, new_item in zip(value, new, strict=True)]
        if not isinstance(new, Tensor):
            return value
        # Checkpoints hold whole tensors, so that a run may continue with a different number of processes.
        value = rows_here(value, like=parameter) if value.shape != new.shape else value
        _refuse_other_sizes([*value.shape], [*new.shape], of="a tensor of shape")
        return value.to(new, copy=True)

    return {name: copied(saved[name], new) for name, new in like.items()}


def filter_name_of(state_dict: Mapping[str, Any]) -> str | None:
    """Return the name of the filter in a `DopplerOptimizer`'s checkpoint; None for the checkpoint of another optimizer."""
    return state_dict["param_groups"][0].get("low_pass_filter")


def refuse_other_optimizer(
    saved: Mapping[str, Any], own: Sequence[dict[str, Any]], *, base: Base, low_pass_filter: LowPassFilter
) -> None:
    """Refuse a checkpoint of another optimizer, or of a `DopplerOptimizer` with another base, filter or parameter groups."""
    for saved_group, group in zip(saved["param_groups"], own, strict=False):
        # The check comes before torch loads anything, because a partly loaded state cannot be undone.
        if "rank" not in saved_group:
            raise Refusal(
                "foreign-optimizer-state",
                "The optimizer state in this checkpoint was not written by DopplerOptimizer, so a private run cannot "
                "continue from it. Resume a checkpoint of a private run, or load the weights with from_pretrained and "
                "start a new run.",
            )
        galore = "leave out optim_target_modules" if saved_group["rank"] is None else "optim_args, with optim_target_modules"
        _refuse_other("rank", saved_group["rank"], group["rank"], of_trainer=f" (in training arguments: {galore})")
        was_muon = saved_group.get("orthogonal", False)  # Older checkpoints do not have this option.
        words = f" (in training arguments, {'set' if was_muon else 'leave out'} base_optimizer='muon')"
        _refuse_other("orthogonal", was_muon, group["orthogonal"], of_trainer=words)
    _refuse_other_sizes(*([len(group["params"]) for group in groups] for groups in (saved["param_groups"], own)))
    for state in saved["state"].values():
        _refuse_other(
            "base",
            _base_of(BASES[state["base"]], saved["param_groups"]),
            _base_of(base, own),
            of_trainer=" (in training arguments: base_optimizer)",
        )
        # The order decides. With another order there would be too few states, or states that are never read.
        order = len(state["filter_states"])
        if order != low_pass_filter.order:
            raise Refusal(
                "another-filter",
                f"The checkpoint was saved with a filter of order {order}, but this optimizer's filter {low_pass_filter} "
                f"has order {low_pass_filter.order}. Set low_pass_filter={filter_name_of(saved)!r}.",
            )


def _base_of(base: Base, groups: Sequence[Mapping[str, Any]]) -> Base:
    """Return the base, but "muon" for AdamBC with orthogonalized groups, which version 0.3 wrote and groups may ask for."""
    return "muon" if base == "adam_bc" and any(group.get("orthogonal") for group in groups) else base


def _refuse_other_sizes(saved: Sequence[int], own: Sequence[int], *, of: str = "groups of") -> None:
    """Refuse a checkpoint of a run that trained different parameters, judged by the group sizes or the shape of a tensor."""
    if saved != own:
        raise Refusal(
            "other-parameters-trained",
            f"The checkpoint is of a run that trained different parameters: it has {of} {saved}, and this run has {own}. "
            "Freeze the same parameters as in that run, or start a new run from its weights (from_pretrained).",
        )


def _refuse_other(name: str, saved: object, own: object, *, of_trainer: str = "") -> None:
    if saved != own:
        raise Refusal(
            "another-optimizer-setting",
            f"The checkpoint was saved with {name}={saved!r}, but this optimizer has {name}={own!r}. Set "
            f"{name}={saved!r}{of_trainer}.",
        )
