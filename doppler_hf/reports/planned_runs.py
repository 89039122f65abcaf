"""The ε, noise and length of a run before it is started, and its alternatives of equal ε, without model or data.

    q = B/N,    T = ⌈E⌈N/B⌉⌉,    ε = ε(σ, q, T; δ),    noise_std = σC/B

Of ε, σ, the length (epochs E or steps T) and the batch size B, three determine the fourth. T follows Transformers' formula.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from doppler_hf.filters import LowPassFilter, noise_gain
from doppler_hf.privacy.accounting.accounting import Sampling, default_delta, get_epsilon
from doppler_hf.privacy.accounting.calibration import get_noise_multiplier, most_steps

Unknown = Literal["epsilon", "noise_multiplier", "epochs", "batch_size"]

# No run is longer. A search that gets here has a budget that sets no limit.
MAX_STEPS: Final = 10_000_000

# A few hundredths of the data: see docs/guides/choosing.md.
FIRST_SHARE: Final = 0.04
BATCH_SIZE_FACTORS: Final = (0.25, 0.5, 1, 2, 4)
EPOCH_FACTORS: Final = (0.5, 1, 2, 4)


@dataclass(frozen=True)
class PlannedRun:
    """A run that could be started: its mechanism, and the noise in its gradients.

    Attributes:
        num_examples: N.
        expected_batch_size: B.
        steps: T.
        noise_multiplier: σ.
        max_grad_norm: C.
        sampling: As for `get_epsilon`.
    """

    num_examples: int
    expected_batch_size: int
    steps: int
    noise_multiplier: float
    max_grad_norm: float
    sampling: Sampling = "allocation"

    @property
    def sample_rate(self) -> float:
        """Probability q = B/N with which each example is drawn at each step."""
        return self.expected_batch_size / self.num_examples

    @property
    def epochs(self) -> float:
        """T/⌈N/B⌉, such that Transformers, which rounds up to whole steps, arrives at T again."""
        steps_per_epoch = _steps_per_epoch(self.num_examples, self.expected_batch_size)
        epochs = self.steps / steps_per_epoch
        # 29/7·7 is a little more than 29 in floating point.
        return epochs if math.ceil(epochs * steps_per_epoch) == self.steps else math.nextafter(epochs, 0.0)

    @property
    def noise_std(self) -> float:
        """σC/B, per coordinate of the mean gradient of one step."""
        return self.noise_multiplier * self.max_grad_norm / self.expected_batch_size

    @property
    def average_noise_std(self) -> float:
        """σC/(B√T), per coordinate of the average of all T mean gradients; a filter, of gain 1 there, hardly changes it."""
        return self.noise_std / math.sqrt(self.steps)

    @property
    def examples_processed(self) -> int:
        """B·T, the expected number of per-sample gradients: the run's cost in time."""
        return self.expected_batch_size * self.steps

    def filtered_noise_std(self, low_pass_filter: LowPassFilter) -> float:
        """Return σC/B·√Σκ², per coordinate of the filtered gradient once the filter has settled."""
        return self.noise_std * math.sqrt(noise_gain(low_pass_filter))


class Target(NamedTuple):
    """What runs of equal ε have in common: ε > 0, and δ in (0, 1)."""

    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run with one unknown of ε, σ, E (or T, `max_steps`) and B; δ is N^−1.1 by default.

    Raises:
        ValueError: If a number is out of range, or not exactly one of ε, σ, the length and B is left out.

    Example:
        >>> request = PlanRequest(num_examples=50_000, batch_size=1000, epochs=3, noise_multiplier=1.0)
        >>> request.unknown, request.solve().steps
        ('epsilon', 150)
    """

    num_examples: int
    epsilon: float | None = None
    noise_multiplier: float | None = None
    epochs: float | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    delta: float | None = None
    max_grad_norm: float = 1.0
    sampling: Sampling = "allocation"

    def __post_init__(self) -> None:
        if self.num_examples < 2:
            raise ValueError(
                f"--num-examples must be at least 2, got {self.num_examples}. Give the size of the training set."
            )
        for name in ("epsilon", "noise_multiplier", "epochs", "max_steps", "batch_size", "max_grad_norm"):
            value = vars(self)[name]
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be a finite number > 0, got {value}.")
        if self.delta is not None and not 0 < self.delta * self.num_examples < 1:
            # A mechanism that publishes one of the N examples at random satisfies DP with a larger δ.
            raise ValueError(
                f"--delta must be positive and less than 1/N = {1 / self.num_examples:.3g}, got {self.delta:g}. Leave it "
                "out for N^-1.1."
            )
        if self.batch_size is not None and self.batch_size > self.num_examples:
            raise ValueError(f"--batch-size must be at most {self.num_examples}, got {self.batch_size}. Lower it.")
        if self.epochs is not None and self.max_steps is not None:
            both = f"{self.epochs} and {self.max_steps}"
            raise ValueError(f"Only one of --epochs and --max-steps may be set, got {both}. Leave one out.")
        if len(self._unknowns) != 1:
            flags = [f"--{name.replace('_', '-')}" for name in self._unknowns]
            given = f"without {' and '.join(flags)}" if flags else "all four"
            four = "--epsilon, --noise-multiplier, --epochs (or --max-steps) and --batch-size"
            first = max(1, round(FIRST_SHARE * self.num_examples))
            mend = f" Begin with --batch-size {first}." if "batch_size" in self._unknowns else ""
            raise ValueError(f"Three of {four} must be set, got {given}.{mend} The fourth follows.")

    @property
    def _unknowns(self) -> list[Unknown]:
        given: dict[Unknown, float | None] = {
            "epsilon": self.epsilon,
            "noise_multiplier": self.noise_multiplier,
            "epochs": self.epochs if self.max_steps is None else self.max_steps,
            "batch_size": self.batch_size,
        }
        return [name for name, value in given.items() if value is None]

    @property
    def unknown(self) -> Unknown:
        """The quantity that is solved for."""
        return self._unknowns[0]

    @property
    def target_delta(self) -> float:
        """δ, given or the default."""
        return default_delta(self.num_examples) if self.delta is None else self.delta

    def solve(self, *, rough: bool = False) -> PlannedRun:
        """Return the run with the least noise, the most epochs or the largest batch within the target.

        `rough` is that of `get_noise_multiplier`.

        Raises:
            ValueError: If nothing within reach of the unknown meets the target, or everything does.
        """
        batch_size = self._largest_batch_size() if self.batch_size is None else self.batch_size
        steps = self._most_steps(batch_size) if self.unknown == "epochs" else self._steps(batch_size)
        noise_multiplier = self.noise_multiplier
        if noise_multiplier is None:
            assert self.epsilon is not None
            noise_multiplier = get_noise_multiplier(
                target_epsilon=self.epsilon,
                target_delta=self.target_delta,
                sample_rate=batch_size / self.num_examples,
                steps=steps,
                sampling=self.sampling,
                rough=rough,
            )
        return PlannedRun(self.num_examples, batch_size, steps, noise_multiplier, self.max_grad_norm, self.sampling)

    def _steps(self, batch_size: int) -> int:
        """Return the number of steps by Transformers' own formula (`Trainer.set_initial_training_values`)."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.epochs is not None
        return math.ceil(self.epochs * _steps_per_epoch(self.num_examples, batch_size))

    def _known(self, batch_size: int) -> dict[str, Any]:
        return {
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": batch_size / self.num_examples,
            "delta": self.target_delta,
            "sampling": self.sampling,
        }

    def _cost(self, batch_size: int, steps: int) -> float:
        return get_epsilon(steps=steps, **self._known(batch_size))

    def _most_steps(self, batch_size: int) -> int:
        assert self.epsilon is not None
        at_most, steps = _steps_per_epoch(self.num_examples, batch_size), 0
        # From few steps to many: the accountant is slow far above the target.
        while at_most <= MAX_STEPS:
            cost = functools.cache(functools.partial(self._cost, batch_size))
            steps = most_steps(cost, target_epsilon=self.epsilon, at_most=at_most)
            if steps < at_most:
                break
            at_most *= 4
        else:
            raise ValueError(
                f"With --noise-multiplier {self.noise_multiplier} even {steps} steps cost less than --epsilon "
                f"{self.epsilon}. Lower --noise-multiplier, or give --epochs and leave it out."
            )
        if steps == 0:
            raise ValueError(
                f"With --noise-multiplier {self.noise_multiplier} and --batch-size {batch_size} one step costs ε = "
                f"{self._cost(batch_size, 1):.4g}, more than --epsilon {self.epsilon}. Raise --noise-multiplier "
                "or --epsilon, or lower --batch-size."
            )
        return steps

    def _largest_batch_size(self) -> int:
        batch_size = self._largest_batch_size_in(1, self.num_examples)
        if batch_size is None:
            least = self._cost(1, self._steps(1))
            raise ValueError(
                f"With --noise-multiplier {self.noise_multiplier} even --batch-size 1 costs ε = {least:.4g}, more than "
                f"--epsilon {self.epsilon}. Raise --noise-multiplier or --epsilon, or shorten the run."
            )
        return batch_size

    def _largest_batch_size_in(self, low: int, high: int) -> int | None:
        """Find the largest B in [low, high] within the target.

        ε(B) is not monotone: T drops wherever ⌈N/B⌉ does. But ε rises with q and with T, so no B of an interval costs less
        than its smallest q with its fewest steps. If that is too much, the interval is ruled out.
        """
        assert self.epsilon is not None
        if self._cost(low, self._steps(high)) > self.epsilon:
            return None
        if low == high:
            return low
        middle = (low + high) // 2
        upper = self._largest_batch_size_in(middle + 1, high)
        return self._largest_batch_size_in(low, middle) if upper is None else upper


def alternatives(run: PlannedRun, target: Target, *, epochs: float) -> dict[float, list[PlannedRun]]:
    """Calibrate runs around `run`, with other batch sizes and numbers of epochs, to the same ε.

    Args:
        run: The run in the middle, which is returned unchanged.
        target: The ε of all of them.
        epochs: Its epochs, before Transformers rounds up to whole steps.

    Returns:
        Epochs, ½ to 4 times those of the run → runs with ¼ to 4 times its batch size, as far as that is smaller than the
        data set and some noise reaches the ε.
    """

    def calibrated(batch_size: int, length: float) -> PlannedRun | None:
        try:
            same: dict[str, Any] = {name: vars(run)[name] for name in ("num_examples", "max_grad_norm", "sampling")}
            return PlanRequest(epochs=length, batch_size=batch_size, **same, **target._asdict()).solve(rough=True)
        except ValueError:  # ε is so small that no noise multiplier up to 10⁶ is known to reach it.
            return None

    batch_sizes = {max(1, round(factor * run.expected_batch_size)) for factor in BATCH_SIZE_FACTORS}
    table = {}
    for length in [factor * epochs for factor in EPOCH_FACTORS]:
        runs = (
            run if (length, batch_size) == (epochs, run.expected_batch_size) else calibrated(batch_size, length)
            for batch_size in sorted(batch_sizes)
            if batch_size < run.num_examples or batch_size == run.expected_batch_size
        )
        table[length] = [other for other in runs if other is not None]
    return table


def _steps_per_epoch(num_examples: int, batch_size: int) -> int:
    return math.ceil(num_examples / batch_size)
