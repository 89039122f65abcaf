"""GaLore: the state of a matrix in a subspace of rank r (Zhao et al. 2024; DOPPLER, Algorithm 3, "Use GaLore").

    g̃_t = Pᵀ G_t,    X_{t+1} = X_t - lr·scale · P d_t        (G of shape m×n with m ≤ n, P of shape m×r)

and g̃ = G P, X - lr·scale · d Pᵀ for m > n: the shorter side is projected. P has orthonormal columns, so white noise in G is
white in g̃ with the same variance, as DPAdamBC needs. The step whose gradient determines P is an exception: its noise has up
to (1 + √(m/n))² times the variance in the directions of P.

When P is renewed, with Q = P_newᵀ P_old, a state s becomes Q s, and the second moment becomes Σ_j Q_ij² v_j, as for
uncorrelated coordinates. The part of a new direction outside the old subspace, 1 - Σ_j Q_ij², gets the mean of v.
"""

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

# Additional columns of the randomized range finder beyond the rank, as Halko et al. advise (Section 4.2).
OVERSAMPLING: Final = 8


def is_projected(p: Tensor, group: dict[str, Any]) -> bool:
    """Return whether GaLore projects this parameter of a group: a matrix whose shorter side is longer than the rank."""
    return group["rank"] is not None and p.ndim == 2 and min(p.shape) > group["rank"]


def is_wide(matrix: Float[Tensor, "m n"]) -> bool:
    """Return whether the first side is the shorter side, m ≤ n, which is the projected side."""
    return matrix.shape[0] <= matrix.shape[1]


def project(matrix: Float[Tensor, "m n"], basis: Float[Tensor, "short rank"]) -> Float[Tensor, "_ _"]:
    """Return PᵀG, shape (rank, n), for m ≤ n and G·P, shape (m, rank), for m > n, with P in the dtype of G.

    Example:
        >>> project(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[0.0], [1.0]]))
        tensor([[4., 5., 6.]])
    """
    return basis.mT @ matrix if is_wide(matrix) else matrix @ basis


def find_basis(
    matrix: Float[Tensor, "m n"], rank: int, *, previous: Float[Tensor, "short r"] | None = None
) -> Float[Tensor, "short r"]:
    """Return P, shape (shorter side, rank): orthonormal directions of the shorter side that capture much of a matrix.

    With `previous`, this is one step of subspace iteration. Without it, a randomized range finder gives nearly the best
    directions (Halko, Martinsson and Tropp 2011, Algorithms 4.4 and 5.1).
    """
    short = matrix if is_wide(matrix) else matrix.T
    if previous is not None:
        return _orthonormal(short @ (short.T @ previous))
    columns = min(rank + OVERSAMPLING, short.shape[0])
    # The same probes are used each time. They must be independent of the matrix, but not of earlier probes.
    generator = torch.Generator(short.device).manual_seed(0)
    probes = torch.randn(short.shape[1], columns, generator=generator, device=short.device, dtype=short.dtype)
    range_of = _orthonormal(short @ (short.T @ _orthonormal(short @ probes)))
    if columns == rank:
        return range_of
    within = range_of.T @ short
    # `eigh` orders eigenvectors by ascending eigenvalue, so the last ones are taken. The product is made orthonormal again,
    # because it may be rounded (TF32).
    return _orthonormal(range_of @ torch.linalg.eigh(within @ within.T).eigenvectors[:, -rank:])


def _orthonormal(matrix: Float[Tensor, "m r"]) -> Float[Tensor, "m r"]:
    return torch.linalg.qr(matrix).Q


def renew_basis(state: dict[str, Any], grad: Float[Tensor, "m n"], *, rank: int) -> None:
    """Find a new basis for a parameter from its gradient, and rotate its state into that basis (modified in place)."""
    # At first there is no state to rotate, and the old basis is zero, so an iteration from it would stay zero.
    is_first, old, v = state["steps_in_basis"] == 0, state["basis"], state.get("exp_avg_sq")
    state["basis"] = find_basis(grad, rank, previous=None if is_first else old)
    if is_first:
        return
    states, moved_v = rotated(state["filter_states"], v, old=old, new=state["basis"], wide=is_wide(grad))
    state |= {"filter_states": states} | ({} if v is None else {"exp_avg_sq": moved_v})


def add_lifted(
    weight: Float[Tensor, "m n"],
    low_rank: Float[Tensor, "_ _"],
    basis: Float[Tensor, "short r"],
    *,
    scale: float,
    decay: float,
) -> None:
    """Set the weight X to decay·X + scale · P d (or d Pᵀ), with d = `low_rank` (modified in place)."""
    left, right = (basis, low_rank) if is_wide(weight) else (low_rank, basis.mT)
    if weight.dtype == basis.dtype:
        weight.addmm_(left, right, beta=decay, alpha=scale)
    else:
        weight.copy_(torch.addmm(weight.to(basis.dtype), left, right, beta=decay, alpha=scale))


def rotated(
    states: list[Float[Tensor, "_ _"]],
    exp_avg_sq: Float[Tensor, "_ _"] | None,
    *,
    old: Float[Tensor, "short r"],
    new: Float[Tensor, "short r"],
    wide: bool,
) -> tuple[list[Float[Tensor, "_ _"]], Float[Tensor, "_ _"] | None]:
    """Return filter states and second moment in the coordinates of a new basis: in the first dimension if `wide`."""
    change = new.T @ old

    def along_basis(matrix: Float[Tensor, "r r"], state: Float[Tensor, "_ _"]) -> Float[Tensor, "_ _"]:
        return (matrix @ state if wide else state @ matrix.T).to(matrix.dtype)

    moved = [along_basis(change, state.to(change.dtype)).to(state.dtype) for state in states]
    if exp_avg_sq is None:
        return moved, None
    shares = change.square()
    # The difference is clamped, because rounding may make the shares of a direction in the old subspace add up to above 1.
    missing = (1 - shares.sum(dim=1)).clamp_(min=0.0)
    v = exp_avg_sq.to(change.dtype)
    dim = 0 if wide else 1
    fill = missing.unsqueeze(1 - dim) * v.mean(dim=dim, keepdim=True)
    return moved, (along_basis(shares, v) + fill).to(exp_avg_sq.dtype)
