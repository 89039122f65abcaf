"""What the layers of a model note during one forward and one backward pass: each use of a trained parameter."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from doppler_hf.linalg import in_float32, row_norms
from doppler_hf.privacy.clipping.per_sample_gradient import (
    Dense,
    Lookup,
    NormRule,
    Product,
    Use,
    formed,
    has_terms,
    in_full,
    is_formed,
    summed,
)

# Gradients in full with fewer numbers have one norm and one sum together, for which they are copied; on a GPU, which is
# quicker with many numbers than with many kernels, of more.
SMALL, SMALL_IN_KERNELS = 2**16, 2**20


class Notes:
    """The notes that layers make during one forward and backward pass; see `clear` for what is noted.

    With `in_kernels` they are for `kernels`: factors are kept in half precision, contiguous and of one dtype.
    """

    def __init__(self, *, norm_rule: NormRule, in_kernels: bool) -> None:
        self.is_formed = functools.partial(is_formed, rule=norm_rule)  # whether a matrix's gradient is formed for each row
        self.in_kernels = in_kernels
        self.small = SMALL_IN_KERNELS if in_kernels else SMALL
        self.is_in_forward = self._is_unwatched = False
        self.casts: dict[tuple[Tensor, torch.dtype], Tensor] = {}  # of a forward pass, in which no weight changes
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
        # A use has as many rows of each, one after another: one, or its views, choices or windows. They are added up.
        self.num_examples = 1
        self.uses: dict[Tensor, list[Use]] = {}  # of each parameter, filled by the backward pass
        self.repeated: list[str] = []  # layers whose output has no batch and was repeated for each example
        self.failed: dict[str, Exception] = {}  # layers without a rule, and why functorch does not fit them
        # In a check, the examples whose losses are differentiated: gradients are then compared, not kept.
        self.examined: Bool[Tensor, " examples"] | None = None
        self.coupled: set[Tensor] = set()  # parameters at which these have a gradient in the places of others

    def note(self, parameter: Tensor, gradient: Use) -> None:
        """Note one use of a parameter, or in a check look for others than those that have a loss."""
        if self.examined is None:
            uses = self.uses.setdefault(parameter, [])
            if isinstance(gradient, Dense) and (dense := [use for use in uses if isinstance(use, Dense)]):
                uses.remove(dense[0])
                gradient = Dense(gradient.values + dense[0].values)
            uses.append(gradient)
            return
        if has_terms(gradient)[~self.examined.to(parameter.device)].any():
            self.coupled.add(parameter)

    def note_product(
        self, parameter: Tensor, left: Float[Tensor, "rows time p"], right: Float[Tensor, "rows time q"]
    ) -> None:
        """Note a use whose gradient is Σ_t left_t right_tᵀ, of p·q elements."""
        # Of each row, if that is worth it already: to join the patches of images would take longer than to add products.
        if self.is_formed(left.shape[1], left.shape[2], right.shape[2]):
            self.note_rows(parameter, formed(left, right))
            return
        left, right = self._joined(left), self._joined(right)
        if self.in_kernels:
            left, right = left.contiguous(), right.contiguous()
            if left.dtype != right.dtype:
                left, right = in_float32(left), in_float32(right)
        # A language model's head is called for a part of an example's tokens at a time.
        uses = self.uses.get(parameter, [])
        summands = [*(use for use in uses if not isinstance(use, Lookup)), Product(left, right)]
        time = sum(use.left.shape[1] for use in summands if isinstance(use, Product))
        if self.is_formed(time, left.shape[2], right.shape[2]) or any(isinstance(use, Dense) for use in summands):
            uses[:] = [use for use in uses if isinstance(use, Lookup)]
            self.note(parameter, in_full(summands, shape=parameter.shape))
        else:
            self.note(parameter, summands[-1])

    def note_lookup(self, parameter: Tensor, ids: Int[Tensor, "rows time"], values: Float[Tensor, "rows time dim"]) -> None:
        """Note a use that looks up rows of a table, whose gradients are `values`."""
        use = Lookup(self._joined(ids), self._joined(values))
        # A table of a few rows, such as token types, is smaller than what it is computed from.
        self.note(parameter, use.densified(parameter.shape) if len(parameter) <= use.ids.shape[1] else use)

    def note_sum(self, parameter: Float[Tensor, "*shape"] | None, terms: Float[Tensor, "rows time *shape"]) -> None:
        """Note a use whose gradient is the sum over time of `terms`, if the parameter is trained."""
        if parameter is not None and parameter.requires_grad:
            self.note_rows(parameter, summed(terms.flatten(2) if terms.ndim > 2 else terms.unsqueeze(2)))

    def note_normalized(self, weight: Tensor, bias: Tensor | None, terms: Sequence[Tensor]) -> None:
        """Note a normalization, y = x̂ w + b with x̂ = (x − mean)·rstd.

        The terms are x, mean, rstd and the gradient of y, each of shape (rows, time, n) or (rows, time, 1).
        """
        x, mean, rstd, grad = terms
        if self.in_kernels and weight.requires_grad:
            from doppler_hf.privacy.clipping.kernels import normalized_sums  # imports Triton

            of_weight, of_bias = normalized_sums(x, mean, rstd, grad)
            self.note_rows(weight, of_weight)
            if bias is not None and bias.requires_grad:
                self.note_rows(bias, of_bias)
            return
        if weight.requires_grad:
            self.note_rows(weight, summed((in_float32(x) - mean).mul_(rstd).mul_(grad)))
        self.note_sum(bias, grad)

    def note_rows(self, parameter: Tensor, gradient: Float[Tensor, "rows ..."]) -> None:
        """Note the gradient of each row in full, as of a parameter's copies."""
        # Sensitivity: the rows are added up before anything is clipped, so that an example is one vector of norm C at most,
        # however many rows it has.
        rows = in_float32(gradient).reshape(gradient.shape[0], -1)
        values = rows if rows.shape[0] == self.num_examples else rows.unflatten(0, (self.num_examples, -1)).sum(dim=1)
        # Large ones now, while they are in the cache; of small ones there is one norm together.
        self.note(
            parameter,
            Dense(values, row_norms(values).square() if values.numel() >= self.small else None),
        )

    def _joined(self, factor: Shaped[Tensor, "rows time *rest"]) -> Shaped[Tensor, "batch views*time *rest"]:
        """Return the rows of an example as one sequence, whose sum over time is the sum over all of them."""
        return factor if factor.shape[0] == self.num_examples else factor.unflatten(0, (self.num_examples, -1)).flatten(1, 2)
