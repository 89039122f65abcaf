"""The plan of a private run: every number of the mechanism, computed once, before the first step."""

import math
from dataclasses import dataclass

from doppler_hf.filters import LowPassFilter
from doppler_hf.privacy import PoissonSampler, PrivacyLedger, default_delta, get_noise_multiplier
from doppler_hf.privacy.accounting import Accountant
from doppler_hf.training_args import DopplerTrainingArguments


@dataclass(frozen=True)
class PrivacyPlan:
    """What a run does to the data.

    Attributes:
        num_examples: N.
        expected_batch_size: B, over all processes.
        sample_rate: q = B/N.
        steps: T, the number of steps planned, run and accounted.
        noise_multiplier: σ.
        max_grad_norm: C.
        target_epsilon: ε asked for, or None when σ was given.
        delta: δ.
        accountant: Which accountant bounds ε.
        low_pass_filter: The filter; it costs nothing.
        is_secret: Whether noise and draws come from the operating system's entropy.
    """

    num_examples: int
    expected_batch_size: int
    sample_rate: float
    steps: int
    noise_multiplier: float
    max_grad_norm: float
    target_epsilon: float | None
    delta: float
    accountant: Accountant
    low_pass_filter: LowPassFilter
    is_secret: bool

    @property
    def noise_std(self) -> float:
        """σC/B: the noise's standard deviation per coordinate of the mean gradient."""
        return self.noise_multiplier * self.max_grad_norm / self.expected_batch_size

    @classmethod
    def from_arguments(cls, args: DopplerTrainingArguments, *, sampler: PoissonSampler) -> "PrivacyPlan":
        """Return the plan of `args`; what is said of the sampling is read off the sampler itself.

        Raises:
            ValueError: A target that no noise reaches.
        """
        # The host's own formula (`Trainer.set_initial_training_values`), which the trainer checks against.
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps_per_epoch)
        delta = default_delta(sampler.num_examples) if args.target_delta is None else args.target_delta
        noise_multiplier = args.noise_multiplier
        if noise_multiplier is None:
            assert args.target_epsilon is not None
            noise_multiplier = get_noise_multiplier(
                target_epsilon=args.target_epsilon,
                target_delta=delta,
                sample_rate=sampler.sample_rate,
                steps=steps,
                accountant=args.accountant,
            )
        return cls(
            num_examples=sampler.num_examples,
            expected_batch_size=sampler.expected_batch_size,
            sample_rate=sampler.sample_rate,
            steps=steps,
            noise_multiplier=noise_multiplier,
            max_grad_norm=args.per_sample_max_grad_norm,
            target_epsilon=args.target_epsilon,
            delta=delta,
            accountant=args.accountant,
            low_pass_filter=LowPassFilter.parse(args.low_pass_filter),
            is_secret=sampler.is_secret,
        )

    def open_ledger(self, args: DopplerTrainingArguments) -> PrivacyLedger:
        """Return a ledger on which nothing has been spent yet."""
        return PrivacyLedger(
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
            per_sample_max_grad_norm=self.max_grad_norm,
            clipping=args.clipping,
            clipping_granularity=args.clipping_granularity,
            target_delta=self.delta,
            target_epsilon=self.target_epsilon,
            accountant=self.accountant,
            steps_planned=self.steps,
            private=self.noise_multiplier > 0.0 and self.is_secret,
            train_loss_reported=args.report_train_loss == "raw",
        )
