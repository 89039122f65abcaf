"""The ε, noise and length of a run before it starts, and its alternatives of equal ε, without a model or data.

    q = B/N,    T = ⌈E⌈N/B⌉⌉,    ε = ε(σ, q, T; δ),    noise_std = 1.005 σC/B

ε follows from σ, or σ from ε, for a batch size B and a length (epochs E or steps T). T follows Transformers' formula. σ is
that of the gradient and the logged training loss together, so the gradient itself has 0.5 % more noise.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from doppler_hf.errors import Refusal
from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, NoiseShape, auto_filter
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy.accounting.accounting import Releases, Sampling, default_delta, without_partial_round
from doppler_hf.privacy.accounting.calibration import LARGEST_EPSILON, get_noise_multiplier, noise_multiplier_of_trial
from doppler_hf.privacy.accounting.composition import SMALLEST_DELTA
from doppler_hf.privacy.accounting.selection import (
    Guarantee,
    NumberOfTrials,
    Selection,
    divide_budget,
    refuse_number_of_trials,
    selection_of_releases,
)
from doppler_hf.run.planning.auto_noise import shape_of_equal_epsilon

# The proposed batch size, as a share of the data: see docs/guides/choosing.md.
FIRST_SHARE: Final = 0.04
FIRST_EPOCHS: Final = 3
EPOCHS_OF_FEW: Final = 20  # This is for data sets of up to `FEW` records.
FEW: Final = 1000
FIRST_EPSILON: Final = 8
LEAST_EPSILON: Final = 1e-6  # A smaller ε hardly needs more noise, and takes minutes.
MOST_STEPS: Final = 10_000_000  # The learning rates of so many steps still fit into memory.
BATCH_SIZE_FACTORS: Final = (0.25, 0.5, 1, 2, 4)
EPOCH_FACTORS: Final = (0.5, 1, 2, 4)
# The default of the argument `train_loss_budget`, whose file imports torch.
TRAIN_LOSS_BUDGET: Final = 0.01


def of_gradient(noise_multiplier: float) -> float:
    """Return the noise multiplier of the gradient in a run that logs a private training loss, as runs do by default.

    The given one is that of gradient and loss together.
    """
    return noise_multiplier / math.sqrt(1.0 - TRAIN_LOSS_BUDGET)


@dataclass(frozen=True)
class PlannedRun:
    """A run that could be started: its mechanism, and the noise in its gradients."""

    num_examples: int  # N
    expected_batch_size: int  # B
    steps: int  # T
    noise_multiplier: float  # σ
    max_grad_norm: float  # C
    sampling: Sampling = "allocation"

    @property
    def sample_rate(self) -> float:
        """Probability q = B/N with which each record is drawn at each step."""
        return self.expected_batch_size / self.num_examples

    @property
    def noise_std(self) -> float:
        """1.005 σC/B, the noise per coordinate of the mean gradient of a step if it is white; shaped noise has more."""
        return of_gradient(self.noise_multiplier) * self.max_grad_norm / self.expected_batch_size

    def average_noise_std(self, shape: NoiseShape = WHITE) -> float:
        """Return the noise per coordinate of the average of all T mean gradients: 1.005 σC/(B√T) if it is white.

        A filter hardly changes it, because its gain at frequency zero is 1.
        """
        return self.noise_std * shape.std_of_average(self.steps)

    @property
    def examples_processed(self) -> int:
        """B·T, the expected number of per-sample gradients: the run's cost in time."""
        return self.expected_batch_size * self.steps


# Transformers' `lr_scheduler_type` without a warmup → the rate after a share of the run, in units of the first.
SCHEDULES: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: (1.0 + math.cos(math.pi * share)) / 2,
    "constant": lambda share: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run of E epochs, or T steps (`max_steps`), with either ε or σ; δ is N^−1.1 by default.

    With `trials`, ε and δ are those of a search with so many expected trials, and σ is that of each trial.

    Raises:
        ValueError: If a number is out of range, B is missing, or not exactly one of ε and σ, and of E and T, is given.

    Example:
        >>> PlanRequest(num_examples=50_000, batch_size=1000, epochs=3, noise_multiplier=1.0).solve().steps
        150
    """

    num_examples: int
    batch_size: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    epochs: float | None = None
    max_steps: int | None = None
    delta: float | None = None
    max_grad_norm: float = 1.0
    sampling: Sampling = "allocation"
    trials: float | None = None
    lr_scheduler_type: str = "linear"

    def rates(self, steps: int) -> list[float]:
        """Return the learning rate of each of so many steps, in units of the first, by the schedule."""
        return [SCHEDULES[self.lr_scheduler_type](step / steps) for step in range(steps)]

    def __post_init__(self) -> None:
        if not 2 <= self.num_examples < 1 / SMALLEST_DELTA:
            raise Refusal(
                "out-of-range",
                f"--num-examples must be at least 2 and below {1 / SMALLEST_DELTA:.0e}; got {self.num_examples}. Give the "
                "size of the training set.",
            )
        for name in ("epsilon", "noise_multiplier", "epochs", "max_steps", "batch_size", "max_grad_norm"):
            value = vars(self)[name]
            if value is not None and not 0 < value < math.inf:
                raise Refusal("out-of-range", f"--{name.replace('_', '-')} must be positive and finite; got {value}.")
        if self.epsilon is not None and not LEAST_EPSILON <= self.epsilon <= LARGEST_EPSILON:
            raise Refusal(
                "out-of-range",
                f"--epsilon must be from {LEAST_EPSILON:g} to {LARGEST_EPSILON:g}; got {self.epsilon:g}. Start with "
                f"{FIRST_EPSILON}.",
            )
        if self.epsilon is not None and self.epsilon * self.num_examples < 1.0:
            raise Refusal(
                "epsilon-too-small",
                f"--epsilon must be at least 1/N = {1 / self.num_examples:.3g}; got {self.epsilon:g}. With a smaller ε, "
                f"even all records together may hardly change the model, so it cannot learn. Start with {FIRST_EPSILON}.",
            )
        if self.delta is not None and not 0 < self.delta * self.num_examples < 1:
            # A mechanism that publishes one of the N records at random satisfies DP with a larger δ.
            raise Refusal(
                "delta-too-large",
                f"--delta must be positive and less than 1/N = {1 / self.num_examples:.3g}; got {self.delta:g}. A δ of 1/N "
                "or more would allow one record to be published in full. Leave --delta out to use N^-1.1.",
            )
        if self.trials is not None:
            refuse_number_of_trials(self.trials)
        if self.batch_size is None:
            raise Refusal("no-batch-size", f"--batch-size is missing. Start with {self._proposed()}.")
        if self.batch_size > self.num_examples:
            raise Refusal(
                "batch-too-large",
                f"--batch-size must be at most the {self.num_examples} records of the training set; got {self.batch_size}. "
                "Give a smaller --batch-size.",
            )
        for one, other in (("epochs", "max_steps"), ("epsilon", "noise_multiplier")):
            given = [vars(self)[name] for name in (one, other) if vars(self)[name] is not None]
            if len(given) != 1:
                flags = f"--{one} and --{other.replace('_', '-')}"
                fact = (
                    "are both given. Leave one of them out" if given else f"are both missing. Start with {self._proposed()}"
                )
                raise Refusal("one-of-two", f"Exactly one of two flags is needed. {flags} {fact}.")
        if (self.epochs is not None and self.epochs * self.steps_per_epoch > MOST_STEPS) or self.steps > MOST_STEPS:
            raise Refusal(
                "out-of-range",
                f"The plan has more than {MOST_STEPS:,} steps, and no plan of so many is made. Give a smaller --epochs or "
                "--max-steps, or a larger --batch-size.",
            )

    def _proposed(self) -> str:
        """Return the flags that are missing, with the values of docs/guides/choosing.md."""
        is_small = self.num_examples <= FEW
        proposals = {
            f"--batch-size {max(1, round(FIRST_SHARE * self.num_examples))}": self.batch_size is None,
            f"--epochs {EPOCHS_OF_FEW if is_small else FIRST_EPOCHS}": self.epochs is self.max_steps is None,
            f"--epsilon {FIRST_EPSILON}": self.epsilon is self.noise_multiplier is None,
        }
        return " ".join(flag for flag, is_missing in proposals.items() if is_missing)

    @property
    def target_delta(self) -> float:
        """δ, given or the default."""
        return default_delta(self.num_examples) if self.delta is None else self.delta

    @property
    def steps_per_epoch(self) -> int:
        """⌈N/B⌉."""
        assert self.batch_size is not None
        return math.ceil(self.num_examples / self.batch_size)

    @property
    def steps(self) -> int:
        """T, before a plan with groups leaves out its last steps."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.epochs is not None
        # Transformers' own formula (`Trainer.set_initial_training_values`).
        return math.ceil(self.epochs * self.steps_per_epoch)

    def solve(self, *, rough: bool = False, selection: Selection | None = None) -> PlannedRun:
        """Return the run with the given σ, or with the smallest σ that keeps ε; for `rough` see `get_noise_multiplier`.

        A trial of a search has the smallest σ that satisfies its `selection`.
        """
        assert self.batch_size is not None
        steps, sigma = self.steps, self.noise_multiplier
        if sigma is None:
            sigma = self.sigma(steps, rough=rough, selection=selection)
        return PlannedRun(self.num_examples, self.batch_size, steps, sigma, self.max_grad_norm, self.sampling)

    def sigma(
        self,
        steps: int,
        *,
        strategy: tuple[float, ...] = (1.0,),
        rough: bool = False,
        selection: Selection | None = None,
    ) -> float:
        """Return the smallest σ with which so many steps keep ε, or satisfy the `selection` of a search."""
        assert self.batch_size is not None
        terms: dict[str, Any] = {
            "sample_rate": self.batch_size / self.num_examples,
            "steps": steps,
            "strategy": strategy,
            "sampling": self.sampling,
            "rough": rough,
        }
        if selection is not None:
            return noise_multiplier_of_trial(selection, **terms)
        assert self.epsilon is not None
        return get_noise_multiplier(target_epsilon=self.epsilon, target_delta=self.target_delta, **terms)


def alternatives(
    request: PlanRequest, run: PlannedRun, epsilon: float, *, selection: Selection | None = None
) -> dict[float, list[PlannedRun]]:
    """Calibrate runs around the `run` of a request, with other batch sizes and numbers of epochs, to the same ε and δ.

    With a `selection`, they are trials of the same search.

    Returns:
        Epochs → runs of that length. The epochs are ½ to 4 times those of the run, and the batch sizes ¼ to 4 times its
        batch size, if they are smaller than the data set and some noise reaches the ε. The run itself is returned unchanged.
    """
    epochs = epochs_of(request, run)
    same: dict[str, Any] = {"noise_multiplier": None, "max_steps": None, "epsilon": epsilon}

    def calibrated(batch_size: int, length: float) -> PlannedRun | None:
        if (length, batch_size) == (epochs, run.expected_batch_size):
            return run
        try:
            # The table shows three digits, for which the rough grid is enough.
            other = replace(request, **same, epochs=length, batch_size=batch_size)
            return other.solve(rough=True, selection=selection)
        except ValueError:  # ε, or the length, is out of range, or no noise multiplier up to 10⁶ is known to reach ε.
            return None

    batch_sizes = {max(1, round(factor * run.expected_batch_size)) for factor in BATCH_SIZE_FACTORS}
    # A batch of all records leaves nothing to chance, so it is shown only if it was asked for.
    sizes = sorted(size for size in batch_sizes if size < run.num_examples or size == run.expected_batch_size)
    table = {
        length: [calibrated(size, length) for size in sizes] for length in (factor * epochs for factor in EPOCH_FACTORS)
    }
    return {length: [other for other in runs if other is not None] for length, runs in table.items()}


def epochs_of(request: PlanRequest, run: PlannedRun) -> float:
    """Return the given E, before Transformers rounds it up to whole steps, or T/⌈N/B⌉."""
    return run.steps / request.steps_per_epoch if request.epochs is None else request.epochs


class PlannedTerms(NamedTuple):
    """The noise and filter of a planned run, and the run with their σ and T."""

    shape: NoiseShape
    low_pass_filter: LowPassFilter
    run: PlannedRun
    white_run: PlannedRun  # the same with white noise
    selection: Selection | None = None  # what each trial satisfies, if the run is a trial of a search
    single_run: "PlannedTerms | None" = None  # the run of the whole ε for which a search divides its ε

    @property
    def releases(self) -> Releases:
        """What the planned run releases, in the accountant's terms."""
        run = self.run
        return Releases(run.noise_multiplier, run.sample_rate, run.steps, self.shape.c, run.sampling)


def planned_terms(request: PlanRequest, low_pass_filter: LowPassFilter | None) -> PlannedTerms:
    """Return the noise shape and filter that a training run, or a trial of a search, would choose, with their σ and T.

    If the request has σ in place of ε, the noise is white. A given filter is kept. Assumed are Adam, no warmup, and enough
    memory.
    """
    single_run = _terms_with(None, request, low_pass_filter)
    if request.trials is None:
        return single_run
    trials, delta = NumberOfTrials(request.trials), request.target_delta
    if request.epsilon is None:
        return single_run._replace(selection=selection_of_releases(single_run.releases, trials, delta=delta))
    selection = divide_budget(trials, target_epsilon=request.epsilon, target_delta=delta, single_run=single_run.releases)
    return _terms_with(selection, request, low_pass_filter)._replace(single_run=single_run)


def _terms_with(selection: Selection | None, request: PlanRequest, low_pass_filter: LowPassFilter | None) -> PlannedTerms:
    run = request.solve(selection=selection)
    white = PlannedTerms(WHITE, low_pass_filter or PAPER_FILTERS["none"], run, run, selection)
    # Shapes are compared at equal ε, so they need a target ε. Poisson sampling may draw a record in every step, which shaped
    # noise does not allow.
    if request.epsilon is None or run.sampling == "poisson":
        return white

    shape = shape_of_equal_epsilon(
        Guarantee(request.epsilon, request.target_delta),
        selection,
        sample_rate=run.sample_rate,
        steps=run.steps,
        learning_rates=request.rates(run.steps),
        low_pass_filter=low_pass_filter,
    )
    if shape.is_white:
        return white
    steps = run.steps
    if request.max_steps is None:  # A run whose length is given in epochs ends when every group has had its turns.
        steps = without_partial_round(steps, sample_rate=run.sample_rate, groups=shape.bands)
    chosen = low_pass_filter or auto_filter(steps, learning_rates=request.rates(steps), noise=shape)
    shaped = replace(run, steps=steps, noise_multiplier=request.sigma(steps, strategy=shape.c, selection=selection))
    return PlannedTerms(shape, chosen, shaped, run, selection)
