"""The low-pass filter of DOPPLER: its coefficients, and what makes them valid.

    m_t = - Σ_{τ=1..n_a} a_τ m_{t-τ} + Σ_{τ=0..n_b} b_τ g_{t-τ}        (Algorithm 2, line 6)

As in SciPy, ``a[0] = 1`` is written out: the paper's "-9/11" is ``a = (1, -9/11)``. A filter is stable if all roots of
z^n + a_1 z^{n-1} + ... + a_n are inside the unit circle; the paper's appendix by mistake demands this of their reciprocals.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar, Final, final

import numpy as np
import scipy.signal
from numpy.typing import NDArray

from doppler_hf.errors import Refusal

DC_GAIN_RTOL: Final = 1e-6

MAX_POLE_MODULUS: Final = 1 - 1e-6  # A slower pole averages over more steps than any run has, and cannot be checked.
SHORTEST_BLOCK: Final = 4096  # of an impulse response, in steps


@final
@dataclass(frozen=True)
class LowPassFilter:
    """A causal linear filter with unit gain at frequency zero: H(z) = (Σ_τ b_τ z^-τ) / (Σ_τ a_τ z^-τ).

    Filters with equal coefficients are equal.

    Args:
        b: Feed-forward coefficients b_0 ... b_{n_b}, on the gradients.
        a: Feedback coefficients 1, a_1 ... a_{n_a}, on the past outputs.

    Raises:
        ValueError: If a coefficient is not a finite real number; ``a[0]`` is not 1; a pole is not inside the unit circle;
            the gain at frequency zero, Σb/Σa, is not 1 (it would rescale the learning rate); or the step response, by
            which the optimizer divides, is not positive.

    Example:
        >>> print(LowPassFilter(b=(0.1, 0.1), a=(1, -0.8)))
        b=0.1,0.1;a=1.0,-0.8
        >>> LowPassFilter.parse("b=0.5,0.5")
        LowPassFilter(b=(0.5, 0.5), a=(1.0,))
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = (1.0,)
    # The name of the design, if one made this filter. The design sets it, so that it cannot contradict the coefficients.
    design: str = field(default="", init=False, repr=False, compare=False)
    # `grammar` sets this to `parse_filter`. It cannot be defined here, because `grammar` imports the designs, which import
    # this class.
    parse: ClassVar[Callable[[str], "LowPassFilter"]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "b", _real_coefficients("b", self.b))
        object.__setattr__(self, "a", _real_coefficients("a", self.a))
        if self.a[0] != 1.0:
            raise Refusal(
                "not-normalized",
                f"The coefficients a of low_pass_filter must begin with 1; got a[0] = {self.a[0]!r}. Divide all "
                "coefficients b and a by a[0].",
            )
        # The order matters. Only a stable filter has a gain at frequency zero, and only with that gain of 1 does its step
        # response settle.
        _check_poles(self.a)
        _check_dc_gain(self.b, self.a)
        _check_step_response(self.b, self.a)

    @property
    def order(self) -> int:
        """Number of states of the transposed direct form II: the buffers that an optimizer keeps per parameter."""
        return max(len(self.b), len(self.a)) - 1

    def __str__(self) -> str:
        """Return the filter's name: its design, or its coefficients with all digits."""
        b, a = (",".join(map(repr, coefficients)) for coefficients in (self.b, self.a))
        return self.design or f"b={b};a={a}"


def impulse_blocks(b: Sequence[float], a: Sequence[float]) -> Iterator[NDArray[np.float64]]:
    """Yield the impulse response of a stable filter block by block, until a block carries negligible energy."""
    # A block is longer than the recursion's memory, so if a block is zero, so is everything after it.
    block = max(SHORTEST_BLOCK, len(b), len(a))
    impulse, states = np.zeros(block), np.zeros(max(len(b), len(a)) - 1)
    impulse[0] = 1.0
    total_energy = 0.0
    while True:
        kappa, states = scipy.signal.lfilter(b, a, impulse, zi=states)
        impulse[0] = 0.0
        energy = float(kappa @ kappa)
        total_energy += energy
        if not math.isfinite(total_energy):
            # If m poles coincide, rounding moves them by the m-th root of the precision, so the check of poles may pass.
            raise Refusal(
                "unstable-filter",
                f"The filter with a={tuple(a)} is unstable: its impulse response grows without limit (its poles look stable "
                "only because of rounding). Move the poles inwards, or place fewer of them at the same point.",
            )
        yield kappa
        if energy <= 1e-18 * total_energy:
            return


def filtered(b: Sequence[float], a: Sequence[float], values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the output of a filter, shape (values,); an empty input, which SciPy may refuse, gives an empty array."""
    return np.asarray(scipy.signal.lfilter(b, a, values)) if len(values) else np.zeros(0)


def number_of_steps(steps: int) -> int:
    """Return a number of steps as an int, and refuse a negative one."""
    if not isinstance(steps, Integral) or steps < 0:
        raise Refusal("out-of-range", f"The argument steps must be a whole number of at least 0; got {steps}.")
    return int(steps)


def _real_coefficients(name: str, coefficients: Sequence[float]) -> tuple[float, ...]:
    values = tuple(coefficients)
    if not values:
        raise Refusal(
            "no-coefficients",
            f"A low-pass filter needs at least one coefficient {name}; got none. Write it as in "
            "low_pass_filter='b=0.1,0.1;a=1,-0.8'.",
        )
    for index, value in enumerate(values):
        if np.iscomplexobj(value) or not math.isfinite(value):
            raise Refusal(
                "not-finite",
                f"The coefficient {name}[{index}] of low_pass_filter must be a finite real number; got {value}.",
            )
    return tuple(map(float, values))


def _check_poles(a: Sequence[float]) -> None:
    modulus = max(np.abs(np.roots(a)), default=0.0)
    if modulus > MAX_POLE_MODULUS:
        raise Refusal(
            "unstable-filter",
            f"The filter with a={tuple(a)} is unstable: its largest pole has modulus {modulus:.9g}, and at most "
            f"{MAX_POLE_MODULUS} is allowed. Make the coefficients a after the first one smaller, lower the order or raise "
            "the cutoff.",
        )


def _check_dc_gain(b: Sequence[float], a: Sequence[float]) -> None:
    gain = math.fsum(b) / math.fsum(a)
    if abs(gain - 1) > DC_GAIN_RTOL:
        fix = f"Multiply b by {1 / gain:.12g}" if gain else "Choose b with a positive sum"
        raise Refusal(
            "wrong-gain",
            f"The gain of low_pass_filter at frequency zero, sum(b)/sum(a), must be 1; got {gain:.9g}. Another gain "
            f"would change the learning rate. {fix}.",
        )


def _check_step_response(b: Sequence[float], a: Sequence[float]) -> None:
    response, first_step = 0.0, 0
    for kappa in impulse_blocks(b, a):
        responses = response + np.cumsum(kappa)
        if np.any(responses <= 0):
            index = int(np.argmax(responses <= 0))
            raise Refusal(
                "step-response-not-positive",
                f"The step response of low_pass_filter is {responses[index]:.9g} at step {first_step + index} (counted "
                "from 0), and the bias correction divides by it, so it must be positive. Choose b and a with a positive "
                "step response.",
            )
        response, first_step = float(responses[-1]), first_step + len(kappa)
