"""The privacy ledger: what was done to the data, in a file that someone else can check.

It lies beside the model and in every checkpoint as `privacy_ledger.json`, and says which mechanism ran for how many
steps, what that costs, and what it does not cover.
"""

import importlib.metadata
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from doppler_hf.privacy.accounting import Accountant, Releases, get_total_epsilon

LEDGER_NAME = "privacy_ledger.json"

NOT_COVERED = (
    "the training loss and whatever a callback computes from raw examples or gradients",
    "metrics on the evaluation data, and every choice made with them: best checkpoint, early stopping, hyper-parameters",
    "hyper-parameter search over several runs on the same training data",
    "the tokenizer, the label set, and the data that the model was pretrained on",
    "the number of training examples, which is taken to be public",
)


@dataclass
class PrivacyLedger:
    """Everything that the guarantee of a run rests on.

    Attributes:
        num_examples: N, public.
        expected_batch_size: B, over all processes.
        sample_rate: q = B/N.
        noise_multiplier: σ of the current run.
        per_sample_max_grad_norm: C.
        clipping: Clipping function.
        clipping_granularity: One norm over everything, or one a layer.
        target_delta: δ.
        target_epsilon: The ε that was asked for, or None when σ was given.
        accountant: Which accountant bounds ε.
        steps_planned: T.
        private: False when there is no noise, or when noise or draws can be reproduced.
        history: What was released: steps run, by noise multiplier and sample rate. Steps whose result was lost in a
            crash count, since what came of them was logged.
        restarts: Steps from which the run was resumed.
        train_loss_reported: Whether the training loss, which is not private, was logged.
    """

    num_examples: int
    expected_batch_size: int
    sample_rate: float
    noise_multiplier: float
    per_sample_max_grad_norm: float
    clipping: str
    clipping_granularity: str
    target_delta: float
    target_epsilon: float | None
    accountant: Accountant
    steps_planned: int
    private: bool
    train_loss_reported: bool
    history: list[Releases] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)

    @property
    def steps_run(self) -> int:
        """Steps released so far, those that a crash undid included."""
        return sum(entry.steps for entry in self.history)

    def record_step(self) -> None:
        """Count one more release of the current mechanism."""
        self.history = self._history_after(1)

    def epsilon(self, *, further_steps: int = 0) -> float:
        """Return ε spent so far, or after `further_steps` more under the current mechanism; infinity if not private."""
        if not self.private:
            return float("inf")
        return get_total_epsilon(self._history_after(further_steps), delta=self.target_delta, accountant=self.accountant)

    def affordable_steps(self, steps: int) -> int:
        """Return how many of `steps` more steps keep within `target_epsilon`; all of them if there is no target."""
        if self.target_epsilon is None or not self.private or self.epsilon(further_steps=steps) <= self.target_epsilon:
            return steps
        low, high = 0, steps  # affordable (or already overrun), and not affordable
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(further_steps=middle) <= self.target_epsilon else (low, middle)
        return low

    def _history_after(self, steps: int) -> list[Releases]:
        if steps == 0:
            return self.history
        if self.history and self.history[-1][:2] == (self.noise_multiplier, self.sample_rate):
            return [*self.history[:-1], self.history[-1]._replace(steps=self.history[-1].steps + steps)]
        return [*self.history, Releases(self.noise_multiplier, self.sample_rate, steps)]

    def resume(self, earlier: Self, *, from_step: int) -> None:
        """Take over what an earlier run of this training has spent.

        Args:
            earlier: Its latest ledger.
            from_step: The optimizer step at which this run goes on.

        Raises:
            ValueError: The earlier run was about other data or another δ, so the two cannot be added up.
        """
        for name in ("num_examples", "target_delta"):
            if getattr(self, name) != getattr(earlier, name):
                raise ValueError(
                    f"The run to be resumed has {name}={getattr(earlier, name)}, this one {getattr(self, name)}. Resume "
                    f"with the same data and the same target_delta, or train into a new output_dir."
                )
        if earlier.steps_run < from_step:
            raise ValueError(
                f"The checkpoint is at step {from_step}, but its ledger counts {earlier.steps_run} steps only: it does "
                "not belong to this checkpoint."
            )
        self.history = list(earlier.history)
        self.restarts = [*earlier.restarts, from_step]
        self.private = self.private and earlier.private
        self.train_loss_reported = self.train_loss_reported or earlier.train_loss_reported

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain JSON values; an infinite ε is null."""
        epsilon = self.epsilon()
        return {
            "format_version": 1,
            "mechanism": "Poisson-subsampled Gaussian; the filter and the optimizer are post-processing",
            "neighbouring_relation": "add or remove one example",
            "unit_of_privacy": "one training example",
            **{name: value for name, value in asdict(self).items() if name not in ("history", "restarts")},
            "steps_run": self.steps_run,
            "epsilon_spent": None if epsilon == float("inf") else epsilon,
            "history": [entry._asdict() for entry in self.history],
            "restarts": self.restarts,
            "noise_source": "AES-256-CTR keyed by the operating system" if self.private else "none, or reproducible",
            "not_covered": list(NOT_COVERED),
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "opacus")},
        }

    def save(self, folder: str | Path) -> None:
        """Write the ledger into `folder`, whole or not at all."""
        path = Path(folder) / LEDGER_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")
        os.replace(temporary, path)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the ledger of `folder`.

        Raises:
            FileNotFoundError: There is none.
            ValueError: The file is not a ledger of this format.
        """
        path = Path(folder) / LEDGER_NAME
        try:
            values = json.loads(path.read_text())
            if values["format_version"] != 1:
                raise ValueError(f"{path} has format version {values['format_version']}; this version reads 1.")
            kept = {name: values[name] for name in cls.__dataclass_fields__}
            kept["history"] = [Releases(**entry) for entry in values["history"]]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a privacy ledger: {error!r}.") from error
        return cls(**kept)
