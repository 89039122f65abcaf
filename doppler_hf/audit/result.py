"""The outcome of an audit: a lower bound on ε beside the claim, and the scores and coins that it rests on."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from doppler_hf.audit.lower_bounds import clopper_pearson_epsilon, one_run_epsilon

AUDIT_NAME: Final = "privacy_audit.json"


@dataclass(frozen=True, eq=False)
class AuditResult:
    """An audit of a training.

    Attributes:
        scores: The canaries' scores, shape (canaries,); higher is more likely in the training set.
        included: The coins, shape (canaries,): whether the canary was in the training set.
        claimed_epsilon: The upper bound on ε that the run's ledger states.
        delta: δ of the claim and of the bounds.
        confidence: The probability with which the bounds hold.
    """

    scores: Float[np.ndarray, " canaries"]
    included: Bool[np.ndarray, " canaries"]
    claimed_epsilon: float
    delta: float
    confidence: float

    @cached_property
    def lower_bounds(self) -> dict[str, float]:
        """Return a lower bound on ε by each method, all of which hold at once with probability `confidence`.

        "one run" assumes nothing about how canaries influence each other's scores; "independent trials" is tighter, and
        needs scores that are independent given the coins, as those of a trainer that does what it claims are.
        """
        # At a large δ only the second shows anything; only the first holds if canaries influence each other.
        methods = {"one run": one_run_epsilon, "independent trials": clopper_pearson_epsilon}
        each = 1.0 - (1.0 - self.confidence) / len(methods)  # the error allowed is shared
        return {
            name: bound(self.scores, self.included, delta=self.delta, confidence=each) for name, bound in methods.items()
        }

    @property
    def lower_bound(self) -> float:
        """The largest of the lower bounds."""
        return max(self.lower_bounds.values())

    @property
    def contradicts_claim(self) -> bool:
        """Whether the run leaks more than it claims, up to the chance 1 − confidence of a false alarm."""
        return self.lower_bound > self.claimed_epsilon

    @property
    def right_guesses(self) -> int:
        """The number of coins guessed right if the higher half of the scores is called in and the lower half out."""
        return int(np.sum((self.scores > np.median(self.scores)) == self.included))

    def save(self, folder: str | Path) -> Path:
        """Write everything, scores and coins included, to `privacy_audit.json` in `folder`, and return its path."""
        path = Path(folder) / AUDIT_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        outcome = "lower_bound", "lower_bounds", "contradicts_claim", "right_guesses"
        terms = {name: getattr(self, name) for name in ("claimed_epsilon", "delta", "confidence", *outcome)}
        # With coins and scores, so that others can compute the bound by another method.
        rows = {"included": self.included.tolist(), "scores": self.scores.tolist()}
        values = {"format_version": 2, "canaries": len(self.scores), **terms, **rows}
        path.write_text(json.dumps(values, ensure_ascii=False) + "\n")
        return path
