"""Per-sample clipping: a sum over examples to which each contributes a vector of norm at most C.

    vanilla     clip(g) = min(1, C/‖g‖)·g                  (Abadi et al. 2016, https://arxiv.org/abs/1607.00133)
    automatic   clip(g) = C/(‖g‖ + γ)·g,  γ = 0.01         (Bu et al. 2023, https://arxiv.org/abs/2206.07136)

*flat* takes one norm over all trainable parameters. *per_layer* clips each of the L layers to C/√L on its own, so that
the whole still has norm at most √(L·C²/L) = C. The sensitivity of the sum is C in all four cases.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.privacy.engine import OpacusEngine, PerSampleGradient

Clipping = Literal["automatic", "vanilla"]
Granularity = Literal["flat", "per_layer"]
Engine = Literal["opacus"]

AUTOMATIC_CLIPPING_GAMMA = 0.01


def clip_factors(norms: Float[Tensor, " batch"], *, max_grad_norm: float, clipping: Clipping) -> Float[Tensor, " batch"]:
    """Return the factor that brings each norm to at most `max_grad_norm`.

    Args:
        norms: Per-sample gradient norms, shape (batch,), finite.
        max_grad_norm: C.
        clipping: The clipping function.

    Returns:
        Factors, shape (batch,), with factor·norm ≤ C.
    """
    if clipping == "vanilla":
        return (max_grad_norm / norms).clamp(max=1.0)
    return max_grad_norm / (norms + AUTOMATIC_CLIPPING_GAMMA)


class ClippedGradients:
    """A context in which a model's per-sample gradients are clipped and summed.

    Args:
        model: The model; its trainable parameters (`requires_grad`) are clipped together. It is not wrapped: parameter
            names and checkpoints stay as they are.
        max_grad_norm: C, the most that one example contributes.
        clipping: "vanilla" or "automatic".
        granularity: "flat" or "per_layer".
        engine: Where per-sample gradients come from; "opacus" is Opacus's `GradSampleHooks`.

    Attributes:
        sums: Parameter name → Σ clip(gᵢ), of the parameter's shape, in float32 (float64 for float64 parameters),
            accumulated over calls of `backward` until `reset`. Not private: it has no noise yet.
        num_non_finite: How many examples since the last `reset` had a gradient with a NaN or an infinity. They
            contribute nothing.

    Raises:
        ValueError: An unknown option, a clip norm that is not positive, nothing to train, or a model with a layer whose
            per-sample gradient cannot be had, by name.

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
        engine: Engine = "opacus",
    ) -> None:
        if not 0.0 < max_grad_norm < float("inf"):
            raise ValueError(f"max_grad_norm must be a finite number > 0, got {max_grad_norm}.")
        for name, value, choices in (
            ("clipping", clipping, get_args(Clipping)),
            ("granularity", granularity, get_args(Granularity)),
            ("engine", engine, get_args(Engine)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
        self._model = model
        self._max_grad_norm = max_grad_norm
        self._clipping = clipping
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("The model has no trainable parameter; set requires_grad on what is to be trained.")
        self._group_of = {name: "" if granularity == "flat" else name.rpartition(".")[0] for name in trainable}
        self.sums = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
            for name, p in trainable.items()
        }
        self.num_non_finite = 0
        self._engine: OpacusEngine | None = None

    def __enter__(self) -> "ClippedGradients":
        self._engine = OpacusEngine(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._engine is not None:
            self._engine.detach()
            self._engine = None

    def backward(self, losses: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Back-propagate one loss per example and add the clipped per-sample gradients to `sums`.

        The ordinary gradients that the backward pass leaves in `.grad` are not private and are discarded.

        Args:
            losses: One loss per example, shape (batch,), from a call of the model with that batch. An example's loss must
                depend on that example alone: no mean over the batch's tokens, no term over the batch.

        Returns:
            Per-sample gradient norms over all trainable parameters, before clipping, shape (batch,). Not private.

        Raises:
            ValueError: `losses` not of shape (batch,), or a per-sample gradient whose batch dimension is not the batch.
            RuntimeError: Called outside the `with` block.
        """
        if self._engine is None:
            raise RuntimeError("ClippedGradients.backward works inside its `with` block only.")
        if losses.ndim != 1:
            raise ValueError(f"losses must have shape (batch,), one per example, got {tuple(losses.shape)}.")
        if len(losses) == 0:
            return losses.detach()
        return self._add_clipped(self._engine.per_sample_gradients(losses), batch_size=len(losses))

    def reset(self) -> None:
        """Set the sums to zero, for the next draw."""
        for total in self.sums.values():
            total.zero_()
        self.num_non_finite = 0

    @torch.no_grad()
    def _add_clipped(self, gradients: Mapping[str, PerSampleGradient], *, batch_size: int) -> Float[Tensor, " batch"]:
        # Sensitivity: row i of every tensor depends on example i alone. Norms and sums are computed from the same
        # float32 numbers, so rounding in a lower precision upstream cannot make factor·norm exceed C; and a layer that
        # this micro-batch did not use contributes 0 to the norm, exactly as it does to the sum.
        squares: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            square = torch.linalg.vector_norm(gradient.values.reshape(batch_size, -1), dim=1).square()
            group = self._group_of[name]
            squares[group] = squares[group] + square if group in squares else square
        norms = torch.stack(tuple(squares.values())).sum(dim=0).sqrt()

        # An example whose gradient is not finite contributes the zero vector, whose norm is at most C too. Selecting
        # rows, since 0·NaN would still be NaN.
        finite = norms.isfinite()
        self.num_non_finite += batch_size - int(finite.sum())
        kept = slice(None) if finite.all() else finite

        layers = len(set(self._group_of.values()))
        bound = self._max_grad_norm / layers**0.5
        factors = {
            group: clip_factors(square.sqrt()[kept], max_grad_norm=bound, clipping=self._clipping)
            for group, square in squares.items()
        }
        for name, (values, rows) in gradients.items():
            factor = factors[self._group_of[name]].to(values.dtype)
            if rows is None:
                self.sums[name].add_(torch.tensordot(factor, values[kept], dims=1))
            else:
                clipped = values[kept] * factor[:, None, None]
                self.sums[name].index_add_(0, rows[kept].reshape(-1), clipped.reshape(-1, clipped.shape[-1]))
        return norms
