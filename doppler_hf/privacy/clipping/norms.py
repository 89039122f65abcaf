"""Norms of per-sample gradients from the tensors of which they are made, without a wait for the device.

With the factors of a product as rows of l and r, g = lᵀr, and L = llᵀ, R = rrᵀ their Gram matrices, the *ghost norm* (Li et
al. 2022, https://arxiv.org/abs/2110.05679) is

    ‖g‖² = Σ_st L_st R_st,

where of a look-up R_st is 1 if both places have the same row, and else 0. Its terms may cancel, and rounding of the Gram
matrices in float32 could then leave a norm too small, so that its example contributed more than C. Each such square is
therefore raised by eps·(GUARD·S² + TERMS·A) with S = Σ_t ‖l_t‖‖r_t‖ and A = Σ_st |L_st R_st|, and every norm by a
thousandth. These constants are measured, not proven: see `recipes/results/rounding.md`.
"""

import itertools
from collections import defaultdict
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.per_sample_gradient import Dense, Lookup, PerSampleGradient, Product, Tied, squares_in_full

GUARD: Final = 2.0
TERMS: Final = 128.0
# A large product hides the small ones that are added to it one by one: no more than so many.
TILE: Final = 1024
# Squares below float32's range are lost, and the other factor may be large.
VANISHED: Final = 1e-25
# Gram matrices of so many numbers are compared with each other in one go.
AT_ONCE: Final = 2**20
# Of longer Gram matrices, which are symmetric, only the blocks of so many rows on and below the diagonal are computed.
BLOCK: Final = 64


class Squares:
    """Adds up squared norms by group of parameters, each of which is clipped on its own."""

    def __init__(self, *, on_accelerator: bool) -> None:
        self._on_accelerator = on_accelerator
        self._found: dict[str, list[Float[Tensor, " examples"]]] = defaultdict(list)
        # By length and dtype: pairs of Gram matrices with the groups whose squares are still to be found.
        self._pairs: dict[object, list[tuple[list[str], Tensor, Tensor]]] = defaultdict(list)
        # Query, key and value read the same input. Each factor is kept, so that no other one can get its address.
        self._recent: list[tuple[object, Tensor, Tensor]] = []

    def add(self, group: str, gradient: PerSampleGradient) -> None:
        """Add ‖g_i‖² of one gradient."""
        if isinstance(gradient, Dense):
            self._found[group].append(squares_in_full(gradient.values) if gradient.squares is None else gradient.squares)
        if isinstance(gradient, Product):
            self._add_pair(group, *map(self._gram_of, (gradient.left, gradient.right)), stack=gradient.stack)
        if isinstance(gradient, Lookup):
            gram = self._gram_of(gradient.values)
            ids = torch.nn.functional.pad(gradient.ids, (0, gram.shape[1] - gradient.ids.shape[1]))
            self._add_pair(group, gram, (ids.unsqueeze(2) == ids.unsqueeze(1)).to(gram.dtype))
        if isinstance(gradient, Tied):
            product, lookup = gradient.product, gradient.lookup
            self.add(group, product)
            self.add(group, lookup)
            # 2⟨product, look-up⟩ = 2 Σ_st l_s[id_t]⟨r_s, v_t⟩: only the rows that were looked up contribute to it.
            picked = in_float32(product.left).gather(2, lookup.ids.unsqueeze(1).expand(-1, product.left.shape[1], -1))
            self._found[group].append(2 * dot(picked, torch.bmm(in_float32(product.right), in_float32(lookup.values).mT)))

    def totals(self) -> dict[str, Float[Tensor, " examples"]]:
        """Return the sums; not finite where the range of the dtype is too small."""
        for kind in tuple(self._pairs):
            self._compare(self._pairs.pop(kind))
        return {group: torch.stack(found).sum(dim=0).clamp(min=0.0) for group, found in self._found.items()}

    def _add_pair(self, group: str, left: Tensor, right: Tensor, *, stack: int = 1) -> None:
        kind = left.shape[1], left.dtype
        pairs = self._pairs[kind]
        pairs.append(([group] * stack, left, right))
        if sum(gram.numel() for _, gram, _ in pairs) >= AT_ONCE:
            self._compare(self._pairs.pop(kind))

    def _compare(self, pairs: list[tuple[list[str], Tensor, Tensor]]) -> None:
        groups, lefts, rights = zip(*pairs, strict=True)
        left, right = (each[0] if len(each) == 1 else torch.cat(each) for each in (lefts, rights))
        of_left, of_right = (gram.diagonal(dim1=1, dim2=2) + VANISHED for gram in (left, right))
        sizes = (of_left * of_right).sqrt_().sum(dim=1)
        squares = dot(left, right)
        if self._is_halved(left.shape[1]):
            blocks = (gram.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)) for gram in (left, right))
            squares = 2 * squares - dot(*(of_gram.diagonal(dim1=1, dim2=3) for of_gram in blocks))
        squares = torch.addcmul(squares, sizes, sizes, value=GUARD * torch.finfo(left.dtype).eps)
        owners = list(itertools.chain.from_iterable(groups))
        for group, found in zip(owners, squares.view(len(owners), -1), strict=True):
            self._found[group].append(found)

    def _gram_of(self, factor: Float[Tensor, "rows time dim"]) -> Float[Tensor, "rows time time"]:
        place = factor.untyped_storage()._cdata, factor.storage_offset(), factor.shape, factor.stride(), factor.dtype
        for known, _, gram in self._recent:
            if known == place:
                return gram
        gram = self._gram(in_float32(factor))
        self._recent = [*self._recent[-2:], (place, factor, gram)]
        return gram

    def _is_halved(self, time: int) -> bool:
        return not self._on_accelerator and time > BLOCK

    def _gram(self, rows: Float[Tensor, "rows time dim"]) -> Float[Tensor, "rows times times"]:
        """Return the inner products of each row's places, added up by halves of `dim` down to TILE."""
        if rows.shape[2] > TILE:
            first, second = rows.chunk(2, dim=2)
            return self._gram(first).add_(self._gram(second))
        time = rows.shape[1]
        if not self._is_halved(time):
            return torch.bmm(rows, rows.mT)
        ends = range(BLOCK, time + BLOCK, BLOCK)
        gram = rows.new_zeros(len(rows), ends[-1], ends[-1])
        for end in ends:
            gram[:, end - BLOCK : min(end, time), : min(end, time)] = torch.bmm(rows[:, end - BLOCK : end], rows[:, :end].mT)
        return gram


def dot(first: Float[Tensor, "rows m *n"], second: Float[Tensor, "rows m *n"]) -> Float[Tensor, " rows"]:
    """Return Σ first ∘ second of every row, raised by TERMS·eps of its terms' sizes.

    Added pairwise, as `sum` does; a product of vectors loses up to 100 times more.
    """
    terms = (first * second).flatten(1)
    sizes = torch.linalg.vector_norm(terms, ord=1, dim=1)
    return torch.add(terms.sum(dim=1), sizes, alpha=TERMS * torch.finfo(terms.dtype).eps)
