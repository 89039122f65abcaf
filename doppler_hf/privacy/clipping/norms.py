"""Norms of per-sample gradients from the tensors of which they are made, without a wait for the device.

With the factors of a product as rows of l and r, g = lᵀr, and L = llᵀ, R = rrᵀ their Gram matrices, the *ghost norm* (Li et
al. 2022, https://arxiv.org/abs/2110.05679) is

    ‖g‖² = Σ_st L_st R_st,

where of a look-up R_st is 1 if both places have the same row, and else 0. Its terms may cancel, and rounding of the Gram
matrices in float32 could then leave a norm too small, so that its example contributed more than C. Each such square is
therefore raised by eps·(GUARD·S² + TERMS·A) with S = Σ_t ‖l_t‖‖r_t‖ and A = Σ_st |L_st R_st|, and every norm by a
thousandth. These constants are measured, not proven: see `recipes/results/rounding.md`.
"""

from collections import defaultdict
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.per_sample_gradient import Dense, Lookup, PerSampleGradient, Product, Tied

GUARD: Final = 2.0
TERMS: Final = 128.0
# A large product hides the small ones that are added to it one by one: no more than so many.
TILE: Final = 1024
# Gram matrices of so many numbers are compared with each other in one go.
AT_ONCE: Final = 2**20
# Numbers whose squares are added up at a time: millions in one go lose up to 0.3 % in float32 on a CPU.
RUN: Final = 256


class Squares:
    """Adds up squared norms by group of parameters, each of which is clipped on its own."""

    def __init__(self) -> None:
        self._found: dict[str, list[Float[Tensor, " examples"]]] = defaultdict(list)
        # By length and stack: pairs of Gram matrices whose squares are still to be found.
        self._pairs: dict[torch.Size, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        # Query, key and value read the same input. Each factor is kept, so that no other one can get its address.
        self._recent: list[tuple[object, Tensor, Tensor]] = []

    def add(self, group: str, gradient: PerSampleGradient) -> None:
        """Add ‖g_i‖² of one gradient."""
        if isinstance(gradient, Dense):
            self._found[group].append(squares_in_full(gradient.values))
        if isinstance(gradient, Product):
            self._add_pair(group, *map(self._gram_of, (gradient.left, gradient.right)), stack=gradient.stack)
        if isinstance(gradient, Lookup):
            same = (gradient.ids.unsqueeze(2) == gradient.ids.unsqueeze(1)).to(in_float32(gradient.values[:0]).dtype)
            self._add_pair(group, self._gram_of(gradient.values), same)
        if isinstance(gradient, Tied):
            product, lookup = gradient.product, gradient.lookup
            self.add(group, product)
            self.add(group, lookup)
            # 2⟨product, look-up⟩ = 2 Σ_st l_s[id_t]⟨r_s, v_t⟩: only the rows that were looked up contribute to it.
            picked = in_float32(product.left).gather(2, lookup.ids.unsqueeze(1).expand(-1, product.left.shape[1], -1))
            self._found[group].append(2 * dot(picked, torch.bmm(in_float32(product.right), in_float32(lookup.values).mT)))

    def totals(self) -> dict[str, Float[Tensor, " examples"]]:
        """Return the sums; not finite where the range of the dtype is too small."""
        for shape in tuple(self._pairs):
            self._compare(self._pairs.pop(shape))
        return {group: torch.stack(found).sum(dim=0).clamp(min=0.0) for group, found in self._found.items()}

    def _add_pair(self, group: str, left: Tensor, right: Tensor, *, stack: int = 1) -> None:
        if stack > 1:
            self._compare([(group, left, right)], stack=stack)
            return
        pairs = self._pairs[left.shape]
        pairs.append((group, left, right))
        if len(pairs) * left.numel() >= AT_ONCE:
            self._compare(self._pairs.pop(left.shape))

    def _compare(self, pairs: list[tuple[str, Tensor, Tensor]], *, stack: int = 1) -> None:
        groups, lefts, rights = zip(*pairs, strict=True)
        left, right = (each[0] if len(each) == 1 else torch.cat(each) for each in (lefts, rights))
        sizes = (left.diagonal(dim1=1, dim2=2) * right.diagonal(dim1=1, dim2=2)).sqrt_().sum(dim=1)
        squares = torch.addcmul(dot(left, right), sizes, sizes, value=GUARD * torch.finfo(left.dtype).eps)
        if stack > 1:
            self._found[groups[0]].append(squares.view(stack, -1).sum(dim=0))
            return
        for group, found in zip(groups, squares.view(len(groups), -1), strict=True):
            self._found[group].append(found)

    def _gram_of(self, factor: Float[Tensor, "rows time dim"]) -> Float[Tensor, "rows time time"]:
        place = factor.untyped_storage()._cdata, factor.storage_offset(), factor.shape, factor.stride(), factor.dtype
        for known, _, gram in self._recent:
            if known == place:
                return gram
        gram = gram_of(in_float32(factor))
        self._recent = [*self._recent[-2:], (place, factor, gram)]
        return gram


def gram_of(rows: Float[Tensor, "rows time dim"]) -> Float[Tensor, "rows time time"]:
    """Return the inner products of each row's places, added up by halves of `dim` down to TILE."""
    if rows.shape[2] <= TILE:
        return torch.bmm(rows, rows.mT)
    first, second = rows.chunk(2, dim=2)
    return gram_of(first).add_(gram_of(second))


def dot(first: Float[Tensor, "rows m n"], second: Float[Tensor, "rows m n"]) -> Float[Tensor, " rows"]:
    """Return Σ first ∘ second of every row, raised by TERMS·eps of its terms' sizes.

    Added pairwise, as `sum` does; a product of vectors loses up to 100 times more.
    """
    terms = (first * second).flatten(1)
    sizes = torch.linalg.vector_norm(terms, ord=1, dim=1)
    return torch.add(terms.sum(dim=1), sizes, alpha=TERMS * torch.finfo(terms.dtype).eps)


def squares_in_full(values: Float[Tensor, "examples n"]) -> Float[Tensor, " examples"]:
    """Return the sum of each example's squared numbers."""
    values = in_float32(values)
    whole = values.shape[1] // RUN * RUN
    if whole < RUN * RUN:
        return torch.linalg.vector_norm(values, dim=1).square()
    runs = torch.linalg.vector_norm(values[:, :whole].unflatten(1, (-1, RUN)), dim=2).square().sum(dim=1)
    return runs if whole == values.shape[1] else runs + torch.linalg.vector_norm(values[:, whole:], dim=1).square()
