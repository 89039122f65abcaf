"""What `DopplerOptimizer` accepts: ranges, choices, and combinations that would be without effect."""

import math
from typing import Any, Final

import torch

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.galore import BASIS_CHANGES, PROJECTOR_SOURCES, PROJECTORS, has_projected
from doppler_hf.optim.state import BASES

RANK_WITHOUT_EFFECT: Final = "rank is {}, but no parameter is a matrix with a shorter side above it: lower the rank"
GROUP_OPTIONS: Final = ("lr", "weight_decay", "rank", "update_proj_gap", "scale")


def check_constants(
    *,
    low_pass_filter: LowPassFilter | OptimalFIR,
    base: str,
    beta2: float,
    eps: float,
    floor: float | None,
    noise_std: float,
    basis_change: str,
    projector: str,
    projector_source: str,
    state_dtype: torch.dtype | None,
    compiled: bool | None,
) -> None:
    """Refuses what is outside its range or without effect.

    Raises:
        ValueError: With the value and the mend.
    """
    for name, value, choices in (
        ("base", base, BASES),
        ("basis_change", basis_change, BASIS_CHANGES),
        ("projector", projector, PROJECTORS),
        ("projector_source", projector_source, PROJECTOR_SOURCES),
    ):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
    if not 0 <= beta2 < 1:
        raise ValueError(f"beta2 is {beta2}: give a decay in [0, 1)")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps}: give a positive number")
    if not 0 <= noise_std < math.inf:
        raise ValueError(f"noise_std is {noise_std}: give a finite number of at least 0")
    if state_dtype not in (None, torch.bfloat16, torch.float32):
        raise ValueError(f"state_dtype is {state_dtype}: choose torch.float32 or torch.bfloat16, or leave it out")
    if compiled and isinstance(low_pass_filter, OptimalFIR):
        raise ValueError(f"compiled is True, but {low_pass_filter} has taps that change and is not compiled: leave it out")
    if floor is None:
        return
    if base != "adam_bc":
        raise ValueError(f"floor is {floor}, but base {base!r} has none: leave it out or set base='adam_bc'")
    if not 0 < floor < math.inf:
        raise ValueError(f"floor is {floor}: give a positive number, or leave it out to follow noise_std")


def check_group(
    group: dict[str, Any], *, own: set[str], low_pass_filter: LowPassFilter | OptimalFIR, state_dtype: torch.dtype | None
) -> None:
    """Refuses a parameter group with options outside their range, or without effect.

    Args:
        group: The group, with the optimizer's defaults in it; ``params`` a list.
        own: Which options it has of its own.
        low_pass_filter: The optimizer's filter.
        state_dtype: The optimizer's.

    Raises:
        ValueError: With the value and the mend.
    """
    for name in ("lr", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name} is {group[name]}: give a finite number of at least 0")
    rank = group["rank"]
    if rank is not None and not (isinstance(rank, int) and rank >= 1):
        raise ValueError(f"rank is {rank}: give a whole number of at least 1, or None for no projection")
    if rank is not None and isinstance(low_pass_filter, OptimalFIR):
        raise ValueError(
            f"rank is {rank}, but {low_pass_filter} compares gradients of different steps, and those before a change of "
            "basis are not in the new one: leave the rank out, or take a fixed filter"
        )
    if not (isinstance(group["update_proj_gap"], int) and group["update_proj_gap"] >= 1):
        raise ValueError(f"update_proj_gap is {group['update_proj_gap']}: give a whole number of at least 1")
    if not 0 < group["scale"] < math.inf:
        raise ValueError(f"scale is {group['scale']}: give a finite number above 0")
    # A scheduler that was there before the group has put its own mark on the others.
    for name in sorted(own - {*GROUP_OPTIONS, "params", "param_names", "initial_lr"}):
        raise ValueError(f"a group has {name}={group[name]!r}, which has no effect here: leave it out")
    if "rank" in own and rank is not None and not has_projected(group):
        raise ValueError(RANK_WITHOUT_EFFECT.format(rank))
    if state_dtype is not None and any(p.dtype == torch.float64 for p in group["params"]):
        raise ValueError(f"state_dtype is {state_dtype}, but a parameter is of torch.float64: leave it out")
