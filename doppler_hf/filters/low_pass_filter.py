"""The low-pass filter of DOPPLER: its coefficients, and what makes them valid.

    m_t = - Σ_{τ=1..n_a} a_τ m_{t-τ} + Σ_{τ=0..n_b} b_τ g_{t-τ}        (Algorithm 2, line 6)

As in SciPy ``a[0] = 1`` is written out: the paper's "-9/11" is ``a = (1, -9/11)``. Stable means that the roots of
z^n + a_1 z^{n-1} + ... + a_n lie inside the unit circle; the paper's appendix asks it of their reciprocals by mistake.
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

MAX_POLE_MODULUS: Final = 1 - 1e-6  # a slower pole averages over more steps than any run has, and cannot be checked


@final
@dataclass(frozen=True)
class LowPassFilter:
    """A causal linear filter with unit gain at frequency zero: H(z) = (Σ_τ b_τ z^-τ) / (Σ_τ a_τ z^-τ).

    Filters with equal coefficients are equal.

    Args:
        b: Feed-forward coefficients b_0 ... b_{n_b}, on the gradients.
        a: Feedback coefficients 1, a_1 ... a_{n_a}, on the past outputs.

    Raises:
        ValueError: If a coefficient is not a finite real number; ``a[0]`` is not 1; a pole does not lie inside the unit
            circle; the gain at frequency zero, Σb/Σa, is not 1 (it would rescale the learning rate); or the step response,
            which the optimizer divides by, is not positive.

    Example:
        >>> print(LowPassFilter(b=(0.1, 0.1), a=(1, -0.8)))
        b=0.1,0.1;a=1.0,-0.8
        >>> LowPassFilter.parse("b=0.5,0.5")
        LowPassFilter(b=(0.5, 0.5), a=(1.0,))
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = (1.0,)
    # What the filter was made as, in the grammar; a design sets it, so that it cannot contradict the coefficients.
    design: str = field(default="", init=False, repr=False, compare=False)
    # `parse_filter` of the grammar, which sets it: the grammar is built on the designs, and they on this class.
    parse: ClassVar[Callable[[str], "LowPassFilter"]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "b", _real_coefficients("b", self.b))
        object.__setattr__(self, "a", _real_coefficients("a", self.a))
        if self.a[0] != 1.0:
            raise Refusal("not-normalized", f"a[0] must be 1, got {self.a[0]!r}. Divide b and a by it.")
        # In this order: only a stable filter has a gain at frequency zero, and only with both its step response settles.
        _check_poles(self.a)
        _check_dc_gain(self.b, self.a)
        _check_step_response(self.b, self.a)

    @property
    def order(self) -> int:
        """Number of states of the transposed direct form II: the buffers that an optimizer keeps per parameter."""
        return max(len(self.b), len(self.a)) - 1

    def __str__(self) -> str:
        """Return the name in the grammar: what the filter was made as, or its coefficients, each float in full."""
        b, a = (",".join(map(repr, coefficients)) for coefficients in (self.b, self.a))
        return self.design or f"b={b};a={a}"


def impulse_blocks(b: Sequence[float], a: Sequence[float]) -> Iterator[NDArray[np.float64]]:
    """Yield the impulse response of a stable filter block by block, until a block carries negligible energy."""
    # A block longer than the recursion's memory is never silent by accident: all that follows would be zero too.
    block = max(4096, len(b), len(a))
    impulse, states = np.zeros(block), np.zeros(max(len(b), len(a)) - 1)
    impulse[0] = 1.0
    total_energy = 0.0
    while True:
        kappa, states = scipy.signal.lfilter(b, a, impulse, zi=states)
        impulse[0] = 0.0
        energy = float(kappa @ kappa)
        total_energy += energy
        if not math.isfinite(total_energy):
            # Several poles at one place: a root of multiplicity m is known to the m-th root of the precision only.
            raise Refusal(
                "unstable-filter",
                f"The response of a={tuple(a)} grows without end, which its poles do not show in float64. Move the poles "
                "inwards, or put fewer in one place.",
            )
        yield kappa
        if energy <= 1e-18 * total_energy:
            return


def filtered(b: Sequence[float], a: Sequence[float], values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what a filter makes of some values; of none, which SciPy refuses for some filters, nothing."""
    return np.asarray(scipy.signal.lfilter(b, a, values)) if len(values) else np.zeros(0)


def number_of_steps(steps: int) -> int:
    """Return how many steps a response has, which may be 0."""
    if not isinstance(steps, Integral) or steps < 0:
        raise Refusal("out-of-range", f"steps must be an integer of at least 0, got {steps}.")
    return int(steps)


def _real_coefficients(name: str, coefficients: Sequence[float]) -> tuple[float, ...]:
    values = tuple(coefficients)
    if not values:
        raise Refusal("no-coefficients", f"{name} must have at least one coefficient, got none.")
    for index, value in enumerate(values):
        if np.iscomplexobj(value) or not math.isfinite(value):
            raise Refusal("not-finite", f"{name}[{index}] must be a finite real number, got {value}.")
    return tuple(map(float, values))


def _check_poles(a: Sequence[float]) -> None:
    modulus = max(np.abs(np.roots(a)), default=0.0)
    if modulus > MAX_POLE_MODULUS:
        raise Refusal(
            "unstable-filter",
            f"The poles of a={tuple(a)} must lie strictly inside the unit circle (at most {MAX_POLE_MODULUS} from 0), got "
            f"{modulus:.9g}. Shrink a[1:], lower the order or raise the cutoff.",
        )


def _check_dc_gain(b: Sequence[float], a: Sequence[float]) -> None:
    gain = math.fsum(b) / math.fsum(a)
    if abs(gain - 1) > DC_GAIN_RTOL:
        fix = f"Multiply b by {1 / gain:.17g}" if gain else "Choose b with a positive sum"
        raise Refusal("wrong-gain", f"The DC gain sum(b)/sum(a) must be 1, got {gain:.9g}. {fix}.")


def _check_step_response(b: Sequence[float], a: Sequence[float]) -> None:
    response, first_step = 0.0, 0
    for kappa in impulse_blocks(b, a):
        responses = response + np.cumsum(kappa)
        if np.any(responses <= 0):
            index = int(np.argmax(responses <= 0))
            raise Refusal(
                "step-response-not-positive",
                f"The step response must be positive, since the bias correction divides by it, got {responses[index]:.9g} "
                f"at step {first_step + index} (from 0). Choose b and a whose step response stays positive.",
            )
        response, first_step = float(responses[-1]), first_step + len(kappa)
