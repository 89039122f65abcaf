"""`AuditTrainer`: the real trainer with canaries in its data and an attacker who watches what it releases.

Canary i is in the training set if coin i says so. Otherwise the run is the audited one: the same sampler, engine, clipping,
noise, optimizer and accountant, with N the number of training rows. Its loss is the audit's own, so that automatic clipping
brings every gradient to norm C, whatever the example's error: the worst case. The attacker sees the private gradient of
every step and all models (or, black-box, the first and the last model only) and gives each canary a score.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import TrainerCallback

from doppler_hf.audit.canaries import CANARY_COLUMN, ORDINARY, collate_with_canaries, numbered_rows
from doppler_hf.audit.lower_bounds import check_confidence
from doppler_hf.audit.result import AuditResult, Method, lower_bounds
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments


class AuditTrainer(DopplerTrainer, ABC):
    """A `DopplerTrainer` for one audited run; a subclass says what a canary is and how it is scored.

    Listed before your own trainer, it audits that trainer with its loss:

        class AuditOfMine(DiracAuditTrainer, MyTrainer): ...

    Args:
        model: The model. It is trained on canaries and useless afterwards.
        args: `DopplerTrainingArguments`, with privacy.
        num_canaries: m, each included with probability 1/2.
        train_dataset: A `datasets.Dataset`.
        coin_seed: None for coins from the operating system's entropy. An integer makes them reproducible, for tests.
        **kwargs: As `DopplerTrainer`.

    Attributes:
        included: The coins, shape (num_canaries,).
        scores: The attacker's score of each canary, shape (num_canaries,); higher is more likely included.

    Raises:
        ValueError: If the run has no noise or several processes, or canaries cannot be put into the training set.
    """

    data_collator: Any
    label_names: list[str]
    kind: ClassVar[str]
    one_run_methods: ClassVar[tuple[Method, ...]]

    def __init__(
        self,
        model: Any = None,
        args: DopplerTrainingArguments | None = None,
        *,
        num_canaries: int,
        train_dataset: Any,
        coin_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, DopplerTrainingArguments):
            raise ValueError(f"args must be DopplerTrainingArguments, got {type(args).__name__}.")
        if args.disable_dp or args.noise_multiplier == 0.0 or args.noise_seed is not None:
            raise ValueError(
                "The run claims no privacy, because disable_dp, noise_multiplier=0 or noise_seed is set. Set target_epsilon "
                "to have a claim to audit."
            )
        if args.world_size > 1:
            raise ValueError(f"The audit must run in one process, got {args.world_size}. Start it without a launcher.")
        if num_canaries < 1:
            raise ValueError(f"num_canaries must be at least 1, got {num_canaries}.")
        coins = np.random.default_rng(coin_seed)
        self.included = coins.integers(2, size=num_canaries).astype(bool)
        self.scores = np.zeros(num_canaries)
        ordinary, canaries = self.choose_rows(len(train_dataset), coins)
        numbers = np.arange(num_canaries)
        self._canary_rows = numbered_rows(
            train_dataset, rows=canaries, canaries=numbers, unit_column=args.privacy_unit_column
        )
        training_set = numbered_rows(
            train_dataset,
            rows=np.concatenate([ordinary, canaries[self.included]]),
            canaries=np.concatenate([np.full(len(ordinary), ORDINARY), numbers[self.included]]),
            unit_column=args.privacy_unit_column,
        )
        self.add_canaries_to(model)
        super().__init__(model=model, args=args, train_dataset=training_set, **kwargs)
        self.data_collator = partial(collate_with_canaries, collator=self.data_collator)
        # Transformers keeps the columns that the model's forward names, and labels.
        self.label_names = [*self.label_names, CANARY_COLUMN]
        self.add_callback(_Watcher(self))

    @abstractmethod
    def choose_rows(
        self, num_rows: int, generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " ordinary"], Int[np.ndarray, " num_canaries"]]:
        """Return the ordinary rows of the training set, and the row behind each canary."""

    @abstractmethod
    def add_canaries_to(self, model: nn.Module) -> None:
        """Add to the model what the canaries need."""

    @abstractmethod
    def canary_losses(
        self, model: nn.Module, inputs: dict[str, Any], canaries: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Return the loss of each example, where `canaries` has its number or `ORDINARY`."""

    @abstractmethod
    def begin_attack(self) -> None:
        """Look at the model before the first step."""

    @abstractmethod
    def see_gradient(self, gradients: Mapping[str, Float[Tensor, "..."]]) -> None:
        """Look at the private gradient of one step, before the model moves."""

    @abstractmethod
    def end_attack(self) -> None:
        """Look at the model after the last step."""

    def task_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Return the losses that the audited trainer would use."""
        return super().compute_per_sample_loss(model, inputs)

    def compute_per_sample_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Return the loss of each example, canary or not."""
        others = {name: value for name, value in inputs.items() if name != CANARY_COLUMN}
        return self.canary_losses(model, others, inputs[CANARY_COLUMN])

    def audit(self, *, confidence: float = 0.95) -> AuditResult:
        """Train, and return what the attacker can prove.

        Args:
            confidence: The probability with which the lower bounds on ε hold.

        Raises:
            ValueError: If confidence is outside (0, 1).
        """
        check_confidence(confidence)
        self.train()
        delta = self.private_run.statement.target_delta
        outcomes = self.scores, self.included, self.one_run_methods, self.privacy.epsilon()
        return _result(self.kind, *outcomes, delta=delta, confidence=confidence, runs=1)


class _Watcher(TrainerCallback):
    """Passes what the run releases on to the attacker."""

    def __init__(self, trainer: AuditTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_attack()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = self._trainer.model.named_parameters()
        self._trainer.see_gradient({name: p.grad.detach() for name, p in named if p.grad is not None})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.end_attack()


def audit_repeatedly(make_trainer: Callable[[], AuditTrainer], *, runs: int, confidence: float = 0.95) -> AuditResult:
    """Train `runs` times with one canary each, and count how often the attacker is right: for small models.

    The runs are independent, so this needs no assumption about how canaries influence each other.

    Args:
        make_trainer: A function that returns a new trainer with `num_canaries=1`, whose model has its initial weights.
        runs: R, the number of trainings; a useful bound needs several hundred.
        confidence: The probability with which the lower bound on ε holds.

    Returns:
        The audit, with one score and one coin a run.

    Raises:
        ValueError: If there are fewer than two runs, a trainer has several canaries, or all coins fell on one side.

    Example:
        >>> result = audit_repeatedly(
        ...     lambda: DiracAuditTrainer(model=new_model(), args=args, train_dataset=train, num_canaries=1), runs=500
        ... )
    """
    if runs < 2:
        raise ValueError(f"runs must be at least 2, got {runs}. A useful bound needs several hundred.")
    check_confidence(confidence)
    scores, included = np.zeros(runs), np.zeros(runs, dtype=bool)
    claims, deltas = [], []
    for run in range(runs):
        trainer = make_trainer()
        if len(trainer.included) != 1:
            raise ValueError(f"num_canaries must be 1 in repeated runs, got {len(trainer.included)}.")
        trainer.train()
        scores[run], included[run] = trainer.scores[0], trainer.included[0]
        claims.append(trainer.privacy.epsilon())
        deltas.append(trainer.private_run.statement.target_delta)
    # N differs by one with and without the canary, and the claims hardly: the weakest one holds for all runs.
    methods: tuple[Method, ...] = ("independent trials",)
    return _result(trainer.kind, scores, included, methods, max(claims), delta=max(deltas), confidence=confidence, runs=runs)


def _result(
    kind: str,
    scores: Float[np.ndarray, " canaries"],
    included: Bool[np.ndarray, " canaries"],
    methods: tuple[Method, ...],
    claimed_epsilon: float,
    *,
    delta: float,
    confidence: float,
    runs: int,
) -> AuditResult:
    """Return the outcome, with a score of 0 where one is not finite: valid, because it does not depend on the coins."""
    scores = np.where(np.isfinite(scores), scores, 0.0)
    bounds = lower_bounds(scores, included, methods=methods, delta=delta, confidence=confidence)
    return AuditResult(kind, scores, included, bounds, claimed_epsilon, delta, confidence, runs)
