"""The arguments that `DopplerOptimizer` accepts: ranges, choices, and combinations that have an effect."""

import math
from typing import TYPE_CHECKING, Any, Final

from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.galore import BASIS_CHANGES, PROJECTOR_SOURCES, PROJECTORS, has_projected
from doppler_hf.optim.state import BASES

if TYPE_CHECKING:
    from doppler_hf.optim.optimizer import DopplerOptimizer

RANK_WITHOUT_EFFECT: Final = "rank must be below the shorter side of some matrix, got {} and no such matrix. Lower it."
GROUP_OPTIONS: Final = ("lr", "weight_decay", "rank", "update_proj_gap", "scale")


def check_constants(optimizer: "DopplerOptimizer", *, floor: float | None) -> None:
    """Refuse constants of the optimizer, or a given floor, that are out of range or without effect."""
    for name, choices in (
        ("base", BASES),
        ("basis_change", BASIS_CHANGES),
        ("projector", PROJECTORS),
        ("projector_source", PROJECTOR_SOURCES),
    ):
        value = getattr(optimizer, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}.")
    if not 0 <= optimizer.beta2 < 1:
        raise ValueError(f"beta2 must lie in [0, 1), got {optimizer.beta2}.")
    _check_finite("eps", optimizer.eps, above_0=True)
    _check_finite("noise_std", optimizer.noise_std)
    if floor is not None and optimizer.base != "adam_bc":
        raise ValueError(f"floor must be None for base {optimizer.base!r}, which has none, got {floor}. Leave it out.")
    if floor is not None:
        _check_finite("floor", floor, above_0=True)


def check_group(optimizer: "DopplerOptimizer", group: dict[str, Any], *, own: set[str]) -> None:
    """Refuse a parameter group with options out of range or without effect; `own` are the options given to it."""
    for name in ("lr", "weight_decay", "scale"):
        _check_finite(name, group[name], above_0=name == "scale")
    rank = group["rank"]
    if rank is not None and not (isinstance(rank, int) and rank >= 1):
        raise ValueError(f"rank must be a whole number of at least 1, got {rank}. Leave it out for no projection.")
    if not (isinstance(group["update_proj_gap"], int) and group["update_proj_gap"] >= 1):
        raise ValueError(f"update_proj_gap must be a whole number of at least 1, got {group['update_proj_gap']}.")
    if rank is not None and isinstance(optimizer.low_pass_filter, OptimalFIR):
        raise ValueError(
            f"rank must be None for {optimizer.low_pass_filter}, which compares gradients of different steps, got {rank}. "
            "Leave it out, or take a fixed filter."
        )
    # A scheduler that was there before the group has put its own mark on the others.
    for name in sorted(own - {*GROUP_OPTIONS, "params", "param_names", "initial_lr"}):
        raise ValueError(f"A group has {name}={group[name]!r}, which has no effect here. Leave it out.")
    if "rank" in own and rank is not None and not has_projected(group):
        raise ValueError(RANK_WITHOUT_EFFECT.format(rank))


def _check_finite(name: str, value: float, *, above_0: bool = False) -> None:
    if not (value > 0 if above_0 else value >= 0) or value == math.inf:
        raise ValueError(f"{name} must be a finite number {'> 0' if above_0 else '≥ 0'}, got {value}.")
