"""The outcome of an audit: a lower bound on ε, the claimed ε, and the scores and coins from which the bound follows."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float

from doppler_hf.audit.lower_bounds import clopper_pearson_epsilon, one_run_epsilon

AUDIT_NAME: Final = "privacy_audit.json"
# At a large δ only the second method shows anything; only the first holds if canaries influence each other.
METHODS: Final[Mapping[str, Callable[..., float]]] = {
    "one run": one_run_epsilon,
    "independent trials": clopper_pearson_epsilon,
}


@dataclass(frozen=True, eq=False)
class AuditResult:
    """The outcome of an audit of one training run.

    Attributes:
        scores: The canaries' scores, shape (canaries,); higher means more likely to be in the training set.
        included: The coins, shape (canaries,): whether the canary was in the training set.
        claimed_epsilon: The upper bound on ε that the run's ledger states; infinity for a run without privacy.
        delta: δ of the claim and of the bounds.
        confidence: The probability with which the bounds hold.
        methods: The methods of `METHODS` that are valid for these scores.
    """

    scores: Float[np.ndarray, " canaries"]
    included: Bool[np.ndarray, " canaries"]
    claimed_epsilon: float
    delta: float
    confidence: float
    methods: tuple[str, ...] = tuple(METHODS)

    @cached_property
    def lower_bounds(self) -> dict[str, float]:
        """Return a lower bound on ε by each method. All of them hold at once with probability `confidence`.

        "one run" assumes nothing about how canaries influence each other's scores. "independent trials" is tighter, but
        needs scores that are independent given the coins. A trainer that does what it claims makes such scores.
        """
        each = 1.0 - (1.0 - self.confidence) / len(self.methods)  # The allowed error is shared by the methods.
        return {name: METHODS[name](self.scores, self.included, delta=self.delta, confidence=each) for name in self.methods}

    @property
    def lower_bound(self) -> float:
        """The largest of the lower bounds."""
        return max(self.lower_bounds.values())

    @property
    def contradicts_claim(self) -> bool:
        """Whether the run leaks more than it claims; a false alarm has a probability of at most 1 − confidence."""
        return self.lower_bound > self.claimed_epsilon

    @property
    def right_guesses(self) -> int:
        """The number of right guesses, if canaries in the higher half of the scores are guessed in, and the others out."""
        return int(np.sum((self.scores > np.median(self.scores)) == self.included))

    def save(self, folder: str | Path, *, more: Mapping[str, Any] | None = None) -> Path:
        """Write everything, scores and coins included, to `privacy_audit.json` in `folder`, and return its path."""
        path = Path(folder) / AUDIT_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        outcome = "lower_bound", "lower_bounds", "contradicts_claim", "right_guesses"
        terms = {name: getattr(self, name) for name in ("claimed_epsilon", "delta", "confidence", *outcome)}
        if math.isinf(self.claimed_epsilon):
            terms["claimed_epsilon"] = None  # JSON has no infinity.
        # The file has coins and scores too, so that readers can compute a bound by another method.
        rows = {"included": self.included.tolist(), "scores": self.scores.tolist()}
        values = {"format_version": 2, "canaries": len(self.scores), **terms, **rows, **(more or {})}
        path.write_text(json.dumps(values, ensure_ascii=False) + "\n")
        return path
