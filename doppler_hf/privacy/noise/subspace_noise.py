"""Noise for a gradient that is read in a subspace only: checks of the bases, and projection there and back.

An optimizer that reads a matrix's gradient in a subspace only (GaLore, P with orthonormal columns) needs no more noise
than the subspace has coordinates. With S the clipped sum and Z the noise, on the side where P multiplies from the left,

    Pᵀ(S + Z) = PᵀS + PᵀZ,    columns of PᵀZ ~ 𝒩(0, σ²C²·PᵀP) = 𝒩(0, σ²C²·I), independent,

so noise drawn for PᵀS alone, r × n instead of m × n, gives the optimizer a gradient of the same distribution.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import highest_matmul_precision, lift, project

# A basis computed in float32 has e = ‖PᵀP − I‖_F of about 1e-5. One computed in TF32 or stored in bfloat16 can exceed this
# bound, and would need more noise.
MAX_ORTHONORMALITY_ERROR: Final = 1e-3


def bases_of(
    subspaces: Mapping[str, Float[Tensor, "..."]], sums: Mapping[str, Float[Tensor, "..."]]
) -> dict[str, Float[Tensor, "..."]]:
    """Return each P on the device and in the dtype of its sum.

    Raises:
        ValueError: If there is no sum of a name, or shapes do not fit.
    """
    for name, basis in subspaces.items():
        if name not in sums:
            raise ValueError(f"subspaces has {name!r}, of which there is no clipped sum. Leave out frozen parameters.")
        shape, short = tuple(sums[name].shape), min(sums[name].shape, default=0)
        if len(shape) != 2 or basis.ndim != 2 or basis.shape[0] != short or not 1 <= basis.shape[1] <= short:
            raise ValueError(
                f"The subspace of {name!r}, of shape {shape}, has shape {tuple(basis.shape)}. Only matrices have one, and "
                "its shape must be (the shorter side, rank) with 1 ≤ rank ≤ the shorter side."
            )
    return {name: basis.to(sums[name]) for name, basis in subspaces.items()}


def stretches_of(bases: Mapping[str, Float[Tensor, "..."]], *, distributed: bool) -> dict[str, float]:
    """Return the most by which each P can lengthen a vector: √(1 + e) ≥ ‖P‖₂ with e = ‖PᵀP − I‖_F.

    Args:
        bases: P by parameter name, in the dtype in which it will be multiplied: rounding it to another dtype changes e.
        distributed: Whether other processes multiply with the same bases.

    Raises:
        ValueError: If an e is above `MAX_ORTHONORMALITY_ERROR`, or not a number.
    """
    if not bases:
        return {}
    errors = torch.stack([orthonormality_error(basis) for basis in bases.values()])
    if distributed:
        # The noise of each process must suffice for all, and no process may stop while the others wait for its sums.
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    by_name = dict(zip(bases, errors.tolist(), strict=True))  # one synchronization with the device for all of them
    for name, error in by_name.items():
        if error > MAX_ORTHONORMALITY_ERROR:
            raise ValueError(
                f"The subspace of {name!r} is not orthonormal: ‖PᵀP − I‖_F is {error:.3g}, more than "
                f"{MAX_ORTHONORMALITY_ERROR}. Take P from a QR or a singular value decomposition."
            )
    return {name: math.sqrt(1.0 + error) for name, error in by_name.items()}


def orthonormality_error(basis: Float[Tensor, "short rank"]) -> Float[Tensor, ""]:
    """Return ‖PᵀP − I‖_F in float64, ∞ where it is not a number."""
    gram = basis.double().mT @ basis.double()
    gram.diagonal().sub_(1.0)
    return torch.nan_to_num(torch.linalg.matrix_norm(gram), nan=math.inf, posinf=math.inf)


def projected(total: Float[Tensor, "m n"], basis: Float[Tensor, "short rank"]) -> Float[Tensor, "..."]:
    """Return S in the subspace of P, as `linalg.project`, in full precision."""
    # Outside of autocast and TF32, which would round P and S to fewer digits than the bound on ‖P‖₂ assumes.
    with torch.autocast(total.device.type, enabled=False), highest_matmul_precision():
        return project(total, basis)


def lift_into(total: Float[Tensor, "m n"], low_rank: Float[Tensor, "..."], basis: Float[Tensor, "short rank"]) -> None:
    """Overwrite a sum by what is in the subspace of P, as `linalg.lift`, in full precision (modified in place)."""
    with torch.autocast(total.device.type, enabled=False), highest_matmul_precision():
        lift(low_rank, basis, out=total)
