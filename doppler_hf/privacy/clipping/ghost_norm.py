"""The norm of Σ_t l_t r_tᵀ from its factors, with a bound on all rounding, without the matrix.

With the factors as rows of l and r, of shapes (time, p) and (time, q), g = lᵀr, and L = llᵀ, R = rrᵀ their Gram matrices,

    ‖g‖² = Σ_st L_st R_st = tr(lᵀRl) = ‖lᵀA‖²  for any A with AAᵀ = R.

The first is the *ghost norm* (Li et al. 2022, https://arxiv.org/abs/2110.05679). Its terms cancel, so that in float32 it
knows the square only up to the rounding of sums of p and q terms, relative to a number that can be `time` times as large.
How far it may be off is known afterwards: mostly little, for short sequences and layers of ordinary size. For all other
examples R of the shorter factor is computed in float64, A is its Cholesky factor, and lᵀA is formed piece by piece. This
takes as many multiply-adds, and a sum of squares does not cancel: what is left is the rounding of sums over time, however
large the vocabulary. Which of the two it is depends on the shapes and on the example alone. Factors in float64 are those of
examples whose terms cancel: A is r itself, since what a Cholesky factor adds to the norm would follow the padding.

A sum in which each term is rounded k times, in whatever order, is off by at most γ_k = ku/(1 − ku) times the sum of the
terms' sizes, u = eps/2, and γ_j + γ_k + γ_jγ_k ≤ γ_{j+k} (Higham 2002, §3.1; sums in blocks, §4.2). Products and sums below
the smallest normal number τ may vanish, at most 2τ for each product. All bounds below follow from these, and from
S = Σ_t ‖l_t‖‖r_t‖ ≤ ‖l‖‖r‖.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from doppler_hf.linalg import in_float32

# By how much every norm is raised, in units of eps, so that rounding leaves it above the true one: in the same way whatever
# form it is computed in, which depends on what others are padded to. In float32 that is a thousandth.
RAISED_BY = 2**13
# How many terms products of matrices add up in one go.
BLOCK = 128
# The longest sequences and vectors whose Gram matrices are tried in float32, and how far off the square may then be, in
# units of eps: three quarters of RAISED_BY, of the norm.
SHORT = 128
LONGEST = 8192
CERTAIN = 1.5 * RAISED_BY
# The rows and columns of a piece of lᵀA, which stays in the cache.
TILE = 2048
COLUMNS = 64
# A square may be raised by so much for products that were too small for its dtype: by this share, and by its square.
UNDERFLOW = 1e-9


Computed = TypeVar("Computed")


class ProductNorms(NamedTuple):
    """Norms of products, in float64."""

    norms: Float[Tensor, " batch"]  # ‖Σ_t l_t r_tᵀ‖ as computed
    errors: Float[Tensor, " batch"]  # bounds on how far they are below the true ones
    sizes: Float[Tensor, " batch"]  # bounds on S


class Basis(NamedTuple):
    """The rows A of a factor in fewer dimensions, with AAᵀ − rrᵀ positive semidefinite, and small."""

    rows: Float[Tensor, "batch time m"]  # A
    is_triangular: bool  # whether A is 0 above its diagonal
    norms: Float[Tensor, "batch time"]  # bounds on the norms of rows of A and of r, in float64
    lost: float  # what their squares were raised by, because products may have vanished


class Recent:
    """Remembers what was last computed of three factors, because query, key and value read the same input."""

    def __init__(self) -> None:
        self._last: list[tuple[Tensor, Callable[[Tensor], Any], Any]] = []

    def of(self, factor: Float[Tensor, "batch time dim"], compute: Callable[[Tensor], Computed]) -> Computed:
        """Return what a function computes of the factor."""
        for known, function, computed in self._last:
            if function is compute and same_memory(known, factor):
                return computed
        computed = compute(factor)
        # The factor is kept with it, so that no other tensor can be allocated at its address.
        self._last = [*self._last[-2:], (factor, compute, computed)]
        return computed


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (first.data_ptr(), first.shape, first.stride(), first.dtype) == (
        second.data_ptr(), second.shape, second.stride(), second.dtype,
    )  # fmt: skip


def product_norms(left: Float[Tensor, "batch time p"], right: Float[Tensor, "batch time q"], recent: Recent) -> ProductNorms:
    """Return ‖Σ_t l_t r_tᵀ‖ of every example.

    What may have vanished is in the bounds. It matters only if the factors differ by some twenty orders of magnitude; the
    bound is then infinity.
    """
    shorter, longer = (left, right) if left.shape[2] < right.shape[2] else (right, left)
    if shorter.dtype == torch.float64:
        return from_basis(longer, itself(shorter))
    if left.shape[1] > SHORT or longer.shape[2] > LONGEST:
        return from_basis(longer, recent.of(shorter, basis_of))
    grams = recent.of(longer, gram_matrix), recent.of(shorter, gram_matrix)
    found, certain = from_grams(*grams, lengths=(longer.shape[2], shorter.shape[2]))
    if certain.all():
        return found
    again = from_basis(longer[~certain], basis_of(shorter[~certain]))
    return ProductNorms(*(first.masked_scatter(~certain, second) for first, second in zip(found, again, strict=True)))


def from_grams(
    left: Float[Tensor, "batch time time"], right: Float[Tensor, "batch time time"], *, lengths: tuple[int, int]
) -> tuple[ProductNorms, Bool[Tensor, " batch"]]:
    """Return `product_norms` from both Gram matrices, and whether the norm is off by little.

    An entry L_st is off by γ_k‖l_s‖‖l_t‖ + 2pτ, k the roundings of p terms, so L by γ_k‖l‖² + 2pτ·time in Frobenius norm,
    where ‖l‖² ≤ tr L/(1 − γ_k) as computed, but for another 2pτ·time. With such bounds a and b for both matrices

        |Σ_st L_st R_st − ‖g‖²| ≤ (‖L‖ + a)(‖R‖ + b) − ‖L‖‖R‖ + γ_n ‖L‖‖R‖ + 2τ·time²

    by Cauchy and Schwarz; the last two are for adding up its rows in their own precision, n = time. And ‖L‖ ≤ tr L.
    """
    time, info = left.shape[1], torch.finfo(left.dtype)
    diagonals = [gram.diagonal(dim1=1, dim2=2) for gram in (left, right)]
    kept = ((diagonals[0] != 0) & (diagonals[1] != 0)).to(left.dtype)  # others add exactly nothing
    sizes, errors, squared, lost, whole = [], [], [], [], []
    for gram, diagonal, length in zip((left, right), diagonals, lengths, strict=True):
        lost.append(2 * info.smallest_normal * length * time)
        k = gamma(roundings(length), left.dtype)
        squared.append(((diagonal * kept).sum(dim=1, dtype=torch.float64) + lost[-1]) / (1 - k))
        errors.append(k * squared[-1] + lost[-1])
        size = torch.linalg.vector_norm(norms_of(gram * kept.unsqueeze(1)) * kept, dim=1)
        sizes.append(size.minimum(squared[-1] + errors[-1]))  # where squares vanish
        whole.append((diagonal.sum(dim=1, dtype=torch.float64) + lost[-1]) / (1 - k))
    # Of both matrices, the rows in which a diagonal entry has vanished too: a row's norm is then √(2pτ) at most.
    underflow = 2 * info.smallest_normal * time**2 + sum(
        (lost[i] + (lost[i] * whole[i]).sqrt() * time) * whole[1 - i] for i in (0, 1)
    )
    error = sizes[0] * errors[1] + sizes[1] * errors[0] + errors[0] * errors[1] + underflow
    error += gamma(time, left.dtype) * sizes[0] * sizes[1]
    squares = torch.linalg.vecdot(left, right).sum(dim=1, dtype=torch.float64).clamp(min=0.0)
    error = error.masked_fill(underflow > UNDERFLOW * (squares + error + UNDERFLOW), math.inf)
    # What is not finite is computed again in any case, in float64.
    certain = (error <= CERTAIN * info.eps * squares + UNDERFLOW**2) | ~error.isfinite() | ~squares.isfinite()
    norms = squares.sqrt()
    return ProductNorms(norms, (squares + error).sqrt() - norms, (squared[0] * squared[1]).sqrt()), certain


def itself(factor: Float[Tensor, "batch time dim"]) -> Basis:
    """Return the factor as its own basis, which is nothing above it."""
    norms, lost = norms_of(factor), vanished(factor.shape[2], factor.dtype)
    return Basis(factor, False, norms, lost**2)


def basis_of(factor: Float[Tensor, "batch time dim"]) -> Basis:
    """Return a basis of min(time, dim) columns: the factor itself, or a Cholesky factor of its Gram matrix.

    The Gram matrix R is known up to γ_dim n_s n_t + 2·dim·τ, n the norms of the rows, u and τ those of float64. With
    θ = dim·τ/u and d_t² = R_tt + θ as computed, n_t² ≤ d_t²/(1 − γ_dim) and dim·τ ≤ u·d_s d_t. So R_st/(d_s d_t) is known up
    to e = dim·u/(1 − 2·dim·u) + 2u, and what should be on its diagonal is at most 1 + e. The Cholesky factor Â of a matrix
    with 1 + ε there has ÂÂᵀ within γ_{time+1}(1 + ε)/(1 − γ_{time+1}) of it in every entry (Higham 2002, theorems 10.3 and
    10.7). A matrix of such errors is at most `time` times the largest as a quadratic form, so that with
    ε = time·(e + 2(time + 4)u) the factor exists, and ÂÂᵀ is above the true matrix. Then ‖lᵀA‖² is above ‖lᵀr‖², by
    2ε·Σ_t ‖l_t‖²d_t² at most, where ε = 6e-9 for 4,096 tokens and dimensions.
    """
    time, dim = factor.shape[1:]
    factor = in_float32(factor)
    if dim <= time:
        return itself(factor)
    gram, info = lower_gram_matrix(factor.double()), torch.finfo(torch.float64)
    u = info.eps / 2
    lost = dim * info.smallest_normal / u
    sizes = (gram.diagonal(dim1=1, dim2=2) + lost).sqrt()
    added = time * u * (dim / (1 - 2 * dim * u) + 2 * time + 10)
    gram.div_(sizes.unsqueeze(1)).div_(sizes.unsqueeze(2)).diagonal(dim1=1, dim2=2).fill_(1 + added)
    triangle = torch.linalg.cholesky_ex(gram).L  # there is none for an example that is not finite, nor are its sizes
    rows = torch.empty_like(triangle, dtype=factor.dtype)
    torch.mul(triangle, sizes.unsqueeze(2), out=rows)
    norms = sizes * math.sqrt(1 + added) * (1 + 4 * torch.finfo(factor.dtype).eps)
    return Basis(rows, True, norms, lost)


def gram_matrix(factor: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time time"]:
    """Return ⟨x_s, x_t⟩ of every example."""
    factor = in_float32(factor)
    return products(factor, factor.mT)


def lower_gram_matrix(factor: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time time"]:
    """Return ⟨x_s, x_t⟩ of every example for t ≤ s; the rest is partly left out."""
    batch, time, _ = factor.shape
    gram = factor.new_zeros(batch, time, time)
    for end in range(BLOCK, time + BLOCK, BLOCK):
        gram[:, end - BLOCK : end, :end] = torch.bmm(factor[:, end - BLOCK : end], factor[:, :end].mT)
    return gram


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
    return min(length, block) + max(0, -(-(length - block) // block))


def gamma(k: int, dtype: torch.dtype) -> float:
    """Return γ_k: by how much of its terms' sizes a sum may be off whose terms are rounded k times."""
    ku = k * (torch.finfo(dtype).eps / 2)
    return ku / (1 - ku)


def norms_of(factor: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time"]:
    """Return bounds on ‖x_t‖ of every example, in float64."""
    dim = factor.shape[2]
    raised = 1 + gamma(dim, factor.dtype)
    return torch.linalg.vector_norm(factor, dim=2).double() * raised + vanished(dim, factor.dtype)


def vanished(count: int, dtype: torch.dtype) -> float:
    """Return what a norm of so many numbers may lack because their squares have vanished."""
    return math.sqrt(2 * torch.finfo(dtype).smallest_normal * count)


def from_basis(kept: Float[Tensor, "batch time p"], basis: Basis) -> ProductNorms:
    """Return `product_norms` as the norm of lᵀA, off by γ_k·S, k the roundings over time and two more for A itself.

    The norms of pieces' rows are taken in their own precision: their squares are off by γ_TILE of themselves.
    """
    (_, time, p), m, dtype = kept.shape, basis.rows.shape[2], basis.rows.dtype
    squares = basis.norms.new_zeros(len(kept))
    of_kept = torch.zeros_like(basis.norms)
    for tile in map(in_float32, kept.split(TILE, dim=2)):
        of_kept += torch.linalg.vector_norm(tile, dim=2).double().square()
        for column in range(0, m, COLUMNS):
            first = column if basis.is_triangular else 0
            piece = products(basis.rows[:, first:, column : column + COLUMNS].mT, tile[:, first:])
            squares += torch.linalg.vector_norm(piece, dim=2).double().square().sum(dim=1)
    raised, k = 1 + gamma(TILE // 2 + 2, dtype), roundings(time) + 2
    of_kept = of_kept.sqrt() * raised
    sizes = (of_kept * basis.norms).sum(dim=1)
    lost_sizes = vanished(p, dtype) * basis.norms.sum(dim=1) + math.sqrt(basis.lost) * of_kept.sum(dim=1)
    lost = gamma(time + 2, dtype) * lost_sizes + 2 * vanished(p * m, dtype)
    norms = squares.sqrt()
    errors = norms * (raised - 1) + gamma(k, dtype) * sizes + lost
    lost_squares = lost.square() + basis.lost * of_kept.square().sum(dim=1)
    errors = errors.masked_fill(lost_squares > UNDERFLOW * ((norms + errors).square() + UNDERFLOW), math.inf)
    return ProductNorms(norms, errors, sizes + lost_sizes)
