"""One parameter's per-sample gradient, with what clipping needs of it: its norms and its weighted sum.

Sensitivity: row i of every tensor depends on example i alone, and the norm and the weighted sum are computed from the same
tensors in float32 or better, so that no rounding in a lower precision upstream can make w_i‖g_i‖ exceed the bound. Norms
come with bounds on their own rounding and on that of the sum of one example's terms, and are `raised` by a thousandth, in
every form alike: which form is the cheapest depends on what the example is padded to, and so on others. Where a bound is
larger, because terms cancel, or a square leaves the range of float32, norm and sum are computed again `in_float64`, whose
precision and range suffice for all that factors in float32 can give. Of what was added up before, in an order that padding
may change, the rounding counts too.
Here is the gradient in full; `factored` has the forms that need no matrix for each example.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from doppler_hf.linalg import in_float32
from doppler_hf.privacy.clipping.ghost_norm import RAISED_BY, UNDERFLOW, gamma

# Terms cancel if their sizes are so many times that of the example's gradient: the rounding of each is then 6e-5 of it. Of
# single parameters they often do, and exactly: attention does not see the bias of its keys.
CANCELLING = 2.0**10
# Numbers whose squares are added up in their own precision.
RUN = 64


class Norms(NamedTuple):
    """Norms of per-sample gradients, in float64."""

    values: Float[Tensor, " batch"]  # ‖g_i‖ as computed
    errors: Float[Tensor, " batch"]  # bounds on how far they are below the norms of what `add_weighted` adds

    def is_finite(self) -> Bool[Tensor, " batch"]:
        """Return whether the range of the dtype suffices."""
        return self.values.isfinite() & self.errors.isfinite()

    def are_certain(self) -> Bool[Tensor, " batch"]:
        """Return whether the range and the precision of float32 suffice."""
        return self.is_finite() & (self.errors <= RAISED_BY * torch.finfo(torch.float32).eps * self.values + UNDERFLOW)

    def raised(self, dtype: torch.dtype) -> Float[Tensor, " batch"]:
        """Return norms that rounding in this dtype leaves above those of what is added."""
        return self.values + torch.maximum(RAISED_BY * torch.finfo(dtype).eps * self.values, self.errors)


def joint(parts: Iterable[Norms]) -> Norms:
    """Return the norms of vectors whose parts have these; the norm of a sum is at most the sum of the norms."""
    return Norms(*(torch.stack(numbers).square().sum(dim=0).sqrt() for numbers in zip(*parts, strict=True)))


class PerSampleGradient(ABC):
    """The gradient of each example's loss with respect to one parameter."""

    @abstractmethod
    def norms(self) -> Norms:
        """Return ‖g_i‖ of every example; not finite if the range of the dtype is too small."""

    @abstractmethod
    def of_examples(self, kept: Bool[Tensor, " batch"]) -> "PerSampleGradient":
        """Return the gradients of the examples that are kept."""

    @abstractmethod
    def in_float64(self) -> "PerSampleGradient":
        """Return the same gradients, whose norms and sums are computed in float64."""

    @abstractmethod
    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + Σ w_i g_i, of the parameter's shape (modified in place)."""


class Dense(PerSampleGradient):
    """Per-sample gradients in full.

    `rounding` is what may be lost in adding them up, in the scale of `Norms.errors`; `precise` returns the values of some
    examples in float64 as if nothing had been rounded, where that is other than the values.
    """

    def __init__(
        self,
        values: Float[Tensor, "batch ..."],
        *,
        rounding: Float[Tensor, " batch"] | None = None,
        precise: Callable[[Bool[Tensor, " batch"]], Float[Tensor, "kept ..."]] | None = None,
    ) -> None:
        self.values, self.precise = values, precise
        self.rounding = values.new_zeros(len(values), dtype=torch.float64) if rounding is None else rounding
        norms = norms_in_full(values)  # at once, while the values are still in the cache
        self._norms = norms._replace(errors=norms.errors + self.rounding)

    def norms(self) -> Norms:
        """Return ‖g_i‖ of every example."""
        return self._norms

    def of_examples(self, kept: Bool[Tensor, " batch"]) -> "Dense":
        """Return the gradients of the examples that are kept."""
        precise = None
        if (of_all := self.precise) is not None:

            def precise(inner: Bool[Tensor, " kept"]) -> Float[Tensor, "kept ..."]:
                return of_all(kept.masked_scatter(kept, inner))

        return Dense(self.values[kept], rounding=self.rounding[kept], precise=precise)

    def in_float64(self) -> "Dense":
        """Return the same gradients in float64."""
        if self.precise is None:
            return Dense(self.values.double())
        return Dense(self.precise(torch.ones_like(self.rounding, dtype=torch.bool)))

    def add_weighted(self, total: Float[Tensor, "..."], weights: Float[Tensor, " batch"], *, beta: int = 1) -> None:
        """Set `total` to beta·total + Σ w_i g_i (modified in place)."""
        values = in_float32(self.values).reshape(len(self.values), total.numel())
        total.view(-1).addmv_(values.t(), weights.to(values.dtype), beta=beta)


def sum_of_products(
    left: Float[Tensor, "rows *groups time p"],
    right: Float[Tensor, "rows *groups time q"],
    *,
    num_examples: int,
    shape: torch.Size,
) -> Dense:
    """Return Σ_t l_t r_tᵀ of every example, formed, over all rows of it."""
    of_rows = in_float32(left).mT @ in_float32(right)
    of_left, of_right = (_norms_of_last(in_float32(factor)) for factor in (left, right))

    def again(kept: Bool[Tensor, " rows"]) -> Float[Tensor, "kept *groups p q"]:
        return left[kept].double().mT @ right[kept].double()

    sizes = (of_left * of_right).flatten(1)
    return _sum_of_rows(of_rows, sizes, again, num_examples=num_examples, shape=shape)


def sum_over_time(terms: Float[Tensor, "rows time ..."], *, num_examples: int, shape: torch.Size) -> Dense:
    """Return the sum over time and rows of every example; see `sum_of_products`."""
    terms = in_float32(terms)
    sizes = _norms_of_last(terms.reshape(*terms.shape[:2], -1))

    def again(kept: Bool[Tensor, " rows"]) -> Float[Tensor, "kept ..."]:
        return terms[kept].double().sum(dim=1)

    return _sum_of_rows(terms.sum(dim=1), sizes, again, num_examples=num_examples, shape=shape)


def _norms_of_last(values: Float[Tensor, "*shape n"]) -> Float[Tensor, "*shape"]:
    """Return the norms along the last dimension, of a copy where torch would take four times as long to jump in memory."""
    return torch.linalg.vector_norm(values.contiguous(), dim=-1)


def _sum_of_rows(
    of_rows: Float[Tensor, "rows ..."],
    sizes: Float[Tensor, "rows time"],
    again: Callable[[Bool[Tensor, " rows"]], Float[Tensor, "kept ..."]],
    *,
    num_examples: int,
    shape: torch.Size,
) -> Dense:
    """Return the sums over the rows of every example; `sizes` are the norms of all terms, `again` is precise."""
    # Sensitivity: in what order terms are added depends on what the example is padded to, and so on others; where they
    # cancel, its clipped gradient would depend on it too. In float64 it does so by less than 1e-9 of their sizes.
    views = len(of_rows) // num_examples
    values = of_rows.reshape(num_examples, views, *shape).sum(dim=1) if views > 1 else of_rows.reshape(-1, *shape)
    size = sizes.view(num_examples, -1).sum(dim=1, dtype=torch.float64)
    found = Dense(values, rounding=size * (RAISED_BY * torch.finfo(values.dtype).eps / CANCELLING))
    if not (size > CANCELLING * found.norms().values).any():
        return found  # whose factors can be freed: the whole gradient is no smaller than this part

    def precise(kept: Bool[Tensor, " batch"]) -> Float[Tensor, "kept ..."]:
        return again(kept.repeat_interleave(views)).reshape(-1, views, *shape).sum(dim=1)

    return Dense(values, rounding=found.rounding, precise=precise)


def sum_in_full(parts: Sequence[Dense]) -> Dense:
    """Return the sum of gradients in full."""
    # A new tensor: a gradient may be shared with another parameter.
    total = sum((in_float32(part.values) for part in parts[1:]), in_float32(parts[0].values).clone())

    def precise(kept: Bool[Tensor, " batch"]) -> Float[Tensor, "kept ..."]:
        return torch.stack([part.of_examples(kept).in_float64().values for part in parts]).sum(dim=0)

    return Dense(total, rounding=torch.stack([part.rounding for part in parts]).sum(dim=0), precise=precise)


def norms_in_full(values: Float[Tensor, "batch ..."]) -> Norms:
    """Return the norm of every example's numbers.

    Four million equal numbers added in float32 are off by 0.3 %, so only short runs are, and their norms in float64. Squares
    and sums below the smallest normal number may vanish.
    """
    values = in_float32(values).reshape(len(values), math.prod(values.shape[1:]))
    if values.shape[1] % RUN or values.shape[1] < RUN**2:
        norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
        return Norms(norms, torch.zeros_like(norms))
    runs = torch.linalg.vector_norm(values.view(len(values), values.shape[1] // RUN, RUN), dim=2)
    lost = 2 * torch.finfo(values.dtype).smallest_normal * values.shape[1]
    norms = torch.linalg.vector_norm(runs, dim=1, dtype=torch.float64)
    # A run's square is off by γ_RUN, and its root is rounded once.
    return Norms(norms, norms * gamma(RUN + 4, values.dtype) + math.sqrt(lost))
