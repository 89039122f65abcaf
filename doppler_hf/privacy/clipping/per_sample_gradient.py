"""Per-sample gradients of a parameter, as the tensors of which they are computed, and their sums.

    Dense      g_i in full                      values (examples, n)
    Product    g_i = Σ_t l_it r_itᵀ             left (examples, time, p), right (examples, time, q)
    Lookup     g_i = Σ_t e(id_it) v_itᵀ         ids (examples, time), values (examples, time, dim), e(k) a unit vector

A table that is looked up and also multiplies, such as a language model's embedding and head, has a product and a look-up,
whose sum is its gradient. Norms are in `norms`. The sum Σ w_i g_i of a product is one product of matrices over examples and
time (*book-keeping*: Bu et al. 2023, https://arxiv.org/abs/2210.00038).

Sensitivity: row i of every tensor depends on example i alone. Norm and sum come from the same numbers, and are added up in
float32 or better, so that no rounding in a lower precision upstream can make w_i‖g_i‖ exceed the bound. For the rounding of
`kernels.weighed` the factor w_i is lowered. Which form a gradient has follows from shapes, never from the data.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from doppler_hf.linalg import in_float32, product_in_float32

NormRule = Literal["auto", "ghost", "direct"]

# The cost of writing one number to memory and reading it twice, in multiply-adds. Fitted on two x86-64 cores; any value
# between 25 and 400 makes the same choices for a RoBERTa of 384 with 64 tokens and for ViT-tiny with 197.
MEMORY_COST = 50


@dataclass(frozen=True)
class Weights:
    """What the examples' gradients are multiplied by, in a sum from which those that are not finite are left out."""

    factors: Float[Tensor, " examples"]  # 0 where the gradient is not finite
    finite: Bool[Tensor, " examples"] | None  # None where it is known that all are
    zero: Float[Tensor, ""]  # on their device: a number would be brought there for each tensor

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
        return self.cleaned(values) * factors[:, None, None]  # a copy: other layers of a residual stream share the values


@dataclass(frozen=True, eq=False)
class Dense:
    """The gradient in full; of several parameters, one after another."""

    values: Float[Tensor, "examples n"]
    squares: Float[Tensor, " examples"] | None = None  # of its norms, if they are known

    def weighted(self, weights: Weights, total: Tensor | None) -> Float[Tensor, "..."]:
        """Return Σ w_i g_i, added to `total` if there is one (modified in place)."""
        values, factors = weights.cleaned(self.values.unsqueeze(2)).squeeze(2), weights.factors
        factors = factors.to(values.dtype)
        return torch.mv(values.t(), factors) if total is None else total.view(-1).addmv_(values.t(), factors)


@dataclass(frozen=True, eq=False)
class Product:
    """The gradient of a matrix that multiplies: the layer's inputs and the gradients of its outputs."""

    left: Float[Tensor, "examples time p"]
    right: Float[Tensor, "examples time q"]
    is_weighted: bool = False  # as `kernels.weighed` returns it

    def weighted(self, weights: Weights, total: Tensor | None) -> Float[Tensor, "..."]:
        """Return Σ w_i Σ_t l_it r_itᵀ, added to `total` if there is one (modified in place)."""
        left, right = self.left, self.right
        if not self.is_weighted and left.shape[2] <= right.shape[2]:
            left, right = weights.times(left), in_float32(weights.cleaned(right))
        elif not self.is_weighted:
            left, right = in_float32(weights.cleaned(left)), weights.times(right)
        left, right = left.flatten(0, 1).mT, right.flatten(0, 1)
        if total is None:
            return product_in_float32(left, right)
        flat = total.view(len(left), -1)
        if left.dtype == right.dtype == flat.dtype:
            return flat.addmm_(left, right)
        return flat.add_(product_in_float32(left, right))


@dataclass(frozen=True, eq=False)
class Lookup:
    """The gradient of an embedding: the rows that were looked up, and the gradients of what was found."""

    ids: Int[Tensor, "examples time"]
    values: Float[Tensor, "examples time dim"]

    def weighted(self, weights: Weights, total: Tensor | None) -> Float[Tensor, "rows dim"]:
        """Return `total`, of the table's shape, with w_i v_it added to row id_it (modified in place)."""
        assert total is not None
        return total.index_add_(0, self.ids.flatten(), weights.times(self.values).flatten(0, 1).to(total.dtype))

    def densified(self, shape: torch.Size) -> Dense:
        """Return the same gradient as one table for each example, for a parameter of this shape."""
        values = in_float32(self.values)
        place = self.ids + torch.arange(0, len(values) * shape[0], shape[0], device=values.device).unsqueeze(1)
        tables = values.new_zeros(len(values) * shape[0], shape[1])
        return Dense(tables.index_add_(0, place.flatten(), values.flatten(0, 1)).view(len(values), -1))


Use = Dense | Product | Lookup  # the gradient of one use of a parameter
PerSampleGradient = list[Use]  # one of them, or a product and a look-up, which are added up
Names = tuple[str, ...]  # of parameters whose gradients are taken together


def has_terms(gradient: Use) -> Bool[Tensor, " examples"]:
    """Return for every example whether its gradient has terms other than zero; 0·∞ is none of others."""
    factors = (gradient.left, gradient.right) if isinstance(gradient, Product) else (gradient.values,)
    found = [((factor != 0) & factor.isfinite()).flatten(1).any(dim=1) for factor in factors]
    return torch.stack(found).all(dim=0)


def formed(left: Float[Tensor, "*rows time p"], right: Float[Tensor, "*rows time q"]) -> Float[Tensor, "*rows p q"]:
    """Return Σ_t l_t r_tᵀ of every row, formed."""
    return product_in_float32(left.mT, right)


def summed(terms: Float[Tensor, "rows time n"]) -> Float[Tensor, "rows n"]:
    """Return the sum over time of every row."""
    return terms.sum(dim=1, dtype=torch.float32 if terms.itemsize < 4 else None)


def is_formed(time: int, p: int, q: int, *, rule: NormRule) -> bool:
    """Return whether the matrix of each example is to be formed, of p·q elements from so many positions.

    Per example, with p·q elements and T positions: the ghost norm costs T²(p + q) multiply-adds on top of the one product
    that the sum needs. The direct gradient *is* that product; writing and reading it costs MEMORY_COST·pq, and it takes pq
    numbers of memory instead of T(p + q). It is chosen if it takes less of both.
    """
    if rule != "auto":
        return rule == "direct"
    return MEMORY_COST * p * q <= time * time * (p + q) and p * q <= time * (p + q)


def combined(uses_of: dict[Tensor, list[Use]], parameters: Mapping[str, Tensor]) -> dict[str, PerSampleGradient]:
    """Return by name one gradient for all uses of a parameter in one forward pass, and forget them (modified in place).

    The norm is that of the sum, so uses are never treated separately: products and look-ups of several calls are joined
    along time, which includes the cross terms between the calls. Those in full have been added up.
    """
    found: dict[str, PerSampleGradient] = {}
    for name, parameter in parameters.items():
        # Each is forgotten at once, so that its memory is free for the next one.
        uses = found[name] = uses_of.pop(parameter, [])
        if len(uses) < 2:
            continue
        products = [(use.left, use.right) for use in uses if isinstance(use, Product)]
        lookups = [(use.ids, use.values) for use in uses if isinstance(use, Lookup)]
        if len(products) + len(lookups) < len(uses):
            found[name] = [in_full(uses, shape=parameter.shape)]
        else:
            found[name] = [
                *([Product(*joined(products))] if products else []),
                *([Lookup(*joined(lookups))] if lookups else []),
            ]
    return {name: gradient for name, gradient in found.items() if gradient}


def in_full(uses: Sequence[Use], *, shape: torch.Size) -> Dense:
    """Return the sum of several uses in full."""
    # Last what is in full already, since it may be autograd's own and must not be written into.
    first, *others = sorted(uses, key=lambda use: (isinstance(use, Dense), isinstance(use, Product)))
    assert not isinstance(first, Dense)
    total = formed(first.left, first.right).flatten(1) if isinstance(first, Product) else first.densified(shape).values
    for use in others:
        if isinstance(use, Product):  # without memory of its own, since the head of a language model is large
            matrices = total.view(len(total), use.left.shape[2], -1)
            matrices.baddbmm_(in_float32(use.left).mT, in_float32(use.right))
        else:
            total.add_(use.values if isinstance(use, Dense) else use.densified(shape).values)
    return Dense(total)


def joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return both tensors of the pairs, joined along time."""
    first, second = zip(*pairs, strict=True)
    return torch.cat(first, dim=1), torch.cat(second, dim=1)


def in_groups(
    gradients: Mapping[str, PerSampleGradient], group_of: Mapping[str, str], *, small: int
) -> dict[Names, PerSampleGradient]:
    """Return the gradients by the names of their parameters, of which those in full of a group of clipping may be together.

    They are side by side, if each has fewer than `small` numbers.
    """
    found: dict[Names, PerSampleGradient] = {}
    together: dict[object, dict[str, Dense]] = {}
    for name, gradient in gradients.items():
        if isinstance(first := gradient[0], Dense) and first.values.numel() < small:
            together.setdefault((group_of[name], first.values.dtype), {})[name] = first
        else:
            found[name,] = gradient
    for dense in together.values():
        found[*dense] = [Dense(torch.cat([each.values for each in dense.values()], dim=1))]
    return found
