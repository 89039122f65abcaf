"""The audit of a language model: train it with canaries made of text, and see which of them it repeats.

Secret coins decide which canaries are in one row, and which in none. Their scores give a lower bound on ε. Other canaries
are in 10 or 100 rows: they show what a model repeats that many records have in common, which ε does not cover.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import ProgressCallback
from transformers.utils.logging import tqdm

from doppler_hf.audit.audited_run import check_size, claims_privacy, copied, discarded_run, hidden_prints
from doppler_hf.audit.lower_bounds import check_confidence
from doppler_hf.audit.result import AuditResult
from doppler_hf.audit.text_canaries import Reading, TextCanary, new_canaries, read_canary, with_canaries
from doppler_hf.privacy import default_delta
from doppler_hf.trainer import DopplerTrainer

# Further canaries are in so many rows each, and so many times fewer.
_MORE_INSERTIONS: Final = (10, 100)


@dataclass(frozen=True)
class FoundCanary:
    """A canary, and what the trained model makes of it.

    Attributes:
        insertions: In how many rows of the training set it was.
        rank: The place of its code among all codes, the likeliest first.
        is_repeated: Whether greedy generation from its start writes its code word for word.
        start: The tokens of its start.
        code: The tokens of its code.
    """

    insertions: int
    rank: int
    is_repeated: bool
    start: list[int]
    code: list[int]


@dataclass(frozen=True, eq=False)
class TextAuditResult:
    """The outcome of an audit with canaries made of text.

    Attributes:
        membership: The bound on ε that follows from the canaries whose coins decided if they are in one row or in none.
        canaries: All canaries: first those with coins, then those in more rows.
        codes: The number of codes among which each canary's code has its rank.
    """

    membership: AuditResult
    canaries: tuple[FoundCanary, ...]
    codes: int

    def save(self, folder: str | Path) -> Path:
        """Write everything to `privacy_audit.json` in `folder`, as `AuditResult.save` does, and return its path."""
        return self.membership.save(folder, more={"codes": self.codes, "text_canaries": [*map(vars, self.canaries)]})


def audit_texts(trainer: DopplerTrainer, *, num_canaries: int, confidence: float = 0.95) -> TextAuditResult:
    """Train a causal language model with canaries made of text, in a temporary folder, and look for them in the model.

    A run with `disable_dp` is audited too, since it shows that the canaries can be found. The attack sees the model before
    and after training. It is much weaker than that of `AuditTrainer`, which sees every step.

    Args:
        trainer: A trainer before its training. Its training set is a `datasets.Dataset` with a column `input_ids`. Its model
            is trained on the canaries, so it is useless afterwards.
        num_canaries: How many canaries are in one row or in none, at least 20. A tenth as many are in 10 rows, and a
            hundredth as many, at least one, in 100.
        confidence: The probability with which the lower bound on ε holds.

    Raises:
        ValueError: If the model is no causal language model, the run has several processes, or canaries cannot be put into
            the training set.

    Example:
        >>> result = audit_texts(trainer, num_canaries=100)
        >>> [canary.rank for canary in result.canaries if canary.insertions == 100]
        [1]
    """
    check_size(trainer.args, num_canaries=num_canaries)
    check_confidence(confidence)
    generator = np.random.default_rng()  # The operating system seeds it, so that coins and codes are secret.
    included = generator.integers(2, size=num_canaries).astype(bool)
    more = [rows for rows in _MORE_INSERTIONS for _ in range(max(1, num_canaries // rows))]
    canaries = new_canaries(
        trainer.model,
        trainer.processing_class,
        insertions=[*included.astype(int).tolist(), *more],
        generator=generator,
    )
    audited = copied(trainer)
    audited.train_dataset = with_canaries(
        trainer.train_dataset, canaries, unit_column=trainer.args.privacy_unit_column, generator=generator
    )

    def read(some: Sequence[TextCanary], what: str) -> list[Reading]:
        shown = tqdm(some, desc=f"canaries {what} training", disable=trainer.args.disable_tqdm)
        return [read_canary(audited.model, canary) for canary in shown]

    before = read(canaries[:num_canaries], "before")
    with tempfile.TemporaryDirectory() as folder, hidden_prints():
        audited.args = discarded_run(trainer.args, folder=folder)
        if not audited.args.disable_tqdm:
            audited.add_callback(ProgressCallback)
        audited.train()
    after = read(canaries, "after")
    epsilon, delta = _claim(audited)
    return TextAuditResult(
        AuditResult(
            scores=_scores(before, after[:num_canaries]),
            included=included,
            claimed_epsilon=epsilon,
            delta=delta,
            confidence=confidence,
            # All canaries meet in one model, where one may influence the score of another. The other method needs
            # independent scores.
            methods=("one run",),
        ),
        tuple(_found(canary, reading) for canary, reading in zip(canaries, after, strict=True)),
        codes=len(canaries[0].codes),
    )


def _scores(before: Sequence[Reading], after: Sequence[Reading]) -> np.ndarray:
    """Return how much more likely training made each canary's code, in standard deviations of the other codes.

    The difference leaves out that some tokens are rare in any text.
    """
    gains = np.array([first.losses - second.losses for first, second in zip(before, after, strict=True)], dtype=np.float64)
    others = gains[:, 1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = (gains[:, 0] - others.mean(axis=1)) / others.std(axis=1)
    # A score that is not finite is replaced by a constant. This is valid, because a constant ignores the coins.
    return np.where(np.isfinite(scores), scores, 0.0)


def _claim(trainer: Any) -> tuple[float, float]:
    """Return ε and δ of a finished run. A run without privacy gets the δ by default, so that bounds can be compared."""
    if trainer.args.disable_dp:
        return math.inf, default_delta(len(trainer.train_dataset))
    epsilon = trainer.privacy.epsilon() if claims_privacy(trainer.args) else math.inf
    return epsilon, trainer.privacy.statement.target_delta


def _found(canary: TextCanary, reading: Reading) -> FoundCanary:
    return FoundCanary(canary.insertions, reading.rank, reading.is_repeated, canary.start.tolist(), canary.codes[0].tolist())
