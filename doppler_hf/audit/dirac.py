"""Dirac canaries: each has a coordinate of the gradient to itself, the worst case of what an example can reveal.

Canary i's loss is K·wᵢ with a weight wᵢ of its own, added to the model. Its gradient K·eᵢ, with K far above C, is clipped to
C′·eᵢ, so that coordinate i of the private gradient, in units of C′/B, is

    x ~ 𝒩(0, σ²) without the canary,    x ~ (1 − q)·𝒩(0, σ²) + q·𝒩(1, σ²) with it,

with σ in units of C′ and q the sample rate: exactly the pair of distributions that the accountant bounds. Over the steps the
best score is the sum of log(1 − q + q·exp((x − ½)/σ²)). C′ is C for vanilla clipping, a little less for automatic clipping,
and C/√L for each of L layers.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from doppler_hf.audit.result import CanaryKind, Method
from doppler_hf.audit.trainer import AuditTrainer
from doppler_hf.privacy.clipping.clipped_gradients import clip_factors

# The name of the canaries' weights in the model.
TABLE: Final = "audit_canaries"
# By this factor a canary's gradient exceeds the clip norm, and so does its contribution if clipping is missing.
STRETCH: Final = 1000.0


class DiracAuditTrainer(AuditTrainer):
    """An audited run with Dirac canaries, seen white-box: the strongest attack, and the cheapest.

    The canaries are further rows of the training set. Their scores are independent given the coins when the trainer does
    what it claims, so that one run counts as `num_canaries` trials.

    Args:
        model: The model; it gets one weight for each canary. `compute_per_sample_loss` must call it.
        args: As `AuditTrainer`.
        **kwargs: As `AuditTrainer`.

    Example:
        >>> trainer = DiracAuditTrainer(model=model, args=args, train_dataset=train, num_canaries=1000)
        >>> trainer.audit().lower_bounds
        {'one run': 1.1, 'independent trials': 1.9}
    """

    kind: ClassVar[CanaryKind] = "dirac"
    one_run_methods: ClassVar[tuple[Method, ...]] = ("one run", "independent trials")

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        self._numbers: Tensor | None = None
        self._looked_up: Tensor | None = None
        self._contribution = 0.0
        super().__init__(model=model, args=args, **kwargs)

    def choose_rows(
        self, num_rows: int, generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " ordinary"], Int[np.ndarray, " num_canaries"]]:
        """Return all rows, and arbitrary ones for the canaries: of a canary only the number matters."""
        return np.arange(num_rows), generator.integers(num_rows, size=len(self.included))

    def add_canaries_to(self, model: nn.Module) -> None:
        """Add a weight for each canary, looked up inside the model's forward: the engine watches layers only there.

        Raises:
            ValueError: If the model has such weights already.
        """
        if hasattr(model, TABLE):
            raise ValueError(f"The model has been audited before: it has canaries ({TABLE}). Load it anew.")
        table = nn.Embedding(len(self.included), 1)
        nn.init.zeros_(table.weight)
        model.add_module(TABLE, table)
        task_forward = model.forward

        @functools.wraps(task_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._numbers is not None:
                self._looked_up = table(self._numbers.clamp(min=0)).squeeze(1)
            return task_forward(*args, **kwargs)

        model.forward = forward

    def canary_losses(
        self, model: nn.Module, inputs: dict[str, Any], canaries: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Return K·wᵢ for canary i, and the task's loss for other examples."""
        self._numbers = canaries
        try:
            losses = self.task_losses(model, inputs)
        finally:
            self._numbers = None
        assert self._looked_up is not None, "compute_per_sample_loss did not call the model"
        return torch.where(canaries >= 0, self._stretch * self._looked_up, losses)

    def begin_attack(self) -> None:
        """Compute what a canary contributes once it is clipped."""
        layers = {name.rpartition(".")[0] for name, p in self.model.named_parameters() if p.requires_grad}
        parts = len(layers) if self.args.clipping_granularity == "per_layer" else 1
        norm = torch.tensor([self._stretch], dtype=torch.float64)
        bound = self.args.per_sample_max_grad_norm / parts**0.5
        self._contribution = float(norm * clip_factors(norm, max_grad_norm=bound, clipping=self.args.clipping))

    def see_gradient(self, gradients: Mapping[str, Float[Tensor, "..."]]) -> None:
        """Add the log-likelihood ratio of every canary's coordinate."""
        run = self.private_run
        unit = self._contribution / run.statement.expected_batch_size
        self.scores += log_likelihood_ratio(
            gradients[f"{TABLE}.weight"].flatten().double().cpu().numpy() / unit,
            sigma=run.mechanism.noise_std(self.state.global_step) / unit,
            sample_rate=run.statement.sample_rate,
        )

    def end_attack(self) -> None:
        """Do nothing: the gradients were all that this attack reads."""

    @property
    def _stretch(self) -> float:
        return STRETCH * max(self.args.per_sample_max_grad_norm, 1.0)


def log_likelihood_ratio(
    x: Float[np.ndarray, " canaries"], *, sigma: float, sample_rate: float
) -> Float[np.ndarray, " canaries"]:
    """Return log of ((1 − q)·𝒩(0, σ²) + q·𝒩(1, σ²)) / 𝒩(0, σ²) at x.

    Args:
        x: The observations, in units of one contribution.
        sigma: σ, in the same units.
        sample_rate: q, in (0, 1].
    """
    shifted = np.log(sample_rate) + (x - 0.5) / sigma**2
    return shifted if sample_rate == 1.0 else np.logaddexp(np.log1p(-sample_rate), shifted)
