"""The terms of a run's guarantee, fixed before its first step.

Each of N units is in the batch of a step with probability q = B/N. A step clips the contribution of a unit to norm C and
adds noise σC. It may also release the sum of clipped losses, from the same batch and with separate noise. Together these are
one Gaussian mechanism with 1/σ₀² = 1/σ² + 1/σ_L². The accountant bounds T such steps for add/remove neighbours.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from doppler_hf.filters.noise_shape import NoiseShape
from doppler_hf.privacy.accounting.accounting import (
    ONE_EXAMPLE,
    Accountant,
    Releases,
    Sampling,
    joint_noise_multiplier,
)
from doppler_hf.privacy.accounting.selection import Guarantee, NumberOfTrials, Selection

NEIGHBOURING_RELATION: Final = "add or remove one unit"
ROLE_OF_NUM_UNITS: Final = "public, not protected"

_RAW_TRAIN_LOSS: Final = "the training loss, which was logged without noise"
_NEVER_COVERED: Final = (
    "whatever a callback of the user computes from training examples, such as gradient norms, losses and metrics",
    "metrics on the evaluation data, and every choice made with them: best checkpoint, early stopping, hyper-parameters",
    "hyper-parameter search, and any other run on the same training data: their ε add up",
    "the tokenizer, the label set, and the data that the model was pretrained on",
    "the number of units, which is taken to be public",
    "the time and memory that a step takes",
)
_OF_SEARCHES: Final = (
    "the evaluation data, with which the search has chosen its best trial",
    "the number of trials, which is secret, and what tells of it, such as the time that the search took",
    "any other run or search on the same training data: their ε add up",
)


@dataclass(frozen=True)
class SearchTerms:
    """What every trial of a search satisfies, if a run is the published trial of a search: see `accounting.selection`."""

    expected_trials: float
    first_epsilon: float
    first_delta: float
    second_epsilon: float
    second_delta: float

    @classmethod
    def of(cls, selection: Selection) -> Self:
        """Return the terms of a search whose number of trials has a logarithmic distribution."""
        assert selection.trials.shape == 0.0
        return cls(selection.trials.mean, *selection.first, *selection.second)

    @property
    def selection(self) -> Selection:
        """The same terms as the accountant has them."""
        first, second = Guarantee(self.first_epsilon, self.first_delta), Guarantee(self.second_epsilon, self.second_delta)
        return Selection(NumberOfTrials(self.expected_trials), first, second)


@dataclass(frozen=True)
class PrivacyStatement:
    """The terms of a run's guarantee."""

    num_units: int  # N, public
    unit_of_privacy: str  # such as "one example" or "all examples with the same 'user_id'"
    max_examples_per_unit: int | None  # in one batch; None if a unit is one example, or has no limit
    expected_batch_size: int  # B, in units, over all processes
    sample_rate: float  # q = B/N
    noise_multiplier: float  # σ, the noise on the gradient in units of C
    noise_shape: str
    per_sample_max_grad_norm: float  # C
    clipping: Literal["automatic", "vanilla"]
    clipping_granularity: Literal["flat", "per_layer"]
    augmentation_multiplicity: int  # views of an example, whose mean gradient is clipped
    clip_unit_mean: bool  # whether the mean gradient of a unit's examples is clipped, and not each gradient
    train_loss: Literal["raw", "none", "private"]  # "raw" is not covered by the guarantee
    per_sample_max_loss: float | None  # the most that one unit adds to the private training loss
    loss_noise_multiplier: float | None  # σ_L, the noise on that loss in units of this bound
    target_delta: float
    target_epsilon: float | None  # None when σ was given
    accountant: Accountant
    steps_planned: int  # T, counted from the first step even if the run was resumed
    private: bool  # False without noise, with reproducible noise or draws, or with gradients recorded before noise
    noise_source: str
    sampling: Sampling = "allocation"  # the default for older ledgers, which do not have this field
    search: SearchTerms | None = None  # if the run is the published trial of a search, whose δ is target_delta

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Self:
        """Return the statement that an entry of a ledger holds."""
        search = entry.get("search")
        return cls(**entry | {"search": None if search is None else SearchTerms(**search)})

    @property
    def groups(self) -> int:
        """The number b of groups of units that take turns; 1 if every step draws from all units."""
        return NoiseShape.parse(self.noise_shape).bands

    @property
    def noun(self) -> str:
        """What N counts: "record" or "user"."""
        return noun_of(self.unit_of_privacy)

    @property
    def mechanism(self) -> str:
        """The mechanism in one line."""
        what = "Gaussian mechanism" if self.groups == 1 else "Banded matrix factorization"
        turns = "Poisson sampling" if self.sampling == "poisson" else "random allocation"
        turns += "" if self.groups == 1 else " in turns"
        return f"{what} with {turns}; filter, optimizer and projection are post-processing"

    @property
    def why_not_private(self) -> str | None:
        """The reason why nothing is guaranteed; None if the run was private."""
        if self.target_delta * self.num_units >= 1.0:
            # A mechanism that publishes one of the N units at random satisfies DP with such a δ.
            return f"δ ≥ 1/N, with which one of the {self.num_units:,} {self.noun}s could be published in full"
        if self.private:
            return None
        if self.noise_multiplier == 0.0:
            return "no noise was added"
        return "its noise and random batches can be reproduced, or gradients were recorded without noise"

    @property
    def noise_shape_in_words(self) -> str:
        """The shape of the noise, and how often a unit may take part."""
        once = (
            "independent from step to step"
            if self.groups == 1
            else f"each {self.noun} takes part at most once in {self.groups} steps"
        )
        return f"{self.noise_shape}: {once}"

    @property
    def effective_noise_multiplier(self) -> float:
        """σ₀ of everything that a step releases."""
        # Privacy: gradient and loss are computed from the same draw, so they are one release, not two.
        if self.loss_noise_multiplier is None:
            return self.noise_multiplier
        return joint_noise_multiplier(self.noise_multiplier, self.loss_noise_multiplier)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """The things that the guarantee does not cover."""
        raw = [_RAW_TRAIN_LOSS] if self.train_loss == "raw" else []
        never = [line for line in _NEVER_COVERED if self.search is None or not line.startswith("hyper-parameter")]
        return (*raw, *never, *([] if self.search is None else _OF_SEARCHES))

    def continues(self, earlier: "PrivacyStatement", *, from_step: int) -> bool:
        """Return whether the terms of a run from this step on are those of an earlier run.

        Whether the run then continues the earlier one's plan also depends on how that one ended: see `record`. Without a
        target and from step 0 it does not: all steps are made once more, and not just those that were lost.
        """
        is_of_one_length = self.steps_planned == earlier.steps_planned and (from_step > 0 or self.target_epsilon is not None)
        return is_of_one_length and self.target_epsilon == earlier.target_epsilon and self.releases(1) == earlier.releases(1)

    def continues_by_the_rule_before(self, earlier: "PrivacyStatement", *, from_step: int) -> bool:
        """Return whether version 0.3.0 counted a run as part of an earlier run's plan, however that run had ended."""
        is_same_length = (from_step > 0 and self.steps_planned == earlier.steps_planned) or self.target_epsilon is not None
        return is_same_length and self.target_epsilon == earlier.target_epsilon and self.releases(1) == earlier.releases(1)

    def releases(self, steps: int) -> Releases:
        """Return what `steps` steps release, in the accountant's terms."""
        strategy = NoiseShape.parse(self.noise_shape).c
        return Releases(self.effective_noise_multiplier, self.sample_rate, steps, strategy, self.sampling)


def noun_of(unit_of_privacy: str) -> str:
    """Return what a unit of privacy is called: "record" or "user"."""
    # A ledger that covers single rows says "one example" in its file, whose format is fixed.
    return "record" if unit_of_privacy == ONE_EXAMPLE else "user"
