r"""The low-pass filter of DOPPLER: its coefficients, what makes them valid, and where to get good ones.

A filter is the linear recursion

    m_t = - Σ_{τ=1..n_a} a_τ m_{t-τ} + Σ_{τ=0..n_b} b_τ g_{t-τ}

of Algorithm 1, line 6, in SciPy's convention: ``a[0] = 1`` is written out, so the paper's "-9/11" is
``a = (1, -9/11)``. The presets are the rows of the paper's two coefficient tables (Appendix, "Hyper-parameter choice"
and the ablation of f1-f6).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Final, final

import numpy as np
import scipy.signal
from numpy.typing import NDArray

DC_GAIN_RTOL: Final = 1e-6

# A slower pole averages over more than a million steps, longer than any run, and its response could not be checked
# in reasonable time.
MAX_POLE_MODULUS: Final = 1 - 1e-6

GRAMMAR: Final = "b=b0,b1,...;a=1,a1,... (';a=...' may be left out)"


@final
@dataclass(frozen=True)
class LowPassFilter:
    r"""A causal linear filter with unit gain at frequency zero.

    Its transfer function is H(z) = (Σ_τ b_τ z^-τ) / (Σ_τ a_τ z^-τ). Any sequence of real numbers is accepted and
    kept as a tuple of floats.

    Args:
        b: Feed-forward coefficients b_0 ... b_{n_b}, on the gradients.
        a: Feedback coefficients 1, a_1 ... a_{n_a}, on the past outputs.

    Raises:
        ValueError: If a coefficient is not a finite real number; ``a[0]`` is not 1; a pole does not lie inside the
            unit circle (the filter never forgets); the gain at frequency zero, Σb/Σa, is not 1 (the filter would
            rescale the learning rate); or the step response is not positive (the optimizer divides by it: the c_t of
            Algorithm 1, line 8).

    Example:
        >>> low_pass = LowPassFilter(b=(0.1, 0.1), a=(1, -0.8))
        >>> low_pass.order
        1
        >>> print(low_pass)
        f3
        >>> LowPassFilter.parse("b=0.5,0.5")
        LowPassFilter(b=(0.5, 0.5), a=(1.0,))

    Source:
        DOPPLER, Algorithm 1, lines 6-8.
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "b", _real_coefficients("b", self.b))
        object.__setattr__(self, "a", _real_coefficients("a", self.a))
        _check_leading_coefficient(self.a)
        # The order matters: only a stable filter has a gain at frequency zero, and only with both does its step
        # response settle.
        _check_poles(self.a)
        _check_dc_gain(self.b, self.a)
        _check_step_response(self.b, self.a)

    @property
    def order(self) -> int:
        """Number of states of the transposed direct form II: the buffers that an optimizer keeps per parameter."""
        return max(len(self.b), len(self.a)) - 1

    @classmethod
    def parse(cls, text: str) -> "LowPassFilter":
        """Reads a filter from a preset name or from its coefficients.

        Args:
            text: A key of `PAPER_FILTERS`, or ``b=0.1,0.1;a=1,-0.8`` (without ``;a=...`` for a filter without
                feedback).

        Returns:
            The filter, so that ``LowPassFilter.parse(str(filter)) == filter`` exactly.

        Raises:
            ValueError: If the text is neither, or if the coefficients are not those of a valid filter.

        Example:
            >>> LowPassFilter.parse("momentum")
            LowPassFilter(b=(0.1,), a=(1.0, -0.9))
        """
        if text.strip() in PAPER_FILTERS:
            return PAPER_FILTERS[text.strip()]
        match = re.fullmatch(r"b=([^;=]+)(?:;a=([^;=]+))?", re.sub(r"\s", "", text))
        try:
            if match is None:
                raise ValueError
            b, a = (tuple(map(float, numbers.split(","))) for numbers in match.groups(default="1"))
        except ValueError:
            presets = ", ".join(PAPER_FILTERS)
            raise ValueError(f"no filter reads {text!r}: give one of {presets}, or coefficients as {GRAMMAR}") from None
        return cls(b=b, a=a)

    def __str__(self) -> str:
        for name, preset in PAPER_FILTERS.items():
            if self == preset:
                return name
        b, a = (",".join(map(repr, coefficients)) for coefficients in (self.b, self.a))
        return f"b={b};a={a}"


def butterworth(order: int, cutoff: float) -> LowPassFilter:
    r"""Designs a Butterworth filter, which has the flattest passband.

    |H(f)|² = 1 / (1 + (tan(πf/2) / tan(π cutoff/2))^(2 order)), with f as a fraction of Nyquist.

    Args:
        order: Number of poles, at least 1.
        cutoff: Frequency at which the gain is 1/√2, as a fraction of Nyquist (1 is half a cycle per optimizer step).

    Returns:
        The filter, with unit gain at frequency zero.

    Raises:
        ValueError: If the order is not a positive integer, the cutoff is not inside (0, 1), or the cutoff is so low
            for the order that the coefficients cannot hold the poles inside the unit circle.

    Example:
        >>> butterworth(2, 0.1).order
        2

    Source:
        `scipy.signal.butter`. The paper's own filters are listed in `PAPER_FILTERS`.
    """
    _check_design(order, cutoff)
    return _unit_dc_gain(*scipy.signal.butter(order, cutoff))


def chebyshev1(order: int, cutoff: float, ripple_db: float) -> LowPassFilter:
    r"""Designs a Chebyshev filter of type I: steeper than Butterworth, at the price of a rippled passband.

    Args:
        order: Number of poles, at least 1.
        cutoff: End of the passband, as a fraction of Nyquist (1 is half a cycle per optimizer step).
        ripple_db: Depth of the ripple in the passband, in decibels.

    Returns:
        The filter, rescaled to unit gain at frequency zero (SciPy's has the bottom of the ripple there when the
        order is even).

    Raises:
        ValueError: If the order is not a positive integer, the cutoff is not inside (0, 1), the ripple is not
            positive, or no valid filter has these properties.

    Example:
        >>> chebyshev1(3, 0.2, ripple_db=1.0).order
        3

    Source:
        `scipy.signal.cheby1`. The paper's own filters are listed in `PAPER_FILTERS`.
    """
    _check_design(order, cutoff)
    if not 0 < ripple_db < math.inf:
        raise ValueError(f"ripple_db is {ripple_db}: give a positive number of decibels, or use butterworth for no ripple")
    return _unit_dc_gain(*scipy.signal.cheby1(order, ripple_db, cutoff))


def momentum(beta: float) -> LowPassFilter:
    r"""The exponential moving average, m_t = β m_{t-1} + (1 - β) g_t: momentum as a filter of first order.

    Args:
        beta: Decay, in [0, 1): Adam's β₁.

    Returns:
        The filter b = (1 - β,), a = (1, -β).

    Raises:
        ValueError: If beta lies outside [0, 1).

    Example:
        >>> momentum(0.5)
        LowPassFilter(b=(0.5,), a=(1.0, -0.5))

    Source:
        DOPPLER, Section "The proposed approach", *Connection to momentum method*.
    """
    if not 0 <= beta < 1:
        raise ValueError(f"beta is {beta}: give a decay in [0, 1)")
    return LowPassFilter(b=(1 - beta,), a=(1.0, -beta))


def impulse_blocks(b: Sequence[float], a: Sequence[float]) -> Iterator[NDArray[np.float64]]:
    """Yields the impulse response of a stable filter block by block, until a block carries negligible energy."""
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
        assert math.isfinite(total_energy), "a response without end belongs to a pole that _check_poles refuses"
        yield kappa
        if energy <= 1e-18 * total_energy:
            return


def _real_coefficients(name: str, coefficients: Sequence[float]) -> tuple[float, ...]:
    values = tuple(coefficients)
    if not values:
        raise ValueError(f"{name} is empty: give at least one coefficient")
    for index, value in enumerate(values):
        if np.iscomplexobj(value) or not math.isfinite(value):
            raise ValueError(f"{name}[{index}] is {value}: give finite real coefficients")
    return tuple(map(float, values))


def _check_leading_coefficient(a: Sequence[float]) -> None:
    if a[0] != 1.0:
        raise ValueError(f"a[0] is {a[0]!r}, not 1: divide b and a by a[0]")


def _check_poles(a: Sequence[float]) -> None:
    modulus = max(np.abs(np.roots(a)), default=0.0)
    if modulus > MAX_POLE_MODULUS:
        raise ValueError(
            f"the largest pole of a={tuple(a)} has modulus {modulus:.9g}, not strictly inside the unit circle "
            f"(at most {MAX_POLE_MODULUS}): shrink a[1:], lower the order or raise the cutoff"
        )


def _check_dc_gain(b: Sequence[float], a: Sequence[float]) -> None:
    gain = math.fsum(b) / math.fsum(a)
    if gain == 0:
        raise ValueError(
            f"the DC gain sum(b)/sum(a) is 0: b={tuple(b)} removes the mean gradient; choose b with a positive sum"
        )
    if abs(gain - 1) > DC_GAIN_RTOL:
        raise ValueError(f"the DC gain sum(b)/sum(a) is {gain:.9g}, not 1: multiply b by {1 / gain:.17g}")


def _check_step_response(b: Sequence[float], a: Sequence[float]) -> None:
    response, first_step = 0.0, 0
    for kappa in impulse_blocks(b, a):
        responses = response + np.cumsum(kappa)
        if np.any(responses <= 0):
            index = int(np.argmax(responses <= 0))
            raise ValueError(
                f"the step response is {responses[index]:.9g} at step {first_step + index} (from 0), but the bias "
                "correction divides by it: choose b and a whose step response stays positive"
            )
        response, first_step = float(responses[-1]), first_step + len(kappa)


def _check_design(order: int, cutoff: float) -> None:
    if not isinstance(order, Integral) or order < 1:
        raise ValueError(f"order is {order}: give an integer of at least 1")
    if not 0 < cutoff < 1:
        raise ValueError(f"cutoff is {cutoff}: give a fraction of Nyquist inside (0, 1)")


def _unit_dc_gain(b: NDArray[np.float64], a: NDArray[np.float64]) -> LowPassFilter:
    b = b * (math.fsum(a) / math.fsum(b))
    return LowPassFilter(b=tuple(b), a=tuple(a))


PAPER_FILTERS: Final[Mapping[str, LowPassFilter]] = MappingProxyType(
    {
        "none": LowPassFilter(b=(1.0,)),
        "momentum": LowPassFilter(b=(0.1,), a=(1.0, -0.9)),
        "first-order-v1": LowPassFilter(b=(1 / 11, 1 / 11), a=(1.0, -9 / 11)),
        "first-order-v2": LowPassFilter(b=(3 / 11, -1 / 11), a=(1.0, -9 / 11)),
        "second-order": LowPassFilter(b=(1 / 58, 2 / 58, 1 / 58), a=(1.0, -92 / 58, 38 / 58)),
        "f1": LowPassFilter(b=(0.075, 0.025), a=(1.0, -0.9)),
        "f2": LowPassFilter(b=(0.025, 0.075), a=(1.0, -0.9)),
        "f3": LowPassFilter(b=(0.1, 0.1), a=(1.0, -0.8)),
        "f4": LowPassFilter(b=(0.2, 0.2), a=(1.0, -0.6)),
        "f5": LowPassFilter(b=(0.025, 0.05, 0.025), a=(1.0, -0.9)),
        "f6": LowPassFilter(b=(0.025, 0.025), a=(1.0, -1.8, 0.85)),
    }
)
"""The eleven filters of the paper's two coefficient tables, by name (read-only)."""
