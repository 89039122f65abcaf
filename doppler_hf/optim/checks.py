"""What `DopplerOptimizer` accepts: ranges, choices, and combinations that would be without effect."""

import math
from typing import Any, Final

import torch

from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.galore import BASIS_CHANGES, PROJECTOR_SOURCES, PROJECTORS, has_projected
from doppler_hf.optim.low_pass import FixedFilter
from doppler_hf.optim.state import BASES

RANK_WITHOUT_EFFECT: Final = "rank must be below the shorter side of some matrix, got {}, and no parameter is one. Lower it."
GROUP_OPTIONS: Final = ("lr", "weight_decay", "rank", "update_proj_gap", "scale")


def check_constants(
    *,
    low_pass_filter: FixedFilter | OptimalFIR,
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
    """Refuse what is outside its range or without effect.

    Raises:
        ValueError: If there is any; with the value and the mend.
    """
    for name, value, choices in (
        ("base", base, BASES),
        ("basis_change", basis_change, BASIS_CHANGES),
        ("projector", projector, PROJECTORS),
        ("projector_source", projector_source, PROJECTOR_SOURCES),
        ("state_dtype", state_dtype, (None, torch.float32, torch.bfloat16)),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}.")
    if not 0 <= beta2 < 1:
        raise ValueError(f"beta2 must lie in [0, 1), got {beta2}.")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be a finite number > 0, got {eps}.")
    if not 0 <= noise_std < math.inf:
        raise ValueError(f"noise_std must be a finite number ≥ 0, got {noise_std}.")
    if compiled and not low_pass_filter.is_fixed:
        raise ValueError(f"compiled must not be True for {low_pass_filter}, whose taps change, got True. Leave it out.")
    if floor is not None and base != "adam_bc":
        raise ValueError(
            f"floor must be None for base {base!r}, which has none, got {floor}. Leave it out or set base='adam_bc'."
        )
    if floor is not None and not 0 < floor < math.inf:
        raise ValueError(f"floor must be a finite number > 0, got {floor}. Leave it out to follow noise_std.")


def check_group(
    group: dict[str, Any], *, own: set[str], low_pass_filter: FixedFilter | OptimalFIR, state_dtype: torch.dtype | None
) -> None:
    """Refuse a parameter group with options outside their range, or without effect.

    Raises:
        ValueError: If there is any; with the value and the mend.
    """
    for name in ("lr", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name} must be a finite number ≥ 0, got {group[name]}.")
    rank = group["rank"]
    if rank is not None and not (isinstance(rank, int) and rank >= 1):
        raise ValueError(f"rank must be a whole number of at least 1, got {rank}. Leave it out for no projection.")
    if rank is not None and not low_pass_filter.is_fixed:
        raise ValueError(
            f"rank must be None for {low_pass_filter}, which compares gradients of different steps, some of them in another "
            f"basis, got {rank}. Leave it out, or take a fixed filter."
        )
    if not (isinstance(group["update_proj_gap"], int) and group["update_proj_gap"] >= 1):
        raise ValueError(f"update_proj_gap must be a whole number of at least 1, got {group['update_proj_gap']}.")
    if not 0 < group["scale"] < math.inf:
        raise ValueError(f"scale must be a finite number > 0, got {group['scale']}.")
    # A scheduler that was there before the group has put its own mark on the others.
    for name in sorted(own - {*GROUP_OPTIONS, "params", "param_names", "initial_lr"}):
        raise ValueError(f"A group has {name}={group[name]!r}, which has no effect here. Leave it out.")
    if "rank" in own and rank is not None and not has_projected(group):
        raise ValueError(RANK_WITHOUT_EFFECT.format(rank))
    if state_dtype is not None and any(p.dtype == torch.float64 for p in group["params"]):
        raise ValueError(f"state_dtype must be None for a parameter of torch.float64, got {state_dtype}. Leave it out.")
