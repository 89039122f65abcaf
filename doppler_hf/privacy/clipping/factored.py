"""Per-sample gradients as the tensors of which they are computed, without a matrix for each example.

    OuterProducts   g_i = Σ_t l_it r_itᵀ               left (batch, time, p), right (batch, time, q)
    LookedUpRows    g_i = Σ_t e(id_it) v_itᵀ           ids (batch, time), values (batch, time, dim), e(k) a unit vector
    Tied            the sum of both, of one table

The norm comes from the factors as in `ghost_norm`, the sum Σ w_i g_i from one matrix product over examples and time
(*book-keeping*: Bu et al. 2023, https://arxiv.org/abs/2210.00038). For its sensitivity see `per_sample_gradient`.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.ghost_norm import ProductNorms, Recent, gamma, product_norms, products, roundings
from doppler_hf.privacy.clipping.per_sample_gradient import (
    Dense,
    Norms,
    PerSampleGradient,
    norms_in_full,
    sum_in_full,
    sum_of_products,
)

NormRule = Literal["auto", "ghost", "direct"]

# The cost of writing one number to memory and reading it twice, in multiply-adds. Fitted on two x86-64 cores; any value
# between 25 and 400 makes the same choices for a RoBERTa of 384 with 64 tokens and for ViT-tiny with 197.
MEMORY_COST = 50
# The memory that a direct per-sample gradient may take, in units of its two factors.
MEMORY_SLACK = 1.0
# Sums over more tokens of an example are computed in blocks, so that their rounding does not add up, and in pieces of so
# many numbers, which stay in the cache.
SUM_BLOCK = 256
SUM_PIECE = 2**20


class Factored(PerSampleGradient):
    """Per-sample gradients as tensors of which they are computed."""

    @abstractmethod
    def each(self, change: Callable[[Tensor], Tensor]) -> "PerSampleGradient":
        """Return the same form, of every tensor's image."""

    def of_examples(self, kept: Bool[Tensor, " batch"]) -> "PerSampleGradient":
        """Return the gradients of the examples that are kept."""
        return self.each(operator.itemgetter(kept))

    def in_float64(self) -> "PerSampleGradient":
        """Return the same gradients, whose norms and sums are computed in float64."""
        return self.each(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


@dataclass(frozen=True, eq=False)
class OuterProducts(Factored):
    """The gradient of a matrix of p·q elements that multiplies, kept as its inputs and the gradients of its outputs."""

    left: Float[Tensor, "batch time p"]
    right: Float[Tensor, "batch time q"]
    recent: Recent = field(default_factory=Recent)

    def norms(self) -> Norms:
        """Return ‖Σ_t l_t r_tᵀ‖ of every example."""
        found, rounding = self.product_norms_and_rounding()
        return Norms(found.norms, found.errors + rounding)

    def product_norms_and_rounding(self) -> tuple[ProductNorms, Float[Tensor, " batch"]]:
        """Return the norms from their factors, and how far `add_weighted` may be off for an example alone, shape (batch,).

        The terms of others, which it has in common with them, are left out. A block may begin with another example, so that
        there is one more; and the weight is rounded into one of the factors.
        """
        found, dtype = product_norms(self.left, self.right, self.recent), in_float32(self.left[:0]).dtype
        rounding = gamma(roundings(self.left.shape[1], SUM_BLOCK) + 1, dtype) + gamma(2, dtype)
        return found, rounding * found.sizes

    def each(self, change: Callable[[Tensor], Tensor]) -> "OuterProducts":
        """Return the same form, of both factors' images."""
        return OuterProducts(change(self.left), change(self.right))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + Σ_i w_i Σ_t l_it r_itᵀ (modified in place)."""
        left, right = in_float32(self.left), in_float32(self.right)
        # Not in place, because other layers of a residual stream share these tensors.
        scale = weights.to(left.dtype)[:, None, None]
        left, right = (left * scale, right) if left.shape[2] <= right.shape[2] else (left, right * scale)
        matrix, first, second = total.view(left.shape[2], right.shape[2]), left.flatten(0, 1).t(), right.flatten(0, 1)
        if left.shape[1] <= SUM_BLOCK:
            matrix.addmm_(first, second, beta=beta)
            return
        if beta == 0:
            matrix.zero_()
        rows = max(1, SUM_PIECE // matrix.shape[1])
        for piece, of_piece in zip(matrix.split(rows), first.split(rows), strict=True):
            for left, right in zip(of_piece.split(SUM_BLOCK, dim=1), second.split(SUM_BLOCK), strict=True):
                # Not `addmm_`: it may begin with the sum so far, and round that once more for each token.
                piece += left @ right

    def densified(self, shape: torch.Size) -> Dense:
        """Return the same gradient with its matrix formed, for a parameter of this shape."""
        return sum_of_products(self.left, self.right, num_examples=len(self.left), shape=shape)


class LookedUpRows(Factored):
    """The gradient of an embedding, kept as the rows that were looked up, each once for an example.

    Its `values` have the sum over all places with the same row at one of them, and 0 at the others.
    """

    def __init__(self, ids: Int[Tensor, "batch time"], values: Float[Tensor, "batch time dim"]) -> None:
        values = in_float32(values)
        ordered, order = ids.sort(dim=1)
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        # The place where the row stands first in that order, for every place of it.
        start = torch.arange(ids.shape[1], device=ids.device).where(is_new, 0).cummax(dim=1).values
        place = torch.empty_like(order).scatter_(1, order, order.gather(1, start))
        place += torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]
        summed = torch.zeros_like(values, memory_format=torch.contiguous_format)
        summed.flatten(0, 1).index_add_(0, place.flatten(), values.flatten(0, 1))
        self.ids, self.values = ids, summed
        self._norms = norms_in_full(summed)

    def norms(self) -> Norms:
        """Return ‖g_i‖ of every example."""
        return self._norms

    def each(self, change: Callable[[Tensor], Tensor]) -> "LookedUpRows":
        """Return the same form, of the images of rows and values."""
        return LookedUpRows(change(self.ids), change(self.values))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total, with w_i v_it added to row id_it (modified in place)."""
        if beta == 0:
            total.zero_()
        total.index_add_(0, self.ids.flatten(), (self.values * weights.to(self.values.dtype)[:, None, None]).flatten(0, 1))

    def densified(self, shape: torch.Size) -> Dense:
        """Return the same gradient as one table per example, for a parameter of this shape."""
        tables = self.values.new_zeros(len(self.values), *shape)
        return Dense(tables.scatter_add_(1, self.ids.unsqueeze(-1).expand_as(self.values), self.values))


@dataclass(frozen=True, eq=False)
class Tied(Factored):
    """The gradient of a table that is looked up and also multiplies, such as a language model's embedding and head."""

    products: OuterProducts
    rows: LookedUpRows

    def norms(self) -> Norms:
        """Return √(‖products‖² + ‖rows‖² + 2⟨products, rows⟩) of every example.

        The last is Σ_st l_s[id_t]⟨r_s, v_t⟩: only the looked-up rows of the product contribute to it. With S as of the
        products it is off by γ_k·S·‖rows‖, since Σ_t |l_s[id_t]|‖v_t‖ ≤ ‖l_s‖‖rows‖; k counts the inner products, and one
        product more. The sum rounds each row once more when it adds it.
        """
        left, right, values = in_float32(self.products.left), in_float32(self.products.right), self.rows.values
        ids = self.rows.ids.unsqueeze(1).expand(-1, left.shape[1], -1)
        cross = (left.gather(2, ids) * products(right, values.mT)).sum(dim=(1, 2), dtype=torch.float64)
        (of_products, errors, sizes), rounding = self.products.product_norms_and_rounding()
        of_rows, row_errors = self.rows.norms()
        squares = (of_products.square() + of_rows.square() + 2 * cross).clamp(min=0.0)
        error = (2 * of_products + errors) * errors + (2 * of_rows + row_errors) * row_errors
        error += 2 * gamma(roundings(right.shape[2]) + 1, left.dtype) * sizes * (of_rows + row_errors)
        found = squares.sqrt()
        once = gamma(1, left.dtype) * (sizes + of_rows + row_errors)
        return Norms(found, (squares + error).sqrt() - found + rounding + once)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tied":
        """Return the same form, of both parts' images."""
        return Tied(self.products.each(change), self.rows.each(change))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + the weighted sum of both parts (modified in place)."""
        self.products.add_weighted(total, weights, beta=beta)
        self.rows.add_weighted(total, weights)


def is_formed(left: Float[Tensor, "batch time p"], right: Float[Tensor, "batch time q"], *, rule: NormRule) -> bool:
    """Return whether the matrix of each example is to be formed.

    Per example, with p·q elements and T positions: the ghost norm costs T²(p + q) multiply-adds on top of the one product
    that the sum needs. The direct gradient *is* that product; writing and reading it costs MEMORY_COST·pq, and it takes pq
    numbers of memory instead of T(p + q). It is chosen if it takes less of both.
    """
    if rule != "auto":
        return rule == "direct"
    time, p, q = left.shape[1], left.shape[2], right.shape[2]
    cheaper = MEMORY_COST * p * q <= time * time * (p + q)
    smaller = p * q <= MEMORY_SLACK * time * (p + q)
    return cheaper and smaller


def combined(uses: Iterable[PerSampleGradient], *, shape: torch.Size) -> PerSampleGradient:
    """Return one gradient for all uses of a parameter in one forward pass.

    The norm is that of the sum, so uses are never treated separately: products and look-ups of several calls are joined
    along time, which includes the cross terms between the calls.
    """
    uses = list(uses)
    if len(uses) == 1:
        return uses[0]
    pairs = [(use.left, use.right) for use in uses if isinstance(use, OuterProducts)]
    looked_up = [(use.ids, use.values) for use in uses if isinstance(use, LookedUpRows)]
    dense = [use for use in uses if isinstance(use, Dense)]
    rows = LookedUpRows(*joined(looked_up)) if looked_up else None
    if dense:
        dense += [OuterProducts(*pair).densified(shape) for pair in pairs]
        return sum_in_full([*dense, rows.densified(shape)] if rows is not None else dense)
    if not pairs:
        assert rows is not None
        return rows
    factors = OuterProducts(*joined(pairs))
    return Tied(factors, rows) if rows is not None else factors


def joined(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return both tensors of the pairs, joined along time."""
    first, second = zip(*pairs, strict=True)
    return torch.cat(first, dim=1), torch.cat(second, dim=1)
