"""The gradients of single examples, as the tensors from which they are computed: their squared norms and weighted sums.

A layer notes each use of a trained parameter in `Notes`, in one of these forms:

    Dense      g_i in full                      values (examples, n)
    Product    g_i = Σ_t l_it r_itᵀ             left (examples, time, p), right (examples, time, q)
    Lookup     g_i = Σ_t e(id_it) v_itᵀ         ids (examples, time), values (examples, time, dim), e(k) a unit vector
    Standardized   a product, through the standardization of the weight that multiplies

After the backward pass all uses of a parameter become one gradient: one of these, or `Tied`, the sum of a product and a
look-up of one table. `Squares` finds the norms of all gradients, and `Gradient.weighted` their sums. The sum Σ w_i g_i of a
product is one product of matrices over examples and time (*book-keeping*: Bu et al. 2023, https://arxiv.org/abs/2210.00038).

A new form is one subclass of `Use`, with the methods that are abstract there; notes, norms and sums then work with it.

With the factors of a product as rows of l and r, g = lᵀr, and L = llᵀ, R = rrᵀ their Gram matrices, the *ghost norm* (Li et
al. 2022, https://arxiv.org/abs/2110.05679) is

    ‖g‖² = Σ_st L_st R_st,

where of a look-up R_st is 1 if both places have the same row, and else 0. Its terms may cancel, and rounding of the Gram
matrices in float32 could then leave a norm too small, so that its example contributed more than C. Each such square is
therefore raised by eps·(GUARD·S² + TERMS·A) with S = Σ_t ‖l_t‖‖r_t‖ and A = Σ_st |L_st R_st|. These constants are measured,
not proven: see `recipes/results/rounding.md`.

Sensitivity: row i of every tensor depends on example i alone. Norm and sum come from the same numbers, and are added up in
float32 or better, so that no rounding in a lower precision upstream can make w_i‖g_i‖ exceed the bound. For the rounding of
`fused_gradients.weighed` the factor w_i is lowered. Which form a gradient has follows from shapes, never from the data.

On a GPU `fused_gradients` finds norms for all layers at once, and weights factors of bfloat16 in bfloat16: see
`Squares.roundings`.
"""

import abc
import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from doppler_hf.linalg import in_float32, product_in_float32, row_norms, row_sums

NormRule = Literal["auto", "ghost", "direct"]
Names = tuple[str, ...]  # Names of parameters that share one gradient, side by side.

# The cost of writing one number to memory and reading it twice, in multiply-adds. Fitted on two x86-64 cores; any value
# between 25 and 400 makes the same choices for a RoBERTa of 384 with 64 tokens and for ViT-tiny with 197.
MEMORY_COST: Final = 50
# The norms and sums of gradients in full with fewer numbers are computed together, from a copy. On a GPU the limit is
# higher, because a few kernels with many numbers are faster than many kernels.
SMALL, SMALL_IN_KERNELS = 2**16, 2**20

GUARD: Final = 2.0
TERMS: Final = 128.0
# Small products that are added to a large one, one by one, are lost in its rounding. So at most so many are added at a time.
TILE: Final = 1024
# Squares below float32's range are lost, and the other factor may be large.
VANISHED: Final = 1e-25
# Rounding to bfloat16 changes a number by half of this dtype's eps of it at most. The rest covers the rounding of S.
HALF: Final = 0.51
# Gram matrices with so many numbers together are compared at once.
AT_ONCE: Final = 2**20
# Longer Gram matrices are symmetric, so only blocks of so many rows on and below the diagonal are computed.
BLOCK: Final = 64


# --- what gradients are multiplied by -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """What the examples' gradients are multiplied by, in a sum from which those that are not finite are left out."""

    factors: Float[Tensor, " examples"]  # 0 where the gradient is not finite
    finite: Bool[Tensor, " examples"] | None  # None if all gradients are known to be finite.
    zero: Float[Tensor, ""]  # A zero on the device of the factors: a Python number would be copied there for each tensor.
    # The factors of one gradient's product, multiplied by the kernel `fused_gradients.weighed`.
    by_kernel: tuple[Float[Tensor, "examples time p"], Float[Tensor, "examples time q"]] | None = None

    @functools.cached_property
    def marked(self) -> Float[Tensor, " examples"]:
        """Return the factors, with NaN for examples that are not finite."""
        return self.factors if self.finite is None else self.factors.masked_fill(~self.finite, torch.nan)

    def cleaned(self, values: Float[Tensor, "examples _ _"]) -> Float[Tensor, "examples _ _"]:
        """Return the values, with zeros for examples that are not finite: 0·NaN would be NaN."""
        return values if self.finite is None else torch.where(self.finite[:, None, None], values, self.zero)

    def times(self, values: Float[Tensor, "examples _ _"]) -> Float[Tensor, "examples _ _"]:
        """Return the cleaned values, each multiplied by its example's factor, in float32 or better."""
        factors = self.factors.to(torch.promote_types(values.dtype, torch.float32))
        # This is a copy, because other layers of a residual stream share the values.
        return self.cleaned(values) * factors[:, None, None]

    def on_product(
        self, left: Float[Tensor, "examples time p"], right: Float[Tensor, "examples time q"]
    ) -> tuple[Float[Tensor, "examples time p"], Float[Tensor, "examples time q"]]:
        """Return both factors of a product, with the smaller one multiplied by the weights."""
        if self.by_kernel is not None:
            return self.by_kernel
        if left.shape[2] <= right.shape[2]:
            return self.times(left), in_float32(self.cleaned(right))
        return in_float32(self.cleaned(left)), self.times(right)


# --- the forms ------------------------------------------------------------------------------------------------------------


class Gradient(abc.ABC):
    """Each example's gradient of one parameter, or of several side by side."""

    # Whether the sum of these gradients, which is a table, takes far more memory than their factors.
    is_of_table: ClassVar[bool] = False

    @abc.abstractmethod
    def add_squares(self, squares: "Squares", group: str) -> None:
        """Add ‖g_i‖² to a group's, or leave to `squares` the factors from which it follows."""

    @abc.abstractmethod
    def weighted(self, weights: Weights, total: Float[Tensor, "..."] | None) -> Float[Tensor, "..."]:
        """Return Σ w_i g_i, added to `total` if there is one (modified in place)."""

    @property
    @abc.abstractmethod
    def factors(self) -> tuple[Float[Tensor, "examples ..."], ...]:
        """The tensors whose product it is: one, or two, which kernels weight for many gradients at once."""


class Use(Gradient):
    """Each example's gradient of one use of a parameter."""

    def has_terms(self) -> Bool[Tensor, " examples"]:
        """Return for every example whether its gradient has terms other than zero; 0·∞ is none of others."""
        found = [((factor != 0) & factor.isfinite()).flatten(1).any(dim=1) for factor in self.factors]
        return torch.stack(found).all(dim=0)

    @classmethod
    @abc.abstractmethod
    def joined(cls, uses: Sequence[Any]) -> Self:
        """Return several uses of one parameter as one, whose norm includes what they have in common."""

    @classmethod
    def are_formed(cls, uses: Sequence[Any], is_formed: Callable[[int, int, int], bool]) -> bool:
        """Return whether several uses of one parameter are to be kept in full; `is_formed` is that of `Notes`."""
        return False

    @abc.abstractmethod
    def in_full(self, total: Float[Tensor, "examples n"] | None) -> Float[Tensor, "examples n"]:
        """Return the gradient in full, added to `total` if there is one (modified in place)."""


@dataclass(frozen=True, eq=False)
class Dense(Use):
    """The gradient in full; of several parameters, one after another."""

    values: Float[Tensor, "examples n"]
    squares: Float[Tensor, " examples"] | None = None  # the squared norms, if they are known

    @property
    def factors(self) -> tuple[Float[Tensor, "examples n"]]:
        """The values."""
        return (self.values,)

    @classmethod
    def joined(cls, uses: Sequence["Dense"]) -> "Dense":
        """Return the sum of several uses, in new memory: the uses may be autograd's own tensors."""
        return cls(functools.reduce(torch.add, [use.values for use in uses]))

    def in_full(self, total: Float[Tensor, "examples n"] | None) -> Float[Tensor, "examples n"]:
        """Return the values, added to `total` if there is one."""
        return self.values if total is None else total.add_(self.values)

    def add_squares(self, squares: "Squares", group: str) -> None:
        """Add the squared norms."""
        squares.add(group, row_norms(self.values).square() if self.squares is None else self.squares)

    def weighted(self, weights: Weights, total: Float[Tensor, "..."] | None) -> Float[Tensor, "..."]:
        """Return Σ w_i g_i, shape (n,), or added to `total`, of any shape with n elements."""
        values, factors = weights.cleaned(self.values.unsqueeze(2)).squeeze(2), weights.factors
        factors = factors.to(values.dtype)
        return torch.mv(values.t(), factors) if total is None else total.view(-1).addmv_(values.t(), factors)


@dataclass(frozen=True, eq=False)
class Product(Use):
    """The gradient of a matrix that multiplies: the layer's inputs and the gradients of its outputs."""

    left: Float[Tensor, "examples time p"]
    right: Float[Tensor, "examples time q"]

    @property
    def factors(self) -> tuple[Float[Tensor, "examples time p"], Float[Tensor, "examples time q"]]:
        """Both factors."""
        return self.left, self.right

    @classmethod
    def joined(cls, uses: Sequence["Product"]) -> "Product":
        """Return several uses one after another in time, so that their cross terms count too."""
        return cls(torch.cat([use.left for use in uses], dim=1), torch.cat([use.right for use in uses], dim=1))

    @classmethod
    def are_formed(cls, uses: Sequence["Product"], is_formed: Callable[[int, int, int], bool]) -> bool:
        """Return whether matrices of p·q elements are cheaper than all places of the uses together."""
        time, first = sum(use.left.shape[1] for use in uses), uses[0]
        return is_formed(time, first.left.shape[2], first.right.shape[2])

    def in_full(self, total: Float[Tensor, "examples n"] | None) -> Float[Tensor, "examples n"]:
        """Return the matrices p × q one after another, added to `total` if there is one."""
        if total is None:
            return formed(self.left, self.right).flatten(1)
        # The product is added in place, because the head of a language model is too large for a second copy.
        matrices = total.view(len(total), self.left.shape[2], -1)
        matrices.baddbmm_(in_float32(self.left).mT, in_float32(self.right))
        return total

    def add_squares(self, squares: "Squares", group: str) -> None:
        """Leave the factors to be compared."""
        squares.compare(group, self.left, self.right)

    def weighted(self, weights: Weights, total: Float[Tensor, "..."] | None) -> Float[Tensor, "..."]:
        """Return Σ w_i Σ_t l_it r_itᵀ, shape (p, q), or added to `total`, of any shape with p·q elements."""
        left, right = weights.on_product(self.left, self.right)
        left, right = left.flatten(0, 1).mT, right.flatten(0, 1)
        if total is None:
            return product_in_float32(left, right)
        flat = total.view(len(left), -1)
        if left.dtype == right.dtype == flat.dtype:
            return flat.addmm_(left, right)
        return flat.add_(product_in_float32(left, right))


@dataclass(frozen=True, eq=False)
class Standardization:
    """Weight standardization (Qiao et al. 2019, https://arxiv.org/abs/1903.10520): ŵ_o = (w_o − mean)·rstd_o in every row o.

    The gradient of w_o is rstd_o·(g_o − mean(g_o) − ŵ_o⟨g_o, ŵ_o⟩/q), with g_o the gradient of ŵ_o, of q numbers.
    """

    weight: Float[Tensor, "p q"]  # ŵ
    rstd: Float[Tensor, " p"]

    def pulled_back(self, gradients: Float[Tensor, "examples p q"]) -> Float[Tensor, "examples p q"]:
        """Return the gradients of w from those of ŵ."""
        # Sensitivity: this is linear, and its numbers are functions of the weights alone, which are public.
        along = torch.linalg.vecdot(gradients, self.weight, dim=2).div_(self.weight.shape[1])
        found = gradients - gradients.mean(dim=2, keepdim=True)
        return found.addcmul_(along.unsqueeze(2), self.weight, value=-1.0).mul_(self.rstd.unsqueeze(1))


@dataclass(frozen=True, eq=False)
class Standardized(Use):
    """The gradient of a matrix that is standardized before it multiplies.

    It follows from G = Σ_t l_t r_tᵀ, where l are the gradients of the outputs multiplied by rstd, and r the inputs. With m_o
    the mean of row o of G, s_o = ⟨G_o, ŵ_o⟩, and δ_o the mean of ŵ_o, which is 0 but for rounding, it is

        g = G − m 1ᵀ − diag(s) ŵ/q,    ‖g‖² = ‖G‖² − q Σ_o m_o² − Σ_o s_o² (2 − ‖ŵ_o‖²/q)/q + 2 Σ_o m_o s_o δ_o.
    """

    product: Product
    standard: Standardization

    @property
    def factors(self) -> tuple[Float[Tensor, "examples time p"], Float[Tensor, "examples time q"]]:
        """Both factors of the product."""
        return self.product.factors

    @classmethod
    def joined(cls, uses: Sequence["Standardized"]) -> "Standardized":
        """Return several uses of one matrix one after another in time."""
        return cls(Product.joined([use.product for use in uses]), uses[0].standard)

    @classmethod
    def are_formed(cls, uses: Sequence["Standardized"], is_formed: Callable[[int, int, int], bool]) -> bool:
        """Return whether matrices of p·q elements are cheaper than all places of the uses together."""
        return Product.are_formed([use.product for use in uses], is_formed)

    @functools.cached_property
    def means(self) -> Float[Tensor, "examples p"]:
        """Return the numbers m_o."""
        left, right = map(in_float32, self.factors)
        of_right = row_sums(right.flatten(0, 1)).div_(right.shape[2]).view(*right.shape[:2], 1)
        return sums_over_time(left * of_right)

    @functools.cached_property
    def along(self) -> Float[Tensor, "examples p"]:
        """Return the numbers s_o."""
        left, right = map(in_float32, self.factors)
        parts = zip(right.split(TILE, dim=2), self.standard.weight.mT.to(right.dtype).split(TILE), strict=True)
        return sums_over_time(left * sum(product_in_float32(*part) for part in parts))

    def in_full(self, total: Float[Tensor, "examples n"] | None) -> Float[Tensor, "examples n"]:
        """Return the matrices p × q one after another, added to `total` if there is one."""
        found, weight = self.product.in_full(total), self.standard.weight
        matrices = found.view(-1, *weight.shape).sub_(self.means.unsqueeze(2))
        matrices.addcmul_(self.along.unsqueeze(2), weight, value=-1 / weight.shape[1])
        return found

    def add_squares(self, squares: "Squares", group: str) -> None:
        """Leave the factors to be compared, and subtract the squares of what standardization takes out."""
        self.product.add_squares(squares, group)
        left, right = map(in_float32, self.factors)
        weight, q = self.standard.weight.to(left.dtype), right.shape[2]
        squared, delta = row_norms(weight).square_(), row_sums(weight).div_(q)
        # Sensitivity: rounding may have made |m_o| and |s_o| too large by a few eps of Σ_t |l_to| ‖r_t‖ times the norm of
        # 1/q or of ŵ_o, and so the norm too small. So that much is taken off, and 2 |m_o s_o δ_o| added, whatever its sign.
        of_right = row_norms(right.flatten(0, 1)).view(*right.shape[:2], 1)
        lost = sums_over_time(left.abs() * of_right).mul_(TERMS * torch.finfo(left.dtype).eps)
        means, along = self.means.abs(), self.along.abs()
        of_means = (means - lost / math.sqrt(q)).clamp_(min=0.0).mul_(math.sqrt(q))
        # The factor comes before the square, so that no square here leaves the range of the dtype where ‖G‖² does not.
        of_along = (along - lost * squared.sqrt()).clamp_(min=0.0).mul_(((2 - squared / q) / q).sqrt())
        taken_out = row_sums(of_means.square_().add_(of_along.square_()).sub_(means * (2 * along * delta.abs())))
        # A difference of infinite numbers is none: such an example is left out.
        squares.add(group, -taken_out.where(taken_out.isfinite(), torch.nan))

    def weighted(self, weights: Weights, total: Float[Tensor, "..."] | None) -> Float[Tensor, "..."]:
        """Return Σ w_i g_i, shape (p, q), or added to `total`, of any shape with p·q elements."""
        found, weight = self.product.weighted(weights, total), self.standard.weight
        taken_out = weights.times(torch.stack([self.means, self.along], dim=1)).sum(dim=0).to(found.dtype)
        matrix = found.view(weight.shape).sub_(taken_out[0, :, None])
        matrix.addcmul_(taken_out[1, :, None], weight.to(found.dtype), value=-1 / weight.shape[1])
        return found


@dataclass(frozen=True, eq=False)
class Lookup(Use):
    """The gradient of an embedding: the rows that were looked up, and the gradients of what was found."""

    ids: Int[Tensor, "examples time"]
    values: Float[Tensor, "examples time dim"]
    rows: int  # rows of the table

    is_of_table: ClassVar[bool] = True

    @property
    def factors(self) -> tuple[Float[Tensor, "examples time dim"]]:
        """The values, each of which is added to a row."""
        return (self.values,)

    @classmethod
    def joined(cls, uses: Sequence["Lookup"]) -> "Lookup":
        """Return several uses one after another in time, so that their cross terms count too."""
        ids, values = torch.cat([use.ids for use in uses], dim=1), torch.cat([use.values for use in uses], dim=1)
        return cls(ids, values, uses[0].rows)

    @classmethod
    def are_formed(cls, uses: Sequence["Lookup"], is_formed: Callable[[int, int, int], bool]) -> bool:
        """Return whether the table has a few rows, such as token types, fewer than what it is computed from."""
        return uses[0].rows <= sum(use.ids.shape[1] for use in uses)

    def in_full(self, total: Float[Tensor, "examples n"] | None) -> Float[Tensor, "examples n"]:
        """Return one table for each example, added to `total` if there is one."""
        values = in_float32(self.values)
        if total is None:
            total = values.new_zeros(len(values), self.rows * values.shape[2])
        first = torch.arange(0, len(values) * self.rows, self.rows, device=values.device)  # row of each example's table
        place = self.ids + first.unsqueeze(1)
        total.view(-1, values.shape[2]).index_add_(0, place.flatten(), values.flatten(0, 1))
        return total

    def add_squares(self, squares: "Squares", group: str) -> None:
        """Leave rows and values to be compared."""
        squares.compare(group, self.values, self.ids)

    def weighted(self, weights: Weights, total: Float[Tensor, "rows dim"] | None) -> Float[Tensor, "rows dim"]:
        """Return a table, with w_i v_it added to row id_it."""
        values = weights.times(self.values).flatten(0, 1)
        if total is None:
            total = values.new_zeros(self.rows, values.shape[1])
        return total.index_add_(0, self.ids.flatten(), values.to(total.dtype))


@dataclass(frozen=True, eq=False)
class Tied(Gradient):
    """The gradient of a table that is looked up and also multiplies, such as a language model's embedding and its head."""

    product: Product
    lookup: Lookup

    is_of_table: ClassVar[bool] = True

    @property
    def factors(self) -> tuple[Float[Tensor, "examples time p"], Float[Tensor, "examples time q"]]:
        """The factors of the product."""
        return self.product.factors

    def add_squares(self, squares: "Squares", group: str) -> None:
        """Add the squares of both, and twice their inner product."""
        self.product.add_squares(squares, group)
        self.lookup.add_squares(squares, group)
        # 2⟨product, look-up⟩ = 2 Σ_st l_s[id_t]⟨r_s, v_t⟩: only the rows that were looked up contribute to it.
        (left, right), (ids, values) = self.factors, (self.lookup.ids, self.lookup.values)
        picked = in_float32(left.gather(2, ids.unsqueeze(1).expand(-1, left.shape[1], -1)))
        squares.add(group, 2 * dot(picked, product_in_float32(right, values.mT)))

    def weighted(self, weights: Weights, total: Float[Tensor, "..."] | None) -> Float[Tensor, "..."]:
        """Return the sum of both, shape (rows, dim), or added to `total`."""
        return self.lookup.weighted(weights, self.product.weighted(weights, total))


def formed(left: Float[Tensor, "*rows time p"], right: Float[Tensor, "*rows time q"]) -> Float[Tensor, "*rows p q"]:
    """Return Σ_t l_t r_tᵀ of every row, formed."""
    return product_in_float32(left.mT, right)


def sums_over_time(terms: Float[Tensor, "examples time p"]) -> Float[Tensor, "examples p"]:
    """Return Σ_t of the terms, with the small error of `row_sums`."""
    return row_sums(terms.mT.flatten(0, 1)).view(len(terms), -1)


def in_full(uses: Sequence[Use]) -> Dense:
    """Return the sum of several uses of a parameter, those in full last."""
    *others, last = uses
    total = None
    for use in others:
        total = use.in_full(total)
    return Dense(last.in_full(total))


# All uses of one parameter, grouped by their form.
Uses = dict[type[Use], list[Any]]


def combined(uses: Uses) -> Gradient:
    """Return one gradient for all uses of a parameter in one forward pass.

    The norm is that of the sum, so uses are never treated separately: products and look-ups of several calls are joined
    along time, which includes the cross terms between the calls. Those in full have been added up.
    """
    if uses.keys() == {Product, Lookup}:
        return Tied(_joined(uses[Product]), _joined(uses[Lookup]))
    if len(uses) == 1:
        return _joined(*uses.values())
    full = uses.pop(Dense, [])
    return in_full([*itertools.chain(*uses.values()), *full])


def _joined(alike: list[Any]) -> Any:
    return alike[0] if len(alike) == 1 else type(alike[0]).joined(alike)


# --- notes ----------------------------------------------------------------------------------------------------------------


class Notes:
    """The notes that layers make during one forward and backward pass; see `clear` for what is noted.

    With `in_kernels` they are for `fused_gradients`: factors are kept in half precision, contiguous and of one dtype.
    """

    def __init__(self, *, norm_rule: NormRule, in_kernels: bool) -> None:
        self._norm_rule = norm_rule
        self.in_kernels = in_kernels
        self.small = SMALL_IN_KERNELS if in_kernels else SMALL
        self.is_in_forward = self._is_unwatched = False
        self.casts: dict[
            tuple[Tensor, torch.dtype], Tensor
        ] = {}  # Copies of weights in other dtypes, which are valid for one forward pass.
        self.clear()

    @property
    def is_watching(self) -> bool:
        """Whether layers make notes, as they do in a pass whose gradient is wanted.

        Re-entrant checkpointing runs parts of such a pass without gradients first, and expects the same shapes from them.
        """
        return not self._is_unwatched and (torch.is_grad_enabled() or self.is_in_forward)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let layers compute without making notes."""
        before, self._is_unwatched = self._is_unwatched, True
        try:
            yield
        finally:
            self._is_unwatched = before

    def cast(self, weight: Float[Tensor, "_ _"], dtype: torch.dtype) -> Float[Tensor, "_ _"]:
        """Return a weight in the dtype of a product: one copy for all that a pass multiplies by it."""
        if weight.dtype == dtype:
            return weight
        if (weight, dtype) not in self.casts:
            self.casts[weight, dtype] = weight.to(dtype)
        return self.casts[weight, dtype]

    def clear(self) -> None:
        """Discard all notes."""
        self.casts.clear()
        self.batch_size: int | None = None  # rows of the forward pass, or of the part of it that cuts them further
        # Each use has this many rows of each example, one after another: a single row, or the example's views, choices or
        # windows. They are added up.
        self.num_examples = 1
        self.uses: dict[Tensor, Uses] = {}  # parameter → its uses; the backward pass fills this
        self.repeated: list[str] = []  # layers whose output has no batch and was repeated for each example
        self.failed: dict[str, Exception] = {}  # layers without a rule, and why functorch does not fit them
        self.fail_when_checkpointed: set[str] = set()  # those that it fits without gradient checkpointing inside
        # During a check, these are the examples whose losses are differentiated. Gradients are then compared and not kept.
        self.examined: Bool[Tensor, " examples"] | None = None
        self.coupled: set[Tensor] = set()  # parameters at which these examples have a gradient in the rows of other examples

    def is_formed(self, time: int, p: int, q: int) -> bool:
        """Return whether the matrix of each example is to be formed, of p·q elements from so many positions.

        Per example, with p·q elements and T positions: the ghost norm costs T²(p + q) multiply-adds on top of the one
        product that the sum needs. The direct gradient *is* that product; writing and reading it costs MEMORY_COST·pq, and
        it takes pq numbers of memory instead of T(p + q). It is chosen if it takes less of both.
        """
        if self._norm_rule != "auto":
            return self._norm_rule == "direct"
        return MEMORY_COST * p * q <= time * time * (p + q) and p * q <= time * (p + q)

    def note(self, parameter: Tensor, use: Use) -> None:
        """Note one use of a parameter, or in a check look for others than those that have a loss."""
        if self.examined is not None:
            self.uses.setdefault(parameter, {})  # A check notes only that the parameter was used.
            if use.has_terms()[~self.examined.to(parameter.device)].any():
                self.coupled.add(parameter)
            return
        uses, form = self.uses.setdefault(parameter, {}), type(use)
        alike = uses.setdefault(form, [])
        alike.append(use)
        # A language model's head is called for a part of an example's tokens at a time. All its uses together are the
        # example's gradient.
        if form is Dense:
            uses[Dense] = [_joined(alike)]
        elif Dense in uses or form.are_formed(alike, self.is_formed):
            uses[Dense] = [in_full([*uses.pop(form), *uses.get(Dense, [])])]

    def gradients(self, parameters: Mapping[str, Tensor]) -> dict[str, Gradient]:
        """Return the gradient of every parameter that was used, by name, and forget its uses."""
        found = {}
        for name, parameter in parameters.items():
            # Each entry is removed at once, so that its memory is free for the next parameter.
            if uses := self.uses.pop(parameter, {}):
                found[name] = combined(uses)
        return found

    def note_product(
        self,
        parameter: Tensor,
        left: Float[Tensor, "rows time p"],
        right: Float[Tensor, "rows time q"],
        standard: Standardization | None = None,
    ) -> None:
        """Note a use whose gradient is Σ_t left_t right_tᵀ, of p·q elements; with `standard`, this is the gradient of ŵ."""
        # The product is formed for each row if that is cheaper already, since joining patches of images takes longer than
        # adding products.
        if self.is_formed(left.shape[1], left.shape[2], right.shape[2]):
            matrices = formed(left, right)
            self.note_rows(parameter, matrices if standard is None else standard.pulled_back(matrices))
            return
        left, right = self._rows_as_sequences(left), self._rows_as_sequences(right)
        if standard is not None:
            left = in_float32(left) * standard.rstd
        if self.in_kernels:
            left, right = left.contiguous(), right.contiguous()
            if left.dtype != right.dtype:
                left, right = in_float32(left), in_float32(right)
        product = Product(left, right)
        self.note(parameter, product if standard is None else Standardized(product, standard))

    def note_lookup(self, parameter: Tensor, ids: Int[Tensor, "rows time"], values: Float[Tensor, "rows time dim"]) -> None:
        """Note a use that looks up rows of a table, whose gradients are `values`."""
        self.note(parameter, Lookup(self._rows_as_sequences(ids), self._rows_as_sequences(values), len(parameter)))

    def note_sum(self, parameter: Tensor | None, terms: Float[Tensor, "rows time ..."]) -> None:
        """Note a use whose gradient is the sum over time of `terms`, if the parameter is trained."""
        if parameter is not None and parameter.requires_grad:
            self.note_rows(parameter, terms.sum(dim=1, dtype=torch.float32 if terms.itemsize < 4 else None))

    def note_normalized(self, weight: Tensor, bias: Tensor | None, terms: Sequence[Tensor]) -> None:
        """Note a normalization, y = x̂ w + b with x̂ = (x − mean)·rstd.

        The terms are x, mean, rstd and the gradient of y, each of shape (rows, time, n) or (rows, time, 1).
        """
        x, mean, rstd, grad = terms
        if self.in_kernels and weight.requires_grad:
            from doppler_hf.privacy.clipping.fused_gradients import normalized_sums  # imports Triton

            of_weight, of_bias = normalized_sums(x, mean, rstd, grad)
            self.note_rows(weight, of_weight)
            if bias is not None and bias.requires_grad:
                self.note_rows(bias, of_bias)
            return
        if weight.requires_grad:
            self.note_sum(weight, (in_float32(x) - mean).mul_(rstd).mul_(grad))
        self.note_sum(bias, grad)

    def note_rows(self, parameter: Tensor, gradient: Float[Tensor, "rows ..."]) -> None:
        """Note the gradient of each row in full, for example of a parameter's copies."""
        # Sensitivity: the rows are added up before anything is clipped, so that an example is one vector of norm C at most,
        # however many rows it has.
        rows = in_float32(gradient).reshape(gradient.shape[0], -1)
        values = rows if rows.shape[0] == self.num_examples else rows.unflatten(0, (self.num_examples, -1)).sum(dim=1)
        # The norms of large gradients are computed now, while these are in the cache. Small gradients get one norm together,
        # later.
        self.note(parameter, Dense(values, row_norms(values).square() if values.numel() >= self.small else None))

    def _rows_as_sequences(self, factor: Shaped[Tensor, "rows time *rest"]) -> Shaped[Tensor, "examples _ *rest"]:
        """Return the rows of an example as one sequence, whose sum over time is the sum over all of them."""
        return factor if factor.shape[0] == self.num_examples else factor.unflatten(0, (self.num_examples, -1)).flatten(1, 2)


# --- norms and sums of all gradients --------------------------------------------------------------------------------------


def in_groups(gradients: Mapping[str, Gradient], group_of: Mapping[str, str], *, small: int) -> dict[Names, Gradient]:
    """Return the gradients by the names of their parameters, of which those in full of a group of clipping may be together.

    They are side by side, if each has fewer than `small` numbers.
    """
    found: dict[Names, Gradient] = {}
    together: dict[object, dict[str, Tensor]] = defaultdict(dict)
    for name, gradient in gradients.items():
        if isinstance(gradient, Dense) and gradient.values.numel() < small:
            together[group_of[name], gradient.values.dtype][name] = gradient.values
        else:
            found[name,] = gradient
    for values in together.values():
        found[*values] = Dense(torch.cat([*values.values()], dim=1))
    return found


class Squares:
    """Adds up squared norms by group of parameters, each of which is clipped on its own.

    Factors of products are compared with each other for many layers at a time, so that squares are known at the end alone.
    With `in_kernels` this takes one launch; else Gram matrices are made, with `halves` those of long texts by half.
    """

    def __init__(self, *, in_kernels: bool, halves: bool) -> None:
        self._in_kernels, self._longest_whole = in_kernels, BLOCK if halves else math.inf
        # The first list has products and look-ups that a kernel compares, with their group; the second has S of rounded
        # ones.
        self._for_kernels: list[tuple[str, Tensor, Tensor]] = []
        self._rounded: dict[str, list[Float[Tensor, " examples"]]] = defaultdict(list)
        self._found: dict[str, list[Float[Tensor, " examples"]]] = defaultdict(list)
        # Length and dtype → pairs of Gram matrices whose squares are still to be computed, with their groups.
        self._pairs: dict[object, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)

    def add(self, group: str, squares: Float[Tensor, " examples"]) -> None:
        """Add squared norms that are known."""
        self._found[group].append(squares)

    def compare(
        self,
        group: str,
        left: Float[Tensor, "examples time p"],
        right: Float[Tensor, "examples time q"] | Int[Tensor, "examples time"],
    ) -> None:
        """Add Σ_st L_st R_st of a product's factors, or of the values and the rows of a look-up."""
        if self._in_kernels:
            self._for_kernels.append((group, left.contiguous(), right.contiguous()))
            return
        of_left = self._gram(in_float32(left))
        if right.is_floating_point():
            of_right = self._gram(in_float32(right))
        else:
            ids = torch.nn.functional.pad(right, (0, of_left.shape[1] - right.shape[1]))
            of_right = (ids.unsqueeze(2) == ids.unsqueeze(1)).to(of_left.dtype)
        kind = of_left.shape[1], of_left.dtype
        pairs = self._pairs[kind]
        pairs.append((group, of_left, of_right))
        if len(pairs) * of_left.numel() >= AT_ONCE:
            self._compare(self._pairs.pop(kind))

    def norms(self) -> dict[str, Float[Tensor, " examples"]]:
        """Return the norms of the groups; not finite where the range of the dtype is too small for their squares."""
        for kind in tuple(self._pairs):
            self._compare(self._pairs.pop(kind))
        if self._for_kernels:
            self._compare_in_kernels()
        return {group: row_sums(torch.stack(found, dim=1)).clamp(min=0.0).sqrt() for group, found in self._found.items()}

    def roundings(self) -> dict[str, Float[Tensor, " examples"]]:
        """Return by how much rounding may raise the norm of f·g_i, over the clip factor f, by group.

        Sensitivity: with l a factor of bfloat16, f·l becomes f·(l + e) with |e| ≤ |l|·eps/2 in every number, of one example
        alone. By the triangle inequality ‖Σ_t e_t r_tᵀ‖ ≤ S·eps/2, and over the products of a group it is the root of the
        sum of squares. Numbers below bfloat16's range, 1e-38, have another error, which nothing notices.
        """
        half = HALF * torch.finfo(torch.bfloat16).eps
        return {group: half * row_norms(torch.stack(sizes, dim=1)) for group, sizes in self._rounded.items()}

    def _compare_in_kernels(self) -> None:
        from doppler_hf.privacy.clipping.fused_gradients import compare  # imports Triton

        groups, *pairs = zip(*self._for_kernels, strict=True)
        terms = compare([*zip(*pairs, strict=True)], vanished=VANISHED)
        products, sizes, norms = torch.stack(terms).unbind(dim=2)
        eps = torch.finfo(products.dtype).eps
        squares = torch.add(products, sizes, alpha=TERMS * eps).addcmul_(norms, norms, value=GUARD * eps)
        for group, square, norm, left, right in zip(groups, squares, norms, *pairs, strict=True):
            self._found[group].append(square)
            if left.dtype == right.dtype == torch.bfloat16:
                self._rounded[group].append(norm)

    def _compare(self, pairs: list[tuple[str, Tensor, Tensor]]) -> None:
        groups, lefts, rights = zip(*pairs, strict=True)
        left, right = (each[0] if len(each) == 1 else torch.cat(each) for each in (lefts, rights))
        of_left, of_right = (gram.diagonal(dim1=1, dim2=2) + VANISHED for gram in (left, right))
        sizes = row_sums((of_left * of_right).sqrt_())
        squares = dot(left, right)
        if left.shape[1] > self._longest_whole:
            blocks = (gram.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)) for gram in (left, right))
            squares = 2 * squares - dot(*(of_gram.diagonal(dim1=1, dim2=3) for of_gram in blocks))
        squares = torch.addcmul(squares, sizes, sizes, value=GUARD * torch.finfo(left.dtype).eps)
        for group, found in zip(groups, squares.view(len(groups), -1), strict=True):
            self._found[group].append(found)

    def _gram(self, rows: Float[Tensor, "rows time dim"]) -> Float[Tensor, "rows times times"]:
        """Return the inner products of each row's places, added up by halves of `dim` down to TILE."""
        if rows.shape[2] > TILE:
            first, second = rows.chunk(2, dim=2)
            return self._gram(first).add_(self._gram(second))
        time = rows.shape[1]
        if time <= self._longest_whole:
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
