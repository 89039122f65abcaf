"""Polynomials Σ c_n e^{-iωn} in twice the precision of float64.

The terms of a polynomial cancel near a zero, and those of a slow filter's denominator cancel at low frequencies. In float64,
the small gain g that remains has a relative error of eps/g. A delay has a relative error of eps/g², since it is the small
real part of a ratio whose imaginary part is about 1/g. So every number here is an unevaluated sum of two floats, with
eps = 2⁻¹⁰⁴ (Dekker 1971). e^{-iω} is on the unit circle to that precision too, because off the circle the delay differs.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Complex128, Float64
from numpy.typing import NDArray

# Each operation on pairs has an error of a few times 2⁻¹⁰⁶, and a complex step of Horner's rule has eight operations.
_EPS: Final = 2.0**-100
_SPLITTER: Final = 2.0**27 + 1

_Array = NDArray[np.float64]
_Pair = tuple[_Array, _Array]  # A pair of a large and a small number, whose sum is the value.
_Complex = tuple[_Pair, _Pair]


class Delays(NamedTuple):
    """The delays of a polynomial, in steps."""

    steps: Float64[np.ndarray, " frequencies"]
    error: Float64[np.ndarray, " frequencies"]  # A bound on the rounding error of `steps`; infinite at a zero.


def values_on_circle(
    coefficients: Sequence[float], frequencies: Float64[np.ndarray, " frequencies"]
) -> Complex128[np.ndarray, " frequencies"]:
    """Return Σ c_n e^{-iωn} at fractions of Nyquist, ω = π · frequency.

    Example:
        >>> values_on_circle((0.5, 0.5), np.array([0.0, 1.0]))
        array([1.+0.j, 0.+0.j])
    """
    real, imaginary = _horner(coefficients, _turns(frequencies), len(frequencies))[-1]
    return np.asarray(real[0] + 1j * imaginary[0])


def delays_on_circle(coefficients: Sequence[float], frequencies: Float64[np.ndarray, " frequencies"]) -> Delays:
    """Return Re(Σ n c_n e^{-iωn} / Σ c_n e^{-iωn}) at fractions of Nyquist.

    Example:
        >>> delays_on_circle((0.5, 0.5), np.array([0.25])).steps
        array([0.5])
    """
    turn, places = _turns(frequencies), len(coefficients)
    *partial, value = _horner(coefficients, turn, len(frequencies))
    # Horner's rule for the derivative takes the partial values of the rule for the polynomial.
    slope = _zeros(len(frequencies))
    for each in partial:
        slope = _complex_sum(_complex_product(slope, turn), each)
    slope = _complex_product(slope, turn)
    above = _sum(_product(slope[0], value[0]), _product(slope[1], value[1]))
    below = _sum(_product(value[0], value[0]), _product(value[1], value[1]))[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        # The rounding of coefficient n counts once in the value, and n times in the derivative.
        lost = (
            _EPS
            * places
            * np.sum(np.abs(coefficients))
            * (places / np.sqrt(below) + np.hypot(slope[0][0], slope[1][0]) / below)
        )
        return Delays(above[0] / below, np.where(below > 0, lost, np.inf))


def _horner(coefficients: Sequence[float], turn: _Complex, number: int) -> list[_Complex]:
    """Return the partial values of Horner's rule, beginning with the last coefficient; the last value is the polynomial."""
    value, found = _zeros(number), []
    for c in reversed(coefficients):
        real, imaginary = _complex_product(value, turn)
        value = _sum(real, _pair(np.full(number, c))), imaginary
        found.append(value)
    return found


def _turns(frequencies: Float64[np.ndarray, " frequencies"]) -> _Complex:
    """Return e^{-iω}, whose angle is ω to the precision of float64, and whose modulus is 1 to twice that."""
    # The angle is measured from the nearest quarter of a turn, so that zeros of filters at these angles are exact.
    quarters = np.round(2 * frequencies).astype(int)
    rest = np.pi * (frequencies - quarters / 2)
    cosine, sine = np.cos(rest), np.sin(rest)
    real = np.choose(quarters, [cosine, -sine, -cosine])
    imaginary = np.choose(quarters, [-sine, -cosine, sine])
    square = _sum(_product(_pair(real), _pair(real)), _product(_pair(imaginary), _pair(imaginary)))
    half_of_excess = ((square[0] - 1) + square[1]) / 2
    return (real, -half_of_excess * real), (imaginary, -half_of_excess * imaginary)


def _pair(values: _Array) -> _Pair:
    return values, np.zeros_like(values)


def _zeros(number: int) -> _Complex:
    return _pair(np.zeros(number)), _pair(np.zeros(number))


def _sum(first: _Pair, second: _Pair) -> _Pair:
    total = first[0] + second[0]
    taken = total - first[0]
    lost = (first[0] - (total - taken)) + (second[0] - taken) + (first[1] + second[1])
    high = total + lost
    return high, lost - (high - total)


def _product(first: _Pair, second: _Pair) -> _Pair:
    total = first[0] * second[0]
    (a, b), (c, d) = _halves(first[0]), _halves(second[0])
    lost = ((a * c - total) + a * d + b * c) + b * d + (first[0] * second[1] + first[1] * second[0])
    high = total + lost
    return high, lost - (high - total)


def _halves(values: _Array) -> _Pair:
    """Return two numbers of 26 bits each, whose products are exact."""
    scaled = _SPLITTER * values
    high = scaled - (scaled - values)
    return high, values - high


def _complex_sum(first: _Complex, second: _Complex) -> _Complex:
    return _sum(first[0], second[0]), _sum(first[1], second[1])


def _complex_product(first: _Complex, second: _Complex) -> _Complex:
    return (
        _sum(_product(first[0], second[0]), _product(first[1], (-second[1][0], -second[1][1]))),
        _sum(_product(first[0], second[1]), _product(first[1], second[0])),
    )
