r"""What noise and delay do to the path of the weights: a number by which the filter and the shape of the noise are chosen.

The weights go w_{t+1} = w_t - η_t m_t, with the noise n_t = Σ κ_τ y_{t-τ} in m_t, y of the strategy c. What a step's noise
displaces is not forgotten at once, and does not stay for ever: the gradient at the displaced weights points back. Where it
turns by its own length in τ_s steps at the full rate η̂ = max η (a quadratic of curvature 1/(η̂ τ_s)), the displacement is

    e_{t+1} = ρ_t e_t - η_t n_t,    ρ_t = 1 - η_t / (η̂ τ_s).

A filter of mean age D = Σ τ κ_τ besides follows the gradient D steps late, by η_t D ‖s‖ on the path. Over the run

    Σ_t ‖D η_t s‖² + Σ_t E‖e_t‖² = η̂² ‖s‖² (D² Σ (η_t/η̂)² + R V),    R = d noise_std² / ‖s‖²,

and V = Σ_t E e_t² for η̂ = noise_std = 1 follows from the autocorrelation of n and from how e remembers,

    V = Σ_l r_|l| φ_l,    r_l = Σ_s η_s η_{s+l} Σ_{t>s+l} (∂e_t/∂n_s)(∂e_t/∂n_{s+l}) / (η_s η_{s+l}),

with φ_l the autocorrelation of ‖c‖ κ * c⁻¹, as if the noise had settled before the first step. Slow noise adds up over τ_s
steps and fast noise does not: this is what shaping uses. With τ_s → ∞ the last term of V is the noise of the sum, and
short memory leaves that of single steps; Koloskova et al. 2023 (https://arxiv.org/abs/2302.01463) bound the convergence of
SGD with correlated noise by the same windows, of 1/(η L) steps.

What is assumed, because nobody knows it before the run: that of the clip norm C a tenth is left in the mean over the batch,
‖s‖ = C/10, and that the gradient turns by its own length in a tenth of the way that the weights go: τ_s = 0.1 Σ η / η̂, T/10
steps at a constant rate and T/20 with a decay to zero. Both numbers are conventions. Of the first we have measured 0.03 to
0.2 in runs on MNIST, digits and CIFAR-10.
"""

import math
from collections.abc import Sequence
from typing import Final, final

import numpy as np
import scipy.optimize
import scipy.signal
from jaxtyping import Float64
from numpy.typing import NDArray

from doppler_hf.filters.design import positive_integer
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.filters.response import group_delay

# The share of the way of the weights after which the gradient is taken to have turned by its own length.
TURN_SHARE: Final = 0.1

# The norm of the mean gradient, as a share of C.
SIGNAL_SHARE: Final = 0.1

# The fewest steps in which it turns: shorter runs than 20 steps are treated as ones that forget half of the noise a step.
MIN_TURN_STEPS: Final = 2.0

# Where a filter passes less power, the strategy is found as if it passed this much: noise at a frequency that is blocked
# altogether could grow without bound.
LEAST_GAIN: Final = 0.01


@final
class Trajectory:
    """The path of the weights over a run of which only the length and the schedule are known.

    Args:
        steps: Length of the run T.
        learning_rates: The learning rate of each step, in any unit, shape (steps,); constant by default.

    Attributes:
        turn_steps: τ_s, in steps at the full rate.

    Raises:
        ValueError: If steps is not a positive integer, or the learning rates are not one for each step, negative, not
            finite, or all zero.

    Example:
        >>> trajectory = Trajectory(300)
        >>> trajectory.turn_steps
        30.0
        >>> white = trajectory.noise(LowPassFilter(b=(1.0,)))
        >>> round((trajectory.noise(LowPassFilter(b=(1.0,)), NoiseShape.banded(4)) / white) ** 0.5, 2)  # for the same σ
        0.61
    """

    def __init__(self, steps: int, learning_rates: Sequence[float] | None = None) -> None:
        rates = _relative_rates(positive_integer("steps", steps), learning_rates)
        self.turn_steps = max(MIN_TURN_STEPS, TURN_SHARE * math.fsum(rates))
        self._squared_rates = float(rates @ rates)
        remembered = np.cumprod(1 - rates / self.turn_steps)
        # r_l = Σ_s (η_s / P_s) (η_{s+l} / P_{s+l}) Σ_{t≥s+l} P_t², P the product of the ρ up to t.
        early = rates / remembered
        late = early * np.cumsum((remembered**2)[::-1])[::-1]
        memory = scipy.signal.correlate(late, early, method="fft")[steps - 1 :]
        # Zeros for responses longer than the run, which would wrap around.
        self._grid = scipy.fft.next_fast_len(4 * steps)
        two_sided = np.zeros(self._grid)
        two_sided[:steps] = memory
        two_sided[self._grid - steps + 1 :] = memory[:0:-1]
        self._spectrum = np.maximum(np.fft.fft(two_sided).real, 0.0) / self._grid

    def noise(self, low_pass_filter: LowPassFilter, shape: NoiseShape = WHITE) -> float:
        """Return V, the noise of the path Σ_t E e_t² in units of (η̂ noise_std)², noise_std that of white noise of this σ.

        Args:
            low_pass_filter: The filter.
            shape: The shape of the noise.
        """
        passed = self._spectrum * self._gain(low_pass_filter)
        return shape.norm**2 * float(np.sum(passed / self._power(shape.c)))

    def error(self, low_pass_filter: LowPassFilter, shape: NoiseShape = WHITE, *, noise_to_signal: float) -> float:
        """Return D² Σ (η_t/η̂)² + R V, the squared error of the path in units of (η̂ ‖s‖)².

        Args:
            low_pass_filter: The filter.
            shape: The shape of the noise.
            noise_to_signal: R = d noise_std² / ‖s‖², with noise_std = σC/B.
        """
        (delay,) = group_delay(low_pass_filter, np.zeros(1))
        return float(delay) ** 2 * self._squared_rates + noise_to_signal * self.noise(low_pass_filter, shape)

    def best_shape(self, bands: int, low_pass_filter: LowPassFilter) -> NoiseShape:
        """Return the strategy of so many bands that leaves the least noise in the path, its coefficients to four decimals.

        V depends on |c|² alone. With ‖c‖² held fixed it is convex in that, so that there is one minimum. Of the strategies
        that attain it, this is the one with all roots inside the unit circle.

        Args:
            bands: b, at least 1.
            low_pass_filter: The filter through which the noise goes.
        """
        start = NoiseShape.banded(bands)
        if start.is_white:
            return start
        passed = self._spectrum * np.maximum(self._gain(low_pass_filter), LEAST_GAIN)

        def loss(tail: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            c = np.array([1.0, *tail])
            response = np.fft.fft(c, self._grid)
            power = np.abs(response) ** 2
            left = float(np.sum(passed / power))
            slope = -2 * self._grid * np.fft.ifft(passed / power**2 * response).real[1:bands]
            return math.log(c @ c) + math.log(left), 2 * c[1:] / (c @ c) + slope / left

        found = scipy.optimize.minimize(loss, np.array(start.c[1:]), jac=True, method="L-BFGS-B").x
        roots = np.roots([1.0, *found])
        inside = np.where(np.abs(roots) > 1, 1 / np.conj(roots), roots)
        c = np.round(np.real(np.poly(inside)), 4)
        shape = NoiseShape(tuple(np.trim_zeros(c, "b")))
        return min(start, shape, key=lambda each: self.noise(low_pass_filter, each))

    def _gain(self, low_pass_filter: LowPassFilter) -> Float64[np.ndarray, " frequencies"]:
        return self._power(low_pass_filter.b) / self._power(low_pass_filter.a)

    def _power(self, coefficients: Sequence[float]) -> Float64[np.ndarray, " frequencies"]:
        return np.asarray(np.abs(np.fft.fft(coefficients, self._grid)) ** 2)


def _relative_rates(steps: int, learning_rates: Sequence[float] | None) -> Float64[np.ndarray, " steps"]:
    """Return the learning rates in units of the greatest."""
    if learning_rates is None:
        return np.ones(steps)
    if len(learning_rates) != steps:
        raise ValueError(f"learning_rates must have one rate for each of the {steps} steps, got {len(learning_rates)}.")
    for step, rate in enumerate(learning_rates):
        if not 0 <= rate < math.inf:
            raise ValueError(f"learning_rates must be finite and at least 0, got {rate} at step {step}.")
    if not max(learning_rates):
        raise ValueError(
            "learning_rates must not all be 0, for the weights would not move. Give at least one that is positive."
        )
    return np.array(learning_rates) / max(learning_rates)
