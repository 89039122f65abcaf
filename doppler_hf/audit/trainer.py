"""`AuditTrainer`: the real trainer with canaries in its data and an attacker who watches what it releases.

Canary i is in the training set if coin i says so. In all else the run is the audited one: the same sampler, engine,
clipping, noise, optimizer and accountant, with N the number of training rows.

The canaries are Dirac canaries, the worst case of what an example can reveal: the loss of canary i is K·wᵢ, where wᵢ is an
additional weight of the model for this canary. Its gradient K·eᵢ, with K far above C, is clipped to C′·eᵢ. So coordinate i
of the private gradient has, in units of C′/B, exactly the pair of distributions that the accountant bounds (`likelihood`).
C′ is C for vanilla and automatic clipping, and C/√L for each of L layers.
"""

from functools import partial
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import TrainerCallback

from doppler_hf.audit.audited_run import check_size, claims_privacy
from doppler_hf.audit.canaries import CANARY_COLUMN, ORDINARY, collate_with_canaries, numbered_rows
from doppler_hf.audit.likelihood import LikelihoodRatios
from doppler_hf.audit.lower_bounds import check_confidence
from doppler_hf.audit.result import AuditResult
from doppler_hf.errors import Refusal
from doppler_hf.privacy.clipping.clipped_gradients import clip_factors
from doppler_hf.privacy.losses import as_losses
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments

# The name of the canaries' weights in the model.
TABLE: Final = "audit_canaries"
# How many times a canary's gradient exceeds the clip norm. Without clipping, its contribution would be that much too large.
STRETCH: Final = 1000.0


class AuditTrainer(DopplerTrainer):
    """A `DopplerTrainer` for one audited run with a white-box attack, the strongest attack and the cheapest.

    The canaries are additional rows of the training set. Their scores are independent given the coins when the trainer does
    what it claims, so that one run counts as `num_canaries` trials. To audit a trainer of your own, name it as the second
    base class:

        class AuditOfMine(AuditTrainer, MyTrainer): ...

    Args:
        model: The model. It gets one weight for each canary and is trained on the canaries, so it is useless afterwards.
            `compute_per_sample_loss` must call it.
        args: `DopplerTrainingArguments`, with privacy.
        num_canaries: m, each included with probability 1/2.
        train_dataset: A `datasets.Dataset`.
        **kwargs: The other arguments of `DopplerTrainer`.

    Attributes:
        included: The coins, shape (num_canaries,).

    Raises:
        ValueError: If the run has no noise or several processes, or canaries cannot be put into the training set.

    Example:
        >>> trainer = AuditTrainer(model=model, args=args, train_dataset=train, num_canaries=1000)
        >>> trainer.audit().lower_bounds
        {'one run': 1.1, 'independent trials': 1.9}
    """

    data_collator: Any
    label_names: list[str]

    def __init__(
        self,
        model: Any = None,
        args: DopplerTrainingArguments | None = None,
        *,
        num_canaries: int,
        train_dataset: Any,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, DopplerTrainingArguments):
            raise Refusal("not-our-arguments", f"args must be DopplerTrainingArguments; got {type(args).__name__}.")
        if not claims_privacy(args):
            raise Refusal(
                "no-privacy-to-test",
                "This run claims no privacy, because disable_dp, noise_multiplier=0 or noise_seed is set, so the audit has "
                "no claim to test. Remove that argument and set target_epsilon.",
            )
        check_size(args, num_canaries=num_canaries)
        coins = np.random.default_rng()  # The operating system seeds it.
        self.included = coins.integers(2, size=num_canaries).astype(bool)
        # Only the number of a canary matters, so that any row may carry it.
        rows = coins.integers(len(train_dataset), size=int(self.included.sum()))
        training_set = numbered_rows(
            train_dataset,
            rows=np.concatenate([np.arange(len(train_dataset)), rows]),
            canaries=np.concatenate([np.full(len(train_dataset), ORDINARY), np.flatnonzero(self.included)]),
            unit_column=args.privacy_unit_column,
        )
        self._numbers: Tensor | None = None
        self._looked_up: Tensor | None = None
        # The weights are added before the trainer is made, because it lists the parameters that get noise. Canaries without
        # noise would audit nothing.
        self._add_weights_to(model)
        super().__init__(model=model, args=args, train_dataset=training_set, **kwargs)
        self.data_collator = partial(collate_with_canaries, collator=self.data_collator)
        # Transformers removes columns that are neither arguments of the model's forward nor labels, so the canary column is
        # declared a label.
        self.label_names = [*self.label_names, CANARY_COLUMN]
        self.attacker = _Attacker(self)
        self.add_callback(self.attacker)

    def _add_weights_to(self, model: nn.Module) -> None:
        """Add a weight for each canary, and look it up after each forward, when the engine and the checks know the batch."""
        if hasattr(model, TABLE):
            raise Refusal(
                "audited-before",
                f"This model was audited before, and still has the weights {TABLE} that the earlier audit added. Load the "
                "model again.",
            )
        table = nn.Embedding(len(self.included), 1)
        nn.init.zeros_(table.weight)
        model.add_module(TABLE, table)

        def look_up(*_: Any) -> None:
            if self._numbers is not None:
                self._looked_up = table(self._numbers.clamp(min=0)).squeeze(1)

        model.register_forward_hook(look_up)

    @property
    def stretch(self) -> float:
        """K, the norm of a canary's gradient before clipping."""
        return STRETCH * max(self.args.per_sample_max_grad_norm, 1.0)

    def compute_per_sample_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Return K·wᵢ for canary i, and for other examples the loss that the audited trainer would use."""
        others = {name: value for name, value in inputs.items() if name != CANARY_COLUMN}
        canaries: Int[Tensor, " batch"] = inputs[CANARY_COLUMN]
        self._numbers = canaries
        try:
            losses = as_losses(super().compute_per_sample_loss(model, others))
        finally:
            self._numbers = None
        assert self._looked_up is not None, "compute_per_sample_loss did not call the model"
        # Every row has one loss. A canary's loss has a gradient in the canary's own weight only, whatever its row holds.
        values = torch.where(canaries >= 0, self.stretch * self._looked_up, losses.values)
        if losses.weights is None:
            return values
        return values, torch.where(canaries >= 0, 1.0, losses.weights)

    def audit(self, *, confidence: float = 0.95) -> AuditResult:
        """Train, and return what the attacker can prove.

        Args:
            confidence: The probability with which the lower bounds on ε hold.

        Returns:
            The claim, the lower bounds on ε, and the scores and coins from which they follow.

        Raises:
            ValueError: If confidence is outside (0, 1).
        """
        check_confidence(confidence)
        self.train()
        scores = self.attacker.ratios.scores()
        return AuditResult(
            # A score that is not finite is replaced by a constant. This is valid, because a constant ignores the coins.
            scores=np.where(np.isfinite(scores), scores, 0.0),
            included=self.included,
            claimed_epsilon=self.privacy.epsilon(),
            delta=self.privacy.statement.target_delta,
            confidence=confidence,
        )


class _Attacker(TrainerCallback):
    """Reads every canary's coordinate of the private gradients that a run releases, before each optimizer step."""

    ratios: LikelihoodRatios

    def __init__(self, trainer: AuditTrainer) -> None:
        self._trainer, self._contribution = trainer, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compute what a canary contributes after clipping."""
        run, model = self._trainer.privacy, self._trainer.model
        layers = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
        parts = len(layers) if args.clipping_granularity == "per_layer" else 1
        norm = torch.tensor([self._trainer.stretch], dtype=torch.float64)
        bound = args.per_sample_max_grad_norm / parts**0.5
        self._contribution = float(norm * clip_factors(norm, max_grad_norm=bound, clipping=args.clipping))
        self.ratios = LikelihoodRatios(
            len(self._trainer.included),
            shape=run.mechanism.shape,
            sample_rate=run.mechanism.shape.bands * run.sampler.sample_rate,
            turns_per_round=run.sampler.turns_of_round,
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mechanism, step = self._trainer.privacy.mechanism, state.global_step
        unit = self._contribution / mechanism.expected_batch_size
        # `LikelihoodRatios` takes the noise before shaping, which may be larger or smaller than the noise of a step.
        white = mechanism.noise_std(step) / mechanism.shape.std(step) * mechanism.shape.norm
        seen = self._trainer.model.get_parameter(f"{TABLE}.weight").grad.detach()
        self.ratios.see(seen.flatten().double().cpu().numpy() / unit, sigma=white / unit)
