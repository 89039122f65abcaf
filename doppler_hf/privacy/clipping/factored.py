"""One parameter's per-sample gradient in its cheapest form, with its norms and weighted sum for clipping.

    Dense           g_i itself                         values (batch, *shape)
    OuterProducts   g_i = Σ_t l_it r_itᵀ               left (batch, time, p), right (batch, time, q)
    LookedUpRows    g_i = Σ_t e(id_it) v_itᵀ           ids (batch, time), values (batch, time, dim), e(k) a unit vector

Clipping needs ‖g_i‖² and Σ w_i g_i. The last two forms give both without any p×q matrix for each example: the norm from
Gram matrices of time × time, ‖Σ_t l_t r_tᵀ‖² = Σ_st ⟨l_s, l_t⟩⟨r_s, r_t⟩ (the *ghost norm*: Li et al. 2022,
https://arxiv.org/abs/2110.05679), the sum from one matrix product over examples and time (*book-keeping*: Bu et al. 2023,
https://arxiv.org/abs/2210.00038).

Sensitivity: row i of every tensor depends on example i alone, and the norm and the weighted sum are computed from the same
tensors in float32 or better, so that no rounding in a lower precision upstream can make w_i‖g_i‖ exceed the bound. A ghost
norm can lose digits when the outer products nearly cancel, so it is raised by a bound on the rounding. A norm whose squares
leave the range of float32 comes out as infinity, and is computed again `in_float64`, whose range holds all that factors in
float32 can give.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from doppler_hf.linalg import in_float32

NormRule = Literal["auto", "ghost", "direct"]

# The cost of writing one number to memory and reading it twice, in multiply-adds. Fitted on two x86-64 cores; any value
# between 25 and 400 makes the same choices for a RoBERTa of 384 with 64 tokens and for ViT-tiny with 197.
MEMORY_COST = 50
# The memory that a direct per-sample gradient may take, in units of its two factors.
MEMORY_SLACK = 1.0
# Sums of more products are computed in blocks of so many, so that their rounding does not add up: inner products of vectors,
# at 3 % more time than in one go, and of the rows of Gram matrices.
BLOCK = 1024
ROW_BLOCK = 128
# A square may be raised by so much for products that were too small for its dtype: by this share, and by its square.
UNDERFLOW = 1e-9


class PerSampleGradient(ABC):
    """The gradient of each example's loss with respect to one parameter."""

    @abstractmethod
    def squared_norms(self) -> Float[Tensor, " batch"]:
        """Return ‖g_i‖² of every example, shape (batch,), in float64; not finite if the range of the dtype is too small."""

    @abstractmethod
    def each(self, change: Callable[[Tensor], Tensor]) -> "PerSampleGradient":
        """Return the same form, of every tensor's image."""

    def of_examples(self, kept: Bool[Tensor, " batch"]) -> "PerSampleGradient":
        """Return the gradients of the examples that are kept."""
        return self.each(operator.itemgetter(kept))

    def in_float64(self) -> "PerSampleGradient":
        """Return the same gradients, whose norms and sums are computed in float64."""
        return self.each(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)

    @abstractmethod
    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + Σ w_i g_i, of the parameter's shape (modified in place).

        Args:
            total: The sum so far.
            weights: w, shape (batch,).
            beta: 1 to add; 0 to overwrite `total`.
        """


class Dense(PerSampleGradient):
    """Per-sample gradients in full.

    Args:
        values: Shape (batch, *shape of the parameter).
    """

    def __init__(self, values: Float[Tensor, "batch ..."]) -> None:
        self.values = values
        self._squares = sum_of_squares(values)  # at once, while the values are still in the cache

    def squared_norms(self) -> Float[Tensor, " batch"]:
        """Return ‖g_i‖², shape (batch,)."""
        return self._squares

    def each(self, change: Callable[[Tensor], Tensor]) -> "Dense":
        """Return the same form, of the values' image."""
        return Dense(change(self.values))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + Σ w_i g_i (modified in place)."""
        values = in_float32(self.values).reshape(len(self.values), total.numel())
        total.view(-1).addmv_(values.t(), weights.to(values.dtype), beta=beta)


@dataclass(frozen=True, eq=False)
class OuterProducts(PerSampleGradient):
    """The gradient of a matrix that multiplies, kept as its inputs and the gradients of its outputs.

    Args:
        left: Shape (batch, time, p).
        right: Shape (batch, time, q). The parameter has p·q elements, in this order.
        grams: The last Gram matrices, to be used again.
    """

    left: Float[Tensor, "batch time p"]
    right: Float[Tensor, "batch time q"]
    grams: "Grams" = field(default_factory=lambda: Grams())

    def squared_norms(self) -> Float[Tensor, " batch"]:
        """Return Σ_st ⟨l_s, l_t⟩⟨r_s, r_t⟩ of every example, shape (batch,)."""
        lengths = (self.left.shape[2], self.right.shape[2])
        return squared_norm_from_grams(self.grams.of(self.left), self.grams.of(self.right), lengths=lengths)

    def each(self, change: Callable[[Tensor], Tensor]) -> "OuterProducts":
        """Return the same form, of both factors' images."""
        return OuterProducts(change(self.left), change(self.right))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + Σ_i w_i Σ_t l_it r_itᵀ (modified in place)."""
        left, right = in_float32(self.left), in_float32(self.right)
        # Not in place, because other layers of a residual stream share these tensors.
        scale = weights.to(left.dtype)[:, None, None]
        left, right = (left * scale, right) if left.shape[2] <= right.shape[2] else (left, right * scale)
        total.view(left.shape[2], right.shape[2]).addmm_(left.flatten(0, 1).t(), right.flatten(0, 1), beta=beta)

    def densified(self, shape: torch.Size) -> Dense:
        """Return the same gradient with its matrix formed, for a parameter of this shape."""
        return Dense(torch.bmm(in_float32(self.left).mT, in_float32(self.right)).view(len(self.left), *shape))


@dataclass(frozen=True, eq=False)
class LookedUpRows(PerSampleGradient):
    """The gradient of an embedding, kept as the rows that were looked up.

    Args:
        ids: Row of the table, shape (batch, time).
        values: Gradient of the rows looked up, shape (batch, time, dim).
    """

    ids: Int[Tensor, "batch time"]
    values: Float[Tensor, "batch time dim"]

    def squared_norms(self) -> Float[Tensor, " batch"]:
        """Return Σ_st [id_s = id_t]⟨v_s, v_t⟩ of every example, shape (batch,)."""
        same_row = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).to(in_float32(self.values).dtype)
        return squared_norm_from_grams(gram_matrix(self.values), same_row, lengths=(self.values.shape[2], 0))

    def each(self, change: Callable[[Tensor], Tensor]) -> "LookedUpRows":
        """Return the same form, of the images of rows and values."""
        return LookedUpRows(change(self.ids), change(self.values))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total, with w_i v_it added to row id_it (modified in place)."""
        values = in_float32(self.values)
        if beta == 0:
            total.zero_()
        total.index_add_(0, self.ids.flatten(), (values * weights.to(values.dtype)[:, None, None]).flatten(0, 1))

    def densified(self, shape: torch.Size) -> Dense:
        """Return the same gradient as one table per example, for a parameter of this shape."""
        values = in_float32(self.values)
        tables = values.new_zeros(len(values), *shape)
        return Dense(tables.scatter_add_(1, self.ids.unsqueeze(-1).expand_as(values), values))


@dataclass(frozen=True, eq=False)
class Tied(PerSampleGradient):
    """The gradient of a table that is looked up and also multiplies, such as a language model's embedding and head.

    Args:
        products: The part from multiplying; p is the number of rows.
        rows: The part from looking up.
    """

    products: OuterProducts
    rows: LookedUpRows

    def squared_norms(self) -> Float[Tensor, " batch"]:
        """Return ‖products‖² + ‖rows‖² + 2⟨products, rows⟩ of every example, shape (batch,).

        The last is Σ_st l_s[id_t]⟨r_s, v_t⟩: only the looked-up rows of the product contribute to it.
        """
        left, right, values = (in_float32(x) for x in (self.products.left, self.products.right, self.rows.values))
        ids = self.rows.ids.unsqueeze(1).expand(-1, left.shape[1], -1)
        cross = (left.gather(2, ids) * inner_products(right, values)).sum(dim=(1, 2), dtype=torch.float64)
        # The allowances of the two norms cover rounding and underflow of the cross term, by 2xy ≤ x² + y²: both count the
        # inner products over the same dimension, and one product more.
        return (self.products.squared_norms() + self.rows.squared_norms() + 2 * cross).clamp(min=0.0)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tied":
        """Return the same form, of both parts' images."""
        return Tied(self.products.each(change), self.rows.each(change))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + the weighted sum of both parts (modified in place)."""
        self.products.add_weighted(total, weights, beta=beta)
        self.rows.add_weighted(total, weights)


def outer_products(
    left: Tensor, right: Tensor, *, shape: torch.Size, rule: NormRule, grams: "Grams"
) -> OuterProducts | Dense:
    """Return Σ_t l_t r_tᵀ in the cheaper form.

    Per example, with p·q elements and T positions: the ghost norm costs T²(p + q) multiply-adds on top of the one product
    that the sum needs. The direct gradient *is* that product; writing and reading it costs MEMORY_COST·pq, and it takes pq
    numbers of memory instead of T(p + q). It is chosen if it takes less of both.

    Args:
        left: Shape (batch, time, p).
        right: Shape (batch, time, q).
        shape: Shape of the parameter.
        rule: "ghost", "direct", or "auto" for the cheaper one.
        grams: The last Gram matrices, to be used again.
    """
    time, p, q = left.shape[1], left.shape[2], right.shape[2]
    if rule == "auto":
        cheaper = MEMORY_COST * p * q <= time * time * (p + q)
        smaller = p * q <= MEMORY_SLACK * time * (p + q)
        rule = "direct" if cheaper and smaller else "ghost"
    products = OuterProducts(left, right, grams)
    return products if rule == "ghost" else products.densified(shape)


def combined(uses: Iterable[PerSampleGradient], *, shape: torch.Size) -> PerSampleGradient:
    """Return one gradient for all uses of a parameter in one forward pass.

    The norm is that of the sum, so uses are never treated separately: products and look-ups of several calls are joined
    along time, which includes the cross terms between the calls.
    """
    uses = list(uses)
    if len(uses) == 1:
        return uses[0]
    products = [use for use in uses if isinstance(use, OuterProducts)]
    rows = [use for use in uses if isinstance(use, LookedUpRows)]
    dense = [use for use in uses if isinstance(use, Dense)]
    if dense:
        dense += [use.densified(shape) for use in products] + [use.densified(shape) for use in rows]
        return Dense(torch.stack([in_float32(use.values) for use in dense]).sum(dim=0))
    if not rows:
        return OuterProducts(*joined((use.left, use.right) for use in products))
    joined_rows = LookedUpRows(*joined((use.ids, use.values) for use in rows))
    if not products:
        return joined_rows
    return Tied(OuterProducts(*joined((use.left, use.right) for use in products)), joined_rows)


def joined(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return both tensors of the pairs, joined along time."""
    first, second = zip(*pairs, strict=True)
    return torch.cat(first, dim=1), torch.cat(second, dim=1)


class Grams:
    """Remembers the last three Gram matrices, because query, key and value read the same input."""

    def __init__(self) -> None:
        self._last: list[tuple[Tensor, Tensor]] = []

    def of(self, factor: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time time"]:
        """Return ⟨x_s, x_t⟩ of every example."""
        for known, gram in self._last:
            if same_memory(known, factor):
                return gram
        gram = gram_matrix(factor)
        # The factor is kept with it, so that no other tensor can be allocated at its address.
        self._last = [*self._last[-2:], (factor, gram)]
        return gram


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (first.data_ptr(), first.shape, first.stride(), first.dtype) == (
        second.data_ptr(), second.shape, second.stride(), second.dtype,
    )  # fmt: skip


def gram_matrix(factor: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time time"]:
    """Return ⟨x_s, x_t⟩ of every example."""
    factor = in_float32(factor)
    return inner_products(factor, factor)


def inner_products(first: Float[Tensor, "batch m dim"], second: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch m n"]:
    """Return ⟨x_s, y_t⟩ of every example, off by at most `roundings(dim)` roundings of ‖x_s‖‖y_t‖."""
    # Not `baddbmm`: it may begin with the sum so far, which every product of the block would then round again.
    products = map(torch.bmm, first.split(BLOCK, dim=2), second.mT.split(BLOCK, dim=1))
    total = next(products)
    for product in products:
        total += product
    return total


def roundings(length: int) -> int:
    """Return how often a term of `inner_products` is rounded at most: in its block, and with each block that is added."""
    return min(length, BLOCK) + max(math.ceil(length / BLOCK) - 1, 0)


def squared_norm_from_grams(
    left: Float[Tensor, "batch time time"], right: Float[Tensor, "batch time time"], *, lengths: tuple[int, int]
) -> Float[Tensor, " batch"]:
    """Return Σ_st left_st right_st of every example, raised by bounds on its rounding and underflow.

    If the terms of a gradient cancel, their rounding stays while the norm gets small, and with an underestimated norm the
    example would contribute more than C. A sum in which each term is rounded k times, in whatever order, is off by at most
    γ_k = ku/(1 − ku) times the sum of the terms' sizes, u = eps/2, and γ_j + γ_k + γ_jγ_k ≤ γ_{j+k} (Higham 2002, §3.1;
    sums in blocks, §4.2). So the Gram entries are off by γ_p‖l_s‖‖l_t‖ and γ_q‖r_s‖‖r_t‖, where p and q stand for the
    `roundings` of their lengths, and with S = Σ_t ‖l_t‖‖r_t‖

        |Σ_st left_st right_st − ‖g‖²| ≤ γ_k S² ≤ ku/(1 − 2ku)·Ŝ²,    k = p + q + min(time, ROW_BLOCK),

    as Ŝ² ≥ (1 − γ_p)(1 − γ_q)·S² is what the diagonals give. The weighted sum, which adds up along time, may be off by
    time·u·S in the norm. In float32 and for S² = time·‖g‖², as of unrelated terms, both raise an ordinary norm by less than
    a hundredth, up to 128 tokens and 150,000 words.

    Products and sums below the smallest normal number τ may vanish: at most 2pτ of every entry of a Gram matrix, p its
    length, and 2τ of every product of two entries, so 2τ·(p(Σ‖r_t‖)² + q(Σ‖l_t‖)² + time²) of the result. That is added
    too. It matters only if the factors differ by twenty orders of magnitude; the result is then infinity.

    Args:
        left: One Gram matrix for each example.
        right: The other.
        lengths: The lengths of the vectors whose Gram matrices these are; 0 for a matrix that is exact.
    """
    (p, q), time, info = lengths, left.shape[1], torch.finfo(left.dtype)
    lost, rounding = 2 * info.smallest_normal, info.eps / 2
    norms_left = (left.diagonal(dim1=1, dim2=2).double() + p * lost).sqrt()
    norms_right = (right.diagonal(dim1=1, dim2=2).double() + q * lost).sqrt()
    sizes = (norms_left * norms_right).sum(dim=1)
    underflow = lost * (p * norms_right.sum(dim=1).square() + q * norms_left.sum(dim=1).square() + time**2)
    ku = rounding * (roundings(p) + roundings(q) + min(time, ROW_BLOCK))
    squares = ku / (1 - 2 * ku) * sizes.square() + underflow
    for of_left, of_right in zip(left.split(ROW_BLOCK, dim=2), right.split(ROW_BLOCK, dim=2), strict=True):
        squares += torch.linalg.vecdot(of_left, of_right).sum(dim=1, dtype=torch.float64)
    squares = squares.clamp(min=0.0).masked_fill(underflow > UNDERFLOW * (squares + UNDERFLOW), math.inf)
    return (squares.sqrt() + time * rounding * sizes).square()


def sum_of_squares(values: Float[Tensor, "batch ..."]) -> Float[Tensor, " batch"]:
    """Return the sum of squares of every example, shape (batch,), in float64.

    Four million equal numbers added in float32 are off by 0.3 %, so only short runs are, and their norms in float64. Squares
    and sums below the smallest normal number may vanish, which is made up for.
    """
    values = in_float32(values).reshape(len(values), math.prod(values.shape[1:]))
    if values.shape[1] % 64 or values.shape[1] < 4096:
        return torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square()
    runs = torch.linalg.vector_norm(values.view(len(values), values.shape[1] // 64, 64), dim=2)
    lost = 2 * torch.finfo(values.dtype).smallest_normal * values.shape[1]
    return torch.linalg.vector_norm(runs, dim=1, dtype=torch.float64).square() + lost
