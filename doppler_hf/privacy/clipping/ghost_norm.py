"""The norm of Σ_t l_t r_tᵀ from its factors, raised by a bound on all rounding, without the matrix.

With the factors as rows of l and r, of shapes (time, p) and (time, q), g = lᵀr. The shorter factor is replaced by a basis A
with AAᵀ = rrᵀ, of at most `time` columns, and the norm is that of the matrix lᵀA, which is formed piece by piece:

    ‖lᵀr‖² = Σ_st ⟨l_s, l_t⟩⟨r_s, r_t⟩ = tr(lᵀ rrᵀ l) = ‖lᵀA‖²                      S = Σ_t ‖l_t‖‖r_t‖

The middle is the *ghost norm* (Li et al. 2022, https://arxiv.org/abs/2110.05679). It takes as many multiply-adds, but its
terms cancel: it knows ‖g‖ up to k·u·S²/‖g‖, where k counts the roundings of a term, p or q of them for inner products of
such vectors. A sum of squares does not cancel, and lᵀA adds up along time alone, so that k·u·S is what is left. For
unrelated tokens S is √time·‖g‖, and the bound does not grow with the vocabulary.

All bounds follow from one: a sum in which each term is rounded k times, in whatever order, is off by at most
γ_k = ku/(1 − ku) times the sum of the terms' sizes, u = eps/2, and γ_j + γ_k + γ_jγ_k ≤ γ_{j+k} (Higham 2002, §3.1; sums in
blocks, §4.2). Products and sums below the smallest normal number τ may vanish, at most 2τ for each.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import in_float32

# Products of matrices add up so many terms in one go, so that their rounding is bounded by that of a block.
BLOCK = 128
# Columns of lᵀ in one piece of lᵀA, which stays in the cache; norms of that many numbers are taken in their own precision.
TILE = 1024
# A square may be raised by so much for products that were too small for its dtype: by this share, and by its square.
UNDERFLOW = 1e-9


class Basis(NamedTuple):
    """The rows A of a factor in fewer dimensions, with AAᵀ − rrᵀ positive semidefinite, and small.

    Attributes:
        rows: A, shape (batch, time, m).
        is_triangular: Whether A is 0 above its diagonal.
        norms: Bounds on the norms of rows of A and of r, shape (batch, time), in float64.
        lost: What their squares were raised by, because products may have vanished.
    """

    rows: Float[Tensor, "batch time m"]
    is_triangular: bool
    norms: Float[Tensor, "batch time"]
    lost: float


class Bases:
    """Remembers the last three bases, because query, key and value read the same input."""

    def __init__(self) -> None:
        self._last: list[tuple[Tensor, Basis]] = []

    def of(self, factor: Float[Tensor, "batch time dim"]) -> Basis:
        """Return `basis_of` the factor."""
        for known, basis in self._last:
            if same_memory(known, factor):
                return basis
        basis = basis_of(factor)
        # The factor is kept with it, so that no other tensor can be allocated at its address.
        self._last = [*self._last[-2:], (factor, basis)]
        return basis


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (first.data_ptr(), first.shape, first.stride(), first.dtype) == (
        second.data_ptr(), second.shape, second.stride(), second.dtype,
    )  # fmt: skip


def basis_of(factor: Float[Tensor, "batch time dim"]) -> Basis:
    """Return a basis of min(time, dim) columns: the factor itself, or a Cholesky factor of its Gram matrix.

    The Gram matrix R is known up to γ_k n_s n_t + 2·dim·τ, n the norms of the rows. With θ = dim·τ/u and d_t² = R_tt + θ as
    computed, n_t² ≤ d_t²/(1 − γ_k) and dim·τ ≤ u·d_s d_t. So R_st/(d_s d_t) is known up to e = ku/(1 − 2ku) + 2u, and what
    should be on its diagonal is at most 1 + e. The Cholesky factor Â of a matrix with 1 + ε there, in float64, has ÂÂᵀ within
    γ_{time+1}(1 + ε)/(1 − γ_{time+1}) of it in every entry (Higham 2002, theorems 10.3 and 10.7). A matrix of such errors is
    at most `time` times the largest as a quadratic form, so that with ε = time·(e + 2(time + 4)·2⁻⁵³) the factor exists, and
    ÂÂᵀ is above the true matrix. Then ‖lᵀA‖ is above ‖lᵀr‖, by half of ε·Σ_t‖l_t‖²d_t²/‖g‖² of it: with ‖g‖² = Σ_t‖l_t‖²‖r_t‖²,
    as of unrelated tokens, by 5e-4 for a block of them in float32. For more R is computed in float64.

    Args:
        factor: Row i depends on example i alone.
    """
    _, time, dim = factor.shape
    factor = in_float32(factor)
    if dim <= time:
        return Basis(factor, False, norms_of(factor), vanished(dim, factor.dtype) ** 2)
    gram, info = gram_matrix(factor)
    k = roundings(dim) if info.eps > torch.finfo(torch.float64).eps else dim
    u, of_float64 = info.eps / 2, torch.finfo(torch.float64).eps / 2
    lost = dim * info.smallest_normal / u
    sizes = (gram.diagonal(dim1=1, dim2=2) + lost).sqrt()
    added = time * (k * u / (1 - 2 * k * u) + 2 * u + 2 * (time + 4) * of_float64)
    gram /= sizes.unsqueeze(1) * sizes.unsqueeze(2)
    gram.diagonal(dim1=1, dim2=2).fill_(1 + added)
    # An example that is not finite stays so by its sizes; there must be numbers for the others' sake only.
    triangle = torch.linalg.cholesky_ex(gram.nan_to_num_(0.0, 0.0, 0.0)).L
    norms = sizes * math.sqrt(1 + added) * (1 + 4 * torch.finfo(factor.dtype).eps)
    return Basis((triangle * sizes.unsqueeze(2)).to(factor.dtype), True, norms, lost)


def gram_matrix(factor: Float[Tensor, "batch time dim"]) -> tuple[Float[Tensor, "batch time time"], torch.finfo]:
    """Return ⟨x_s, x_t⟩ of every example in float64, and the precision in which it was computed."""
    if factor.shape[1] > BLOCK:
        factor = factor.double()
        return torch.bmm(factor, factor.mT), torch.finfo(factor.dtype)
    return products(factor, factor.mT).double(), torch.finfo(factor.dtype)


def products(first: Float[Tensor, "batch m dim"], second: Float[Tensor, "batch dim n"]) -> Float[Tensor, "batch m n"]:
    """Return the matrix product of every example; its terms are rounded `roundings(dim)` times at most."""
    # Not `baddbmm`: it may begin with the sum so far, which every product of the block would then round again.
    of_blocks = map(torch.bmm, first.split(BLOCK, dim=2), second.split(BLOCK, dim=1))
    total = next(of_blocks)
    for product in of_blocks:
        total += product
    return total


def roundings(length: int, block: int = BLOCK) -> int:
    """Return how often a term of a sum is rounded at most: in its block, and with each block that is added."""
    return min(length, block) + max(math.ceil(length / block) - 1, 0)


def gamma(k: int, dtype: torch.dtype) -> float:
    """Return γ_k: by how much of its terms' sizes a sum may be off whose terms are rounded k times."""
    ku = k * torch.finfo(dtype).eps / 2
    return ku / (1 - ku)


def norms_of(factor: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time"]:
    """Return bounds on ‖x_t‖ of every example, in float64."""
    dim = factor.shape[2]
    raised = 1 + gamma(dim, factor.dtype)
    return torch.linalg.vector_norm(factor, dim=2).double() * raised + vanished(dim, factor.dtype)


def vanished(count: int, dtype: torch.dtype) -> float:
    """Return what a norm of so many numbers may lack because their squares have vanished."""
    return math.sqrt(2 * torch.finfo(dtype).smallest_normal * count)


def product_norms(
    kept: Float[Tensor, "batch time p"], basis: Basis
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return bounds on ‖lᵀr‖ and on S of every example, shape (batch,), in float64.

    lᵀA is off by at most γ_k·S in the norm, k = roundings(time) and two more for the rounding of A itself, and norms of
    pieces by γ_TILE of themselves. What may have vanished is added too. It matters only if the factors differ by twenty
    orders of magnitude; the result is then infinity.

    Args:
        kept: The longer factor l.
        basis: Of the other one.
    """
    (_, time, p), m, dtype = kept.shape, basis.rows.shape[2], basis.rows.dtype
    columns = max(BLOCK // 4, math.ceil(m / 4))
    squares = basis.norms.new_zeros(len(kept))
    of_kept = torch.zeros_like(basis.norms)
    for tile in map(in_float32, kept.split(TILE, dim=2)):
        of_kept += torch.linalg.vector_norm(tile, dim=2).double().square()
        for column in range(0, m, columns):
            first = column if basis.is_triangular else 0
            piece = products(basis.rows[:, first:, column : column + columns].mT, tile[:, first:])
            squares += torch.linalg.vector_norm(piece, dim=2).double().square().sum(dim=1)
    raised, k = 1 + gamma(TILE, dtype), roundings(time) + 2
    of_kept = of_kept.sqrt() * raised
    sizes = (of_kept * basis.norms).sum(dim=1)
    lost_sizes = vanished(p, dtype) * basis.norms.sum(dim=1) + math.sqrt(basis.lost) * of_kept.sum(dim=1)
    lost = gamma(time + 2, dtype) * lost_sizes + 2 * vanished(p * m, dtype)
    norms = squares.sqrt() * raised + gamma(k, dtype) * sizes + lost
    lost_squares = lost.square() + basis.lost * of_kept.square().sum(dim=1)
    return norms.masked_fill(lost_squares > UNDERFLOW * (norms.square() + UNDERFLOW), math.inf), sizes + lost_sizes
