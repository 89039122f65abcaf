"""Per-sample clipping: a sum over examples, to which each example contributes a vector of norm at most C.

*flat* uses one norm over all trainable parameters. *per_layer* clips each of the L layers to C/√L separately, so that the
whole still has norm at most √(L·C²/L) = C. The clip factor of an example follows from its norm:

    vanilla     clip(g) = min(1, C/‖g‖)·g                  (Abadi et al. 2016, https://arxiv.org/abs/1607.00133)
    automatic   clip(g) = C/max(‖g‖, γ)·g                  (after Bu et al. 2023, https://arxiv.org/abs/2206.07136)

With both, the sensitivity of the sum is C. Because γ is tiny, automatic clipping scales nearly every gradient to norm C.
With per_layer, the gradient of a layer may well be below γ, and then this layer contributes less than its C/√L.

Under automatic clipping well-fitted examples would count as much as misclassified ones, and a classifier would drift to the
majority class. So the gradients of a classifier are also multiplied by `shares_of_error`. Before clipping, norms are raised
by the largest possible rounding error.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from doppler_hf import triton_support
from doppler_hf.errors import Failure, Refusal
from doppler_hf.linalg import highest_matmul_precision, row_norms
from doppler_hf.privacy.clipping.engine import BookKeepingEngine
from doppler_hf.privacy.clipping.gradients import (
    Gradient,
    Names,
    NormRule,
    Notes,
    Squares,
    Weights,
    in_groups,
)

Clipping = Literal["automatic", "vanilla"]
Granularity = Literal["flat", "per_layer"]
Engine = Literal["book_keeping", "opacus"]

SMALLEST_NORM: Final = 0.01
# Norms are raised by so many eps (a thousandth in float32), so that they are never below the true norms in spite of
# rounding.
RAISED_BY: Final = 2**13
# The squares of much smaller numbers would underflow in float32.
SMALLEST_BOUND: Final = 1e-12


class ClippedGradients:
    """A context in which a model's per-sample gradients are clipped and summed.

    Args:
        model: The model; its trainable parameters (`requires_grad`) are clipped together. It is not wrapped: parameter
            names and checkpoints stay as they are.
        max_grad_norm: C, the clip norm: the largest norm that one example contributes.
        clipping: "vanilla" or "automatic".
        granularity: "flat" or "per_layer".
        engine: How per-sample gradients are computed. "book_keeping" keeps them as factors and costs about as much as
            ordinary training; "opacus" computes them with Opacus's samplers (`opacus_layers`), slowly, as a reference.
        norm_rule: How "book_keeping" computes the norm of a matrix's gradient: "ghost" from its factors, "direct" from
            the matrix itself, "auto" the cheaper way for each layer and length; see `Notes.is_formed`.
        rows_per_loss: The number of consecutive input rows for each loss, such as 2 for the two answers of a pair.

    Attributes:
        engine_name: `engine`.
        parameters: The trainable parameters by name.
        on_accelerator: Whether the model is on an accelerator, so that no operation may wait for the device.
        in_kernels: Whether norms and sums are computed by `fused_gradients`. Set both before the context is entered.
        num_non_finite: Number of examples since the last `reset` whose gradient, or its squared norm, is not finite; a
        tensor
            on the device. These examples contribute nothing.

    Raises:
        ValueError: If an option is unknown, the clip norm is not positive, there is nothing to train, or a layer has no
            per-sample gradient, by name.

    Example:
        >>> with ClippedGradients(model, max_grad_norm=1.0, clipping="vanilla") as clipped:
        ...     norms = clipped.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        ...     total = clipped.sums["weight"]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_grad_norm: float = 1.0,
        clipping: Clipping = "vanilla",
        granularity: Granularity = "flat",
        engine: Engine = "book_keeping",
        norm_rule: NormRule = "auto",
        rows_per_loss: int = 1,
    ) -> None:
        if not SMALLEST_BOUND <= max_grad_norm < float("inf"):
            raise Refusal(
                "out-of-range",
                f"The clip norm max_grad_norm must be finite and at least {SMALLEST_BOUND:g}; got {max_grad_norm}.",
            )
        for name, value, choices in (
            ("clipping", clipping, get_args(Clipping)),
            ("granularity", granularity, get_args(Granularity)),
            ("engine", engine, get_args(Engine)),
            ("norm_rule", norm_rule, get_args(NormRule)),
        ):
            if value not in choices:
                raise Refusal(
                    "unknown-value",
                    f"The argument {name} of ClippedGradients must be one of {', '.join(choices)}; got {value!r}.",
                )
        if engine == "opacus" and norm_rule != "auto":
            raise Refusal("no-effect", f"norm_rule={norm_rule!r} has no effect with engine='opacus'. Leave norm_rule out.")
        self._model = model
        self.max_grad_norm = max_grad_norm
        self._clipping = clipping
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise Refusal(
                "nothing-trained", "The model has no trainable parameter. Set requires_grad=True for some parameters."
            )
        self.engine_name, self._norm_rule, self._rows_per_loss = engine, norm_rule, rows_per_loss
        # Sensitivity: where PEFT ties adapters, two parameters share their storage. They count as two blocks of coordinates,
        # each with its own gradient. C bounds the norm over both, and each gets its own noise. The shared weights then get
        # both steps, which is post-processing.
        self.parameters = trainable
        self._shapes = {name: parameter.shape for name, parameter in trainable.items()}
        self._dtypes = {name: parameter.dtype for name, parameter in trainable.items()}
        self._as_made = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        dtypes = sorted({self._sum_dtype(name) for name in trainable}, key=lambda dtype: torch.finfo(dtype).eps)
        self._finest, self._coarsest = dtypes[0], dtypes[-1]  # the dtypes in which sums are computed
        self._group_of = {name: "" if granularity == "flat" else name.rpartition(".")[0] for name in trainable}
        self._engine: BookKeepingEngine | None = None
        devices = {parameter.device for parameter in trainable.values()}
        self.in_kernels = self._finest != torch.float64 and all(map(triton_support.are_usable, devices))
        self.on_accelerator = self.in_kernels or all(device.type != "cpu" for device in devices)
        self.reset()

    @property
    def sums(self) -> dict[str, Float[Tensor, "..."]]:
        """Parameter name → Σ clip(gᵢ) since the last `reset`, in float32 or better. Not private: it has no noise yet.

        The sums are over this process's examples, and have the shape of whole parameters, even if weights are in shards.
        """
        for name in self.parameters.keys() - self._sums.keys():
            self._sums[name] = self._zeros(name)
        return {name: self._sums[name] for name in self.parameters}

    @property
    def fallbacks(self) -> dict[str, str]:
        """Layer name → how its gradient is computed without a rule, and the cost; complete after the first `backward`."""
        layers = {} if self._engine is None else self._engine.without_rule
        return {name: layer.fallback for name, layer in layers.items() if layer.fallback}

    def __enter__(self) -> "ClippedGradients":
        notes = Notes(norm_rule=self._norm_rule, in_kernels=self.in_kernels)
        by_opacus = self.engine_name == "opacus"
        self._engine = BookKeepingEngine(self._model, notes, by_opacus=by_opacus, rows_per_loss=self._rows_per_loss)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._engine is not None:
            self._engine.detach()
            self._engine = None

    def backward(
        self,
        losses: Float[Tensor, " rows"],
        *,
        weights: Float[Tensor, " batch"] | None = None,
        views: int = 1,
        is_cross_entropy: bool = False,
    ) -> Float[Tensor, " batch"]:
        """Back-propagate one loss per example and add the clipped per-sample gradients to `sums`.

        With K views, an example is K consecutive rows of the batch, and the mean of their gradients is clipped once:
        *augmentation multiplicity* (De et al. 2022, https://arxiv.org/abs/2204.13650). The sensitivity stays C.

        Since the context was entered, the forward passes of the layers are replaced. In this pass they note the factors of
        each gradient (`torch_layers`, `gradients`). Ordinary gradients in `.grad` are discarded.

        Args:
            losses: One loss per row, shape (batch·views,), from a call of the model with these rows. A row's loss must
                depend on that row alone: no mean over the batch's tokens, no term over the batch.
            weights: Factors of the clipped gradients, shape (batch,), which are clamped to [0, 1]; by default 1. If several
                examples belong to one unit of privacy and their weights add up to 1 or less, the unit contributes at most C.
                An example of weight 0 adds nothing, whatever its gradient.
            views: K, the number of rows of each example; by default 1.
            is_cross_entropy: Whether a loss is −log p of one right class. Automatic clipping then multiplies an example's
                gradient, at norm C, by min(1, 2(1 − p)).

        Returns:
            Per-sample gradient norms over all trainable parameters, before clipping, shape (batch,). They are above
            the true norms where terms cancel, see `gradients`. They are not private.

        Raises:
            ValueError: If `losses` or `weights` have another shape, or the first dimension of a per-sample gradient is not
                the batch.
            RuntimeError: If it is called outside the `with` block.
        """
        if self._engine is None:
            raise Failure(
                "backward-outside",
                "ClippedGradients.backward was called outside of its `with` block. Call it inside the block.",
            )
        if losses.ndim != 1:
            raise Refusal("wrong-shape", f"Expected losses of shape (batch,), one per record; got {losses.ndim} dimensions.")
        # Sensitivity: if some views of an example were grouped with another example's, it would contribute to two clipped
        # gradients.
        if views < 1 or len(losses) % views:
            raise Refusal(
                "out-of-range",
                "views, the number of augmented versions of each record, must be at least 1 and divide the number of "
                f"losses; got {views}. Pass all versions of a record next to each other, in one call of the model.",
            )
        batch_size = len(losses) // views
        if weights is not None and weights.shape != (batch_size,):
            # The message has no weights, because the number of examples of a unit is private, and messages end up in logs.
            raise Refusal(
                "wrong-shape",
                "Expected weights of shape (batch,), one per record; got another shape. Return one weight for each loss.",
            )
        if any(each.requires_grad is not is_trained for each, is_trained in self._as_made):
            self.refuse_other_parameters()
        if len(losses) == 0:
            return losses.detach()
        # Autocast, and every mode that rounds the factors of a product, is switched off here, because the bound on rounding
        # holds for float32 numbers only.
        with torch.autocast(losses.device.type, enabled=False), highest_matmul_precision():
            gradients = self._engine.per_sample_gradients(losses, self.parameters, views=views)
            if is_cross_entropy and self._clipping == "automatic":
                # Sensitivity: the share of error is in [0, 1] and depends on the example alone, so the example contributes
                # at most C.
                shares = shares_of_error(losses).unflatten(0, (batch_size, views)).mean(dim=1)
                weights = shares if weights is None else shares * weights
            return self._add_clipped(gradients, weights)

    @contextlib.contextmanager
    def unclipped(self, sums: Mapping[str, Tensor]) -> Iterator[None]:
        """Add gradients without clipping to `sums`, and reference gradients with a negative sign; reset all afterwards."""
        assert self._engine is not None
        before = self.max_grad_norm, self._clipping
        self.reset()
        self._sums |= sums
        try:
            # No norm reaches this bound, so nothing is clipped.
            self.max_grad_norm, self._clipping = 1e30, "vanilla"
            yield
        finally:
            self.max_grad_norm, self._clipping = before
            self.reset()

    def coupled(self, losses: Float[Tensor, " rows"], *, examined: Bool[Tensor, " rows"]) -> list[str]:
        """Return the parameters at which the losses of the examined examples have a gradient in other examples' rows."""
        assert self._engine is not None
        return self._engine.coupled(losses, self.parameters, examined=examined)

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        """Switch the engine off inside the block, so that a backward pass leaves ordinary gradients in `.grad`."""
        assert self._engine is not None
        return self._engine.notes.unwatched()

    def reset(self) -> None:
        """Set the sums to zero for the next batch."""
        self._sums: dict[str, Tensor] = {}
        device = next(iter(self.parameters.values())).device
        # The dtype is the same on all processes, even on one without examples, because the sums are added up.
        self.num_non_finite = torch.zeros((), dtype=self._finest, device=device)

    def refuse_other_parameters(self) -> None:
        """Refuse parameters that were frozen, unfrozen, replaced, resized or converted since the context was made."""
        # Sensitivity: the norm is over the parameters that were trainable at first. The gradient of another parameter would
        # be added without clipping.
        parameters = dict(self._model.named_parameters())
        now = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if now != self.parameters.keys():
            name = min(now ^ self.parameters.keys())
            raise Refusal(
                "trained-parameters-changed",
                f"The parameter {name!r} was {'unfrozen' if name in now else 'frozen'} after training began, but the set "
                "of trained parameters must stay the same: clipping covers only the parameters that were trainable at the "
                "start. Set requires_grad before train(), and remove the callback that changes it.",
            )
        for name, parameter in parameters.items():
            # Sensitivity: the engine does not see a layer that has replaced another layer.
            known = self.parameters.get(name)
            if known is not None and parameter is not known and not isinstance(parameter, DTensor):
                raise Refusal(
                    "replaced-parameter",
                    f"The parameter {name!r} was replaced by another one during training, so its gradients would not be "
                    "private. Change layers and adapters before train().",
                )
            if known is not None and parameter.shape != self._shapes[name]:
                raise Refusal(
                    "parameter-resized",
                    f"The shape of the parameter {name!r} was changed from {tuple(self._shapes[name])} to "
                    f"{tuple(parameter.shape)} during training, for example by resize_token_embeddings, so that the "
                    "optimizer's state no longer fits. Change the model before train().",
                )
            if known is not None and parameter.dtype != self._dtypes[name]:
                raise Refusal(
                    "parameter-converted",
                    f"The parameter {name!r} was converted from {self._dtypes[name]} to {parameter.dtype} during training, "
                    "but the checks of a run are for the precision with which it began. Convert a copy: "
                    f"copy.deepcopy(model).to({parameter.dtype}).",
                )

    def train_the_same_parameters(self) -> None:
        """Give each parameter of the model the `requires_grad` that it had when the context was made."""
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name in self.parameters)

    def _sum_dtype(self, name: str) -> torch.dtype:
        return torch.promote_types(self.parameters[name].dtype, torch.float32)

    def _zeros(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        return torch.zeros(parameter.shape, dtype=self._sum_dtype(name), device=parameter.device)

    @torch.no_grad()
    def _add_clipped(
        self, gradients: dict[str, Gradient], weights: Float[Tensor, " batch"] | None
    ) -> Float[Tensor, " batch"]:
        # Sensitivity: row i of every tensor depends on example i alone. Norms and sums are computed from the same numbers,
        # and a layer that this micro-batch did not use contributes 0 to the norm, exactly as it does to the sum.
        assert self._engine is not None
        found = in_groups(gradients, self._group_of, small=self._engine.notes.small)
        gradients.clear()  # The memory of each is then freed as soon as it is in the sum.
        squares = Squares(in_kernels=self.in_kernels, halves=not self.on_accelerator)
        for names in found:
            found[names].add_squares(squares, self._group_of[names[0]])
        norms_of = squares.norms()
        norms = row_norms(torch.stack([*norms_of.values()], dim=1))
        self._add_sums(found, self._weights(norms_of, squares.roundings(), norms.isfinite(), weights))
        left_out = ~norms.isfinite() if weights is None else ~norms.isfinite() & (weights > 0)
        self.num_non_finite = self.num_non_finite + left_out.sum()
        return norms

    def _weights(
        self,
        norms_of: Mapping[str, Float[Tensor, " batch"]],
        roundings: Mapping[str, Float[Tensor, " batch"]],
        finite: Bool[Tensor, " batch"],
        weights: Float[Tensor, " batch"] | None,
    ) -> dict[str, Weights]:
        """Return the factors by which the gradients of each group are multiplied."""
        # Sensitivity: an example whose gradient is not finite contributes the zero vector, whose norm is at most C too. For
        # the other examples factor·norm stays within the bound, whatever the rounding error of the norm.
        bound, zero = self.max_grad_norm / len({*self._group_of.values()}) ** 0.5, finite.new_zeros((), dtype=torch.float32)
        # On a CPU, this check may save a copy of every factor without waiting for a device; the sums are the same.
        are_all = not self.on_accelerator and bool(finite.all())
        found, raised = {}, 1 + RAISED_BY * torch.finfo(self._coarsest).eps
        for group, norms in norms_of.items():
            most = norms * raised + roundings.get(group, 0.0)
            factors = clip_factors(most, max_grad_norm=bound, clipping=self._clipping)
            factors = factors if weights is None else factors * weights.to(factors).nan_to_num(nan=0.0).clamp(0.0, 1.0)
            found[group] = Weights(torch.where(finite, factors, zero), None if are_all else finite, zero)
        return found

    def _add_sums(self, found: dict[Names, Gradient], weights_of: Mapping[str, Weights]) -> None:
        """Add up the weighted gradients, and remove each from `found` afterwards."""
        if self.in_kernels:
            from doppler_hf.privacy.clipping.fused_gradients import weighed  # imports Triton

            products = {
                names: (*gradient.factors, weights_of[self._group_of[names[0]]].marked)
                for names, gradient in found.items()
                if len(gradient.factors) == 2
            }
            for names, left, right in weighed(products):
                weights = replace(weights_of[self._group_of[names[0]]], by_kernel=(left, right))
                self._add_sum(names, found.pop(names), weights)
        # Tables come last, because their sums are the largest, and the other notes have been freed by then.
        for names in sorted(found, key=lambda names: found[names].is_of_table):
            self._add_sum(names, found.pop(names), weights_of[self._group_of[names[0]]])

    def _add_sum(self, names: Names, gradient: Gradient, weights: Weights) -> None:
        """Add the weighted sum of the gradients of some parameters to theirs."""
        sums = self._sums
        known = sums.get(names[0]) if len(names) == 1 else None
        total = gradient.weighted(weights, known)
        if known is not None:  # The gradient was added to the known sum in place.
            return
        parts = total.view(-1).split([self.parameters[name].numel() for name in names])
        news = {name: part.view_as(self.parameters[name]) for name, part in zip(names, parts, strict=True)}
        if old := [name for name in names if name in sums]:
            torch._foreach_add_([sums[name] for name in old], [news.pop(name) for name in old])
        sums.update(news)


def clip_factors(norms: Float[Tensor, " batch"], *, max_grad_norm: float, clipping: Clipping) -> Float[Tensor, " batch"]:
    """Return the factor that brings each norm to at most `max_grad_norm`."""
    if clipping == "vanilla":
        return (max_grad_norm / norms).clamp(max=1.0)
    return max_grad_norm / norms.clamp(min=SMALLEST_NORM)


def shares_of_error(losses: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Return min(1, 2(1 − p)) for cross-entropies −log p: 1 if the right class has at most even odds, and 0 at loss 0.

    The gradient of a logit is in proportion to 1 − p. A loss that is not a number has the share 1, so that it is counted.
    """
    losses = losses.detach().to(torch.promote_types(losses.dtype, torch.float32))
    return (-2 * torch.expm1(-losses)).nan_to_num(nan=1.0).clamp(0.0, 1.0)
