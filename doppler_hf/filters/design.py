"""Filter designs (Butterworth and averages), and the presets of the paper (its two coefficient tables).

Each design has unit gain at frequency zero and prints as its name, such as `butterworth:order=2,cutoff=0.1`.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import MappingProxyType
from typing import Final

import numpy as np
import scipy.signal

from doppler_hf.errors import Refusal
from doppler_hf.filters.low_pass_filter import LowPassFilter
from doppler_hf.filters.on_circle import values_on_circle

# The largest allowed error of the gain at the cutoff after the coefficients are rounded to float64.
CUTOFF_GAIN_ATOL: Final = 1e-3


def butterworth(order: int, cutoff: float) -> LowPassFilter:
    """Design a Butterworth filter, which has the flattest passband.

    |H(f)|² = 1 / (1 + (tan(πf/2) / tan(π cutoff/2))^(2 order)), with f as a fraction of Nyquist.

    Args:
        order: Number of poles, at least 1.
        cutoff: Frequency at which the gain is 1/√2, as a fraction of Nyquist (1 is half a cycle per optimizer step).

    Raises:
        ValueError: If an argument is out of range, or float64 coefficients cannot hold the poles.

    Example:
        >>> print(butterworth(2, 0.1))
        butterworth:order=2,cutoff=0.1
    """
    order = positive_integer("order", order)
    if not (isinstance(cutoff, Real) and 0 < cutoff < 1):
        raise Refusal(
            "out-of-range",
            "The cutoff of a Butterworth filter must be above 0 and below 1, where 1 is half a cycle per step "
            f"(Nyquist); got {cutoff}. An example is low_pass_filter='butterworth:order=2,cutoff=0.1'.",
        )
    name = f"butterworth:order={order},cutoff={float(cutoff)!r}"
    b, a = scipy.signal.butter(order, float(cutoff))
    # At a low cutoff, the gain at frequency zero of SciPy's filter is not exactly 1.
    low_pass_filter = _named(name, LowPassFilter(b=tuple(b * (math.fsum(a) / math.fsum(b))), a=tuple(a)))
    # Rounding the coefficients moves poles near 1, and with several such poles it changes the gain.
    gain = float(
        np.abs(
            np.divide(
                *(values_on_circle(each, np.array([float(cutoff)])) for each in (low_pass_filter.b, low_pass_filter.a))
            )
        )[0]
    )
    if abs(gain - 0.5**0.5) > CUTOFF_GAIN_ATOL:
        raise Refusal(
            "unstable-filter",
            f"The coefficients of {name} are too inaccurate in float64: the gain at the cutoff should be 0.7071, but is "
            f"{gain:.4g}. Lower the order or raise the cutoff.",
        )
    return low_pass_filter


def momentum(beta: float) -> LowPassFilter:
    """Return the exponential moving average m_t = β m_{t-1} + (1 - β) g_t, for a decay β in [0, 1): Adam's β₁.

    Raises:
        ValueError: If beta is outside [0, 1).
    """
    if not (isinstance(beta, Real) and 0 <= beta < 1):
        raise Refusal(
            "out-of-range",
            f"The beta of a momentum filter must be at least 0 and below 1; got {beta}. An example is "
            "low_pass_filter='momentum:beta=0.9'.",
        )
    beta = float(beta)
    return _named(f"momentum:beta={beta!r}", LowPassFilter(b=(1 - beta,), a=(1.0, -beta)))


def moving_average(taps: int) -> LowPassFilter:
    """Return the mean of the last n = `taps` gradients, which keeps n - 1 states per parameter.

    Raises:
        ValueError: If taps is not a positive integer.
    """
    taps = positive_integer("taps", taps)
    return _named(f"moving-average:taps={taps}", LowPassFilter(b=(1 / taps,) * taps))


def hann(length: int) -> LowPassFilter:
    """Return the mean of the last n = `length` gradients weighted by a Hann window, b_τ ∝ sin²(π (τ + 1) / (n + 1)).

    The two zeros at the window's ends are left out, because the first would make the step response begin at 0.

    Raises:
        ValueError: If length is not a positive integer.

    Example:
        >>> hann(3)
        LowPassFilter(b=(0.25, 0.5, 0.25), a=(1.0,))
    """
    length = positive_integer("length", length)
    half = [math.sin(math.pi * (tau + 1) / (length + 1)) ** 2 for tau in range((length + 1) // 2)]
    window = [*half, *half[: length // 2][::-1]]
    return _named(f"hann:length={length}", LowPassFilter(b=tuple(value / math.fsum(window) for value in window)))


def positive_integer(name: str, value: int) -> int:
    """Return a number as an int, and refuse anything but a positive integer."""
    if not isinstance(value, Integral) or value < 1:
        raise Refusal("out-of-range", f"The {name} in low_pass_filter must be a whole number of at least 1; got {value}.")
    return int(value)


def _named(name: str, low_pass_filter: LowPassFilter) -> LowPassFilter:
    object.__setattr__(low_pass_filter, "design", name)
    return low_pass_filter


PAPER_FILTERS: Final[Mapping[str, LowPassFilter]] = MappingProxyType(
    {
        name: _named(name, low_pass_filter)
        for name, low_pass_filter in {
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
        }.items()
    }
)
"""The eleven filters of the paper's two coefficient tables, by name (read-only)."""


# Name → the function of the design, and the arguments that follow the colon.
DESIGNS: Final[Mapping[str, tuple[Callable[..., LowPassFilter], Mapping[str, type[int] | type[float]]]]] = {
    "butterworth": (butterworth, {"order": int, "cutoff": float}),
    "momentum": (momentum, {"beta": float}),
    "moving-average": (moving_average, {"taps": int}),
    "hann": (hann, {"length": int}),
}
