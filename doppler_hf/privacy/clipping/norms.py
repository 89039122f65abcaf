"""Norms of per-sample gradients, and the factors by which they are clipped, without a wait for the device.

With the factors of a product as rows of l and r, g = lᵀr, and L = llᵀ, R = rrᵀ their Gram matrices, the *ghost norm* (Li et
al. 2022, https://arxiv.org/abs/2110.05679) is

    ‖g‖² = Σ_st L_st R_st,

where of a look-up R_st is 1 if both places have the same row, and else 0. Its terms may cancel, and rounding of the Gram
matrices in float32 could then leave a norm too small, so that its example contributed more than C. Each such square is
therefore raised by eps·(GUARD·S² + TERMS·A) with S = Σ_t ‖l_t‖‖r_t‖ and A = Σ_st |L_st R_st|, and every norm by a
thousandth. These constants are measured, not proven: see `recipes/results/rounding.md`.

From a norm follows the factor with which an example contributes a vector of norm at most C:

    vanilla     clip(g) = min(1, C/‖g‖)·g                  (Abadi et al. 2016, https://arxiv.org/abs/1607.00133)
    automatic   clip(g) = C/max(‖g‖, γ)·g                  (after Bu et al. 2023, https://arxiv.org/abs/2206.07136)

γ is next to nothing, so automatic clipping brings all gradients to norm C: examples that are fitted would pull as hard as
others, and a classifier run to the class that is more frequent. So those of a classifier are also multiplied by
`shares_of_error`. Norms are first raised by the most that rounding may have taken from them.

On a GPU `kernels.compare` finds these sums for all layers at once, and factors of bfloat16 are weighted in bfloat16: see
`Squares.roundings`.
"""

from collections import defaultdict
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import in_float32, product_in_float32, row_norms, row_sums
from doppler_hf.privacy.clipping.per_sample_gradient import Dense, Lookup, PerSampleGradient, Product

Clipping = Literal["automatic", "vanilla"]

SMALLEST_NORM: Final = 0.01
# By how much norms are raised, in units of eps, so that rounding leaves them above the true ones: a thousandth in float32.
RAISED_BY: Final = 2**13

GUARD: Final = 2.0
TERMS: Final = 128.0
# A large product hides the small ones that are added to it one by one: no more than so many.
TILE: Final = 1024
# Squares below float32's range are lost, and the other factor may be large.
VANISHED: Final = 1e-25
# Rounding to bfloat16 changes a number by half of this dtype's eps of it at most. The rest covers the rounding of S.
HALF: Final = 0.51
# Gram matrices of so many numbers are compared with each other in one go.
AT_ONCE: Final = 2**20
# Of longer Gram matrices, which are symmetric, only the blocks of so many rows on and below the diagonal are computed.
BLOCK: Final = 64


class Squares:
    """Adds up squared norms by group of parameters, each of which is clipped on its own."""

    def __init__(self, *, in_kernels: bool, halves: bool) -> None:
        self._in_kernels, self._halves = in_kernels, halves
        # Products and look-ups that a kernel compares, by group, and S of those that are rounded.
        self._for_kernels: list[tuple[str, Tensor, Tensor]] = []
        self._rounded: dict[str, list[Float[Tensor, " examples"]]] = defaultdict(list)
        self._found: dict[str, list[Float[Tensor, " examples"]]] = defaultdict(list)
        # By length and dtype: pairs of Gram matrices with the groups whose squares are still to be found.
        self._pairs: dict[object, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)

    def add(self, group: str, gradient: PerSampleGradient) -> None:
        """Add ‖g_i‖² of one gradient."""
        for use in gradient:
            if isinstance(use, Dense):
                self._found[group].append(row_norms(use.values).square() if use.squares is None else use.squares)
            elif isinstance(use, Product) and not self._in_kernels:
                self._add_pair(group, self._gram(in_float32(use.left)), self._gram(in_float32(use.right)))
            elif isinstance(use, Product):
                self._for_kernels.append((group, use.left, use.right))
            elif self._in_kernels:
                self._for_kernels.append((group, use.values.contiguous(), use.ids.contiguous()))
            else:
                gram = self._gram(in_float32(use.values))
                ids = torch.nn.functional.pad(use.ids, (0, gram.shape[1] - use.ids.shape[1]))
                self._add_pair(group, gram, (ids.unsqueeze(2) == ids.unsqueeze(1)).to(gram.dtype))
        if len(gradient) == 2:
            product, lookup = gradient
            assert isinstance(product, Product)
            assert isinstance(lookup, Lookup)
            # 2⟨product, look-up⟩ = 2 Σ_st l_s[id_t]⟨r_s, v_t⟩: only the rows that were looked up contribute to it.
            picked = in_float32(product.left.gather(2, lookup.ids.unsqueeze(1).expand(-1, product.left.shape[1], -1)))
            self._found[group].append(2 * dot(picked, product_in_float32(product.right, lookup.values.mT)))

    def totals(self) -> dict[str, Float[Tensor, " examples"]]:
        """Return the sums; not finite where the range of the dtype is too small."""
        for kind in tuple(self._pairs):
            self._compare(self._pairs.pop(kind))
        if self._for_kernels:
            self._compare_in_kernels()
        return {group: row_sums(torch.stack(found, dim=1)).clamp(min=0.0) for group, found in self._found.items()}

    def roundings(self) -> dict[str, Float[Tensor, " examples"]]:
        """Return by how much rounding may raise the norm of f·g_i, over the clip factor f, by group.

        Sensitivity: with l a factor of bfloat16, f·l becomes f·(l + e) with |e| ≤ |l|·eps/2 in every number, of one example
        alone. By the triangle inequality ‖Σ_t e_t r_tᵀ‖ ≤ S·eps/2, and over the products of a group it is the root of the
        sum of squares. Numbers below bfloat16's range, 1e-38, have another error, which nothing notices.
        """
        half = HALF * torch.finfo(torch.bfloat16).eps
        return {group: half * row_norms(torch.stack(sizes, dim=1)) for group, sizes in self._rounded.items()}

    def _compare_in_kernels(self) -> None:
        from doppler_hf.privacy.clipping.kernels import compare  # imports Triton

        groups, *pairs = zip(*self._for_kernels, strict=True)
        terms = compare([*zip(*pairs, strict=True)], vanished=VANISHED)
        products, sizes, norms = torch.stack(terms).unbind(dim=2)
        eps = torch.finfo(products.dtype).eps
        squares = torch.add(products, sizes, alpha=TERMS * eps).addcmul_(norms, norms, value=GUARD * eps)
        for group, square, norm, left, right in zip(groups, squares, norms, *pairs, strict=True):
            self._found[group].append(square)
            if left.dtype == right.dtype == torch.bfloat16:
                self._rounded[group].append(norm)

    def _add_pair(self, group: str, left: Tensor, right: Tensor) -> None:
        kind = left.shape[1], left.dtype
        pairs = self._pairs[kind]
        pairs.append((group, left, right))
        if sum(gram.numel() for _, gram, _ in pairs) >= AT_ONCE:
            self._compare(self._pairs.pop(kind))

    def _compare(self, pairs: list[tuple[str, Tensor, Tensor]]) -> None:
        groups, lefts, rights = zip(*pairs, strict=True)
        left, right = (each[0] if len(each) == 1 else torch.cat(each) for each in (lefts, rights))
        of_left, of_right = (gram.diagonal(dim1=1, dim2=2) + VANISHED for gram in (left, right))
        sizes = row_sums((of_left * of_right).sqrt_())
        squares = dot(left, right)
        if self._is_halved(left.shape[1]):
            blocks = (gram.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)) for gram in (left, right))
            squares = 2 * squares - dot(*(of_gram.diagonal(dim1=1, dim2=3) for of_gram in blocks))
        squares = torch.addcmul(squares, sizes, sizes, value=GUARD * torch.finfo(left.dtype).eps)
        for group, found in zip(groups, squares.view(len(groups), -1), strict=True):
            self._found[group].append(found)

    def _is_halved(self, time: int) -> bool:
        return self._halves and time > BLOCK

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
    """Return Σ first ∘ second of every row, raised by TERMS·eps of its terms' sizes; a product of vectors loses far more."""
    terms = (first * second).flatten(1)
    return torch.add(row_sums(terms), row_sums(terms.abs_()), alpha=TERMS * torch.finfo(terms.dtype).eps)


def clip_factors(norms: Float[Tensor, " batch"], *, max_grad_norm: float, clipping: Clipping) -> Float[Tensor, " batch"]:
    """Return the factor that brings each norm to at most `max_grad_norm`."""
    if clipping == "vanilla":
        return (max_grad_norm / norms).clamp(max=1.0)
    return max_grad_norm / norms.clamp(min=SMALLEST_NORM)


def shares_of_error(losses: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Return min(1, 2(1 − p)) of cross-entropies −log p: 1 where the right class has at most even odds, and 0 at no loss.

    The gradient of a logit is in proportion to 1 − p. A loss that is not a number has the share 1, so that it is counted.
    """
    losses = losses.detach().to(torch.promote_types(losses.dtype, torch.float32))
    return (-2 * torch.expm1(-losses)).nan_to_num(nan=1.0).clamp(0.0, 1.0)
