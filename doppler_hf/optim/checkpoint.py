"""Loading the optimizer's state from a checkpoint, uncast, and refusing one of another optimizer.

`torch.optim.Optimizer.load_state_dict` casts floating-point state to the dtype of its parameter. For a bfloat16 parameter
that would round the float32 state to 8 bits, so state is copied from the checkpoint here, uncast.
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
        # Checkpoints hold whole tensors, so that a run may go on with another number of processes.
        value = rows_here(value, like=parameter) if value.shape != new.shape else value
        refuse_other_parameters([*value.shape], [*new.shape], of="a tensor of shape")
        return value.to(new, copy=True)

    return {name: copied(saved[name], new) for name, new in like.items()}


def filter_name_of(state_dict: Mapping[str, Any]) -> str | None:
    """Return the name of the filter of a `DopplerOptimizer`'s checkpoint; None of another optimizer's."""
    return state_dict["param_groups"][0].get("low_pass_filter")


def refuse_other_optimizer(
    saved: Mapping[str, Any], own: Sequence[dict[str, Any]], *, base: Base, low_pass_filter: LowPassFilter
) -> None:
    """Refuse a checkpoint that is not of a `DopplerOptimizer` of this base and filter, with these parameter groups."""
    for saved_group, group in zip(saved["param_groups"], own, strict=False):
        # Before torch loads anything: what it has loaded of another optimizer cannot be taken back.
        if "rank" not in saved_group:
            raise Refusal(
                "foreign-optimizer-state",
                f"The options {sorted(saved_group)} were not written by DopplerOptimizer. Load another checkpoint.",
            )
        _refuse_other("rank", saved_group["rank"], group["rank"])
        was_muon = saved_group.get("orthogonal", False)  # older checkpoints do not name it
        words = f", in a trainer's arguments {'set' if was_muon else 'leave out'} base_optimizer='muon'"
        _refuse_other("orthogonal", was_muon, group["orthogonal"], of_trainer=words)
    refuse_other_parameters(*([len(group["params"]) for group in groups] for groups in (saved["param_groups"], own)))
    for state in saved["state"].values():
        _refuse_other(
            "base",
            _base_of(BASES[state["base"]], saved["param_groups"]),
            _base_of(base, own),
            of_trainer=", in a trainer's arguments base_optimizer",
        )
        # By the order, without which there would be too few states, or some that nothing reads.
        order = len(state["filter_states"])
        if order != low_pass_filter.order:
            raise Refusal(
                "another-filter",
                f"The checkpoint is of a filter of order {order}, this optimizer's {low_pass_filter} is of order "
                f"{low_pass_filter.order}. Set low_pass_filter={filter_name_of(saved)!r}.",
            )


def _base_of(base: Base, groups: Sequence[Mapping[str, Any]]) -> Base:
    """Return "muon" for AdamBC with orthogonalized groups too, as version 0.3 wrote and as groups may still ask for."""
    return "muon" if base == "adam_bc" and any(group.get("orthogonal") for group in groups) else base


def refuse_other_parameters(saved: Sequence[int], own: Sequence[int], *, of: str = "groups of") -> None:
    """Refuse a checkpoint in which other parameters were trained, by their numbers in each group, or the shape of one."""
    if saved != own:
        raise Refusal(
            "other-parameters-trained",
            f"The checkpoint must be of the parameters that are trained now, got {of} {saved} in place of {own}. Freeze the "
            "same parameters as then, or start a new training from its weights (from_pretrained).",
        )


def _refuse_other(name: str, saved: object, own: object, *, of_trainer: str = "") -> None:
    if saved != own:
        raise Refusal(
            "another-optimizer-setting",
            f"The checkpoint is of {name} {saved!r}, this optimizer of {own!r}. Set {name}={saved!r}{of_trainer}.",
        )
