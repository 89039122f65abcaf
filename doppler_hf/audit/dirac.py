"""Dirac canaries: each has a coordinate of the gradient to itself, the worst case of what an example can reveal.

Canary i's loss is K·wᵢ with a weight wᵢ of its own, added to the model. Its gradient K·eᵢ, with K far above C, is clipped to
C′·eᵢ, so that coordinate i of the private gradient, in units of C′/B, is

    x ~ 𝒩(0, σ²) in all steps without the canary,    x ~ 𝒩(1, σ²) with it in a step that is chosen by the sampling,

with σ in units of C′: exactly the pair of distributions that the accountant bounds. The best score of a round of n steps is
log(1 − n·q + q·Σ exp((x − ½)/σ²)), q the sample rate. Of shaped noise the attacker reads the turns, see `Turns`. C′ is C for
vanilla and automatic clipping, and C/√L for each of L layers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import scipy.special
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from doppler_hf.audit.result import Method
from doppler_hf.audit.trainer import AuditTrainer
from doppler_hf.filters.noise_shape import NoiseShape
from doppler_hf.privacy.clipping.norms import clip_factors

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

    kind: ClassVar[str] = "dirac"
    one_run_methods: ClassVar[tuple[Method, ...]] = ("one run", "independent trials")

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        self._numbers: Tensor | None = None
        self._looked_up: Tensor | None = None
        self._contribution = 0.0
        self._turns: Turns | None = None
        super().__init__(model=model, args=args, **kwargs)

    def choose_rows(
        self, num_rows: int, generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " ordinary"], Int[np.ndarray, " num_canaries"]]:
        """Return all rows, and arbitrary ones for the canaries: of a canary only the number matters."""
        return np.arange(num_rows), generator.integers(num_rows, size=len(self.included))

    def add_canaries_to(self, model: nn.Module) -> None:
        """Add a weight for each canary, looked up after each forward: the engine, and the checks, then know the batch.

        Raises:
            ValueError: If the model has such weights already.
        """
        if hasattr(model, TABLE):
            raise ValueError(f"The model has been audited before: it has canaries ({TABLE}). Load it anew.")
        table = nn.Embedding(len(self.included), 1)
        nn.init.zeros_(table.weight)
        model.add_module(TABLE, table)

        def look_up(*_: Any) -> None:
            if self._numbers is not None:
                self._looked_up = table(self._numbers.clamp(min=0)).squeeze(1)

        model.register_forward_hook(look_up)

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
        shape, sampler = self.private_run.mechanism.shape, self.private_run.sampler
        rate = shape.bands * sampler.sample_rate
        self._turns = Turns(len(self.included), shape=shape, sample_rate=rate, turns_per_round=sampler.turns_of_round)

    def see_gradient(self, gradients: Mapping[str, Float[Tensor, "..."]]) -> None:
        """Read every canary's coordinate."""
        assert self._turns is not None
        mechanism, step = self.private_run.mechanism, self.state.global_step
        unit = self._contribution / mechanism.expected_batch_size
        white = mechanism.noise_std(step) / mechanism.shape.std(step) * mechanism.shape.norm
        self._turns.see(gradients[f"{TABLE}.weight"].flatten().double().cpu().numpy() / unit, sigma=white / unit)

    def end_attack(self) -> None:
        """Score every canary by its log-likelihood ratio."""
        assert self._turns is not None
        self.scores[:] = self._turns.scores()

    @property
    def _stretch(self) -> float:
        return STRETCH * max(self.args.per_sample_max_grad_norm, 1.0)


class Turns:
    """The log-likelihood ratios of canaries over a run, in which each takes part in the turns of its group only.

    The attacker takes the shaping back: C·(gradients) has white noise, and a contribution in step t stands in its rows t to
    t + b − 1, in proportion to c. Which group a canary is in is secret, so the ratio is the mean over all groups. For white
    noise b is 1, and every step is a turn. `sample_rate` is that of a canary in its turn, and `turns_per_round` that of its
    group.
    """

    def __init__(self, canaries: int, *, shape: NoiseShape, sample_rate: float, turns_per_round: int) -> None:
        self._c, self._sample_rate, self._turns_per_round = shape.c, sample_rate, turns_per_round
        self._seen: list[Float[np.ndarray, " canaries"]] = []  # as far as the next row needs them, the last one first
        # Of the turns that have more rows to come ⟨μ, y⟩ and ‖μ‖², the oldest first.
        self._open: list[tuple[Float[np.ndarray, " canaries"], float]] = []
        self._finished_rounds = np.zeros((shape.bands, canaries))  # the ratio of the rounds that are over, by group
        self._current_round = np.full((shape.bands, canaries), -np.inf)  # log Σ exp(⟨μ, y⟩ − ‖μ‖²/2) over the round's turns
        self._closed = 0

    def see(self, x: Float[np.ndarray, " canaries"], *, sigma: float) -> None:
        """Read the gradient at the canaries; σ is that of the noise before it is shaped. Both in units of a contribution."""
        self._seen = [x, *self._seen[: len(self._c) - 1]]
        row = sum((c * values for c, values in zip(self._c, self._seen, strict=False)), np.zeros_like(x))
        self._open.append((np.zeros_like(x), 0.0))
        self._open = [
            (matched + c * row / sigma**2, squares + (c / sigma) ** 2)
            for c, (matched, squares) in zip(reversed(self._c[: len(self._open)]), self._open, strict=True)
        ]
        if len(self._open) == len(self._c):
            self._close()

    def scores(self) -> Float[np.ndarray, " canaries"]:
        """Return the log-likelihood ratio of every canary; turns that the end has cut short count as far as they went."""
        while self._open:
            self._close()
        for group in range(len(self._c)):
            self._end_round(group, turns=len(range(group, self._closed, len(self._c))) % self._turns_per_round)
        return np.asarray(scipy.special.logsumexp(self._finished_rounds, axis=0) - np.log(len(self._finished_rounds)))

    def _close(self) -> None:
        matched, squares = self._open.pop(0)
        turn, group = divmod(self._closed, len(self._c))
        self._closed += 1
        self._current_round[group] = np.logaddexp(self._current_round[group], matched - squares / 2)
        if (turn + 1) % self._turns_per_round == 0:
            self._end_round(group, turns=self._turns_per_round)

    def _end_round(self, group: int, *, turns: int) -> None:
        self._finished_rounds[group] += log_likelihood_ratio(
            self._current_round[group], sample_rate=self._sample_rate, turns=turns
        )
        self._current_round[group] = -np.inf


def log_likelihood_ratio(
    of_turns: Float[np.ndarray, " canaries"], *, sample_rate: float, turns: int
) -> Float[np.ndarray, " canaries"]:
    """Return log(1 − n·q + q·Σ exp(⟨μ, y⟩ − ‖μ‖²/2)) of a round of n turns, given the logarithm of the sum."""
    with_turn, without = np.log(sample_rate) + of_turns, 1.0 - turns * sample_rate
    return with_turn if without <= 0.0 else np.logaddexp(np.log(without), with_turn)
