"""The shape of privacy noise over time: white, or pushed to high frequencies, where a low-pass filter removes it.

With a strategy c = (1, c_1, …, c_{b-1}) and white z_t of variance σ²‖c‖², the noise of step t is

    y_t = z_t - Σ_{k=1}^{b-1} c_k y_{t-k},    that is  y = C⁻¹ z,    C the banded Toeplitz matrix whose first column is c.

Privacy: CG + Cy has white noise Cy. If every unit takes part at most once in b steps, its contributions to CG are in
disjoint rows, each with norm ‖c‖ times that of its gradient. This is the Gaussian mechanism of noise multiplier σ, once in
b steps (Choquette-Choo et al. 2023, https://arxiv.org/abs/2306.08153). The sum of y over the steps is smaller by 1/Σc.

The default strategy is the series of (1 - x)^(-1/2), cut off after b terms. The whole series is the best Toeplitz factor of
the prefix sum up to lower-order terms (Henzinger et al. 2023; Kalinin & Lampert 2024, https://arxiv.org/abs/2405.13763).
"""

import functools
import itertools
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from jaxtyping import Float64

from doppler_hf.errors import Refusal
from doppler_hf.filters.grammar import did_you_mean
from doppler_hf.filters.low_pass_filter import MAX_POLE_MODULUS, SHORTEST_BLOCK, filtered, impulse_blocks, number_of_steps


@final
@dataclass(frozen=True)
class NoiseShape:
    """The strategy 1, c_1 ... c_{b-1} of a banded factorization; one band is white noise.

    Raises:
        ValueError: If a coefficient is not finite, the first is not 1, the last is 0, or a root of z^{b-1} + c_1 z^{b-2} ...
            is outside the unit circle, so that the noise would grow.
    """

    c: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "c", tuple(map(float, self.c)))
        if not self.c or self.c[0] != 1.0:
            raise Refusal(
                "not-normalized",
                "The coefficients c of a noise shape must begin with 1, as in noise_shape='banded:c=1,0.5,0.375'; got "
                f"{self.c}.",
            )
        if not all(map(math.isfinite, self.c)):
            raise Refusal(
                "not-finite",
                f"The coefficients c of a noise shape must be finite numbers; got {self.c}. Replace NaN and infinity.",
            )
        if self.c[-1] == 0.0:
            raise Refusal(
                "ends-with-zero",
                f"The noise shape c={self.c} ends with 0, which costs ε and has no other effect. Leave the last 0 out.",
            )
        modulus = max(np.abs(np.roots(self.c)), default=0.0)
        if modulus > MAX_POLE_MODULUS:
            raise Refusal(
                "noise-grows",
                f"The noise of c={self.c} would grow from step to step, because it has a pole of modulus {modulus:.9g}. "
                "Choose coefficients that decrease.",
            )

    @classmethod
    def banded(cls, bands: int) -> "NoiseShape":
        """Return the strategy of b bands from the series of (1 - x)^(-1/2): 1, 1/2, 3/8, 5/16, ..."""
        if bands < 1:
            raise Refusal(
                "out-of-range",
                f"A noise shape needs at least 1 band (1 band is white noise); got {bands} bands. Leave noise_shape out to "
                "have it chosen automatically.",
            )
        # c_k = (2k choose k) / 4^k
        return cls(tuple(itertools.accumulate(((2 * k - 1) / (2 * k) for k in range(1, bands)), operator.mul, initial=1.0)))

    @classmethod
    def parse(cls, text: str) -> "NoiseShape":
        """Return the noise shape with this name: white, banded:bands=4, or banded:c=1,0.5,0.375.

        Raises:
            ValueError: If the text has none of these forms, or the coefficients are not valid.
        """
        compact = re.sub(r"\s", "", text)
        if compact == "white":
            return cls()
        try:
            if found := re.fullmatch(r"banded:bands=(\d+)", compact):
                return cls.banded(int(found[1]))
            if found := re.fullmatch(r"banded:c=(.+)", compact):
                return cls(tuple(map(float, found[1].split(","))))
        except ValueError as error:
            raise Refusal("not-a-noise-shape", f"noise_shape={text!r} is not valid: {error}") from error
        hint = did_you_mean(text.partition(":")[0], ("white", "banded", "auto"))
        forms = "'white', 'banded:bands=4' or 'banded:c=1,0.5,0.375'"
        raise Refusal(
            "not-a-noise-shape",
            f"Expected {forms} as noise_shape (in training arguments also 'auto'); got {text!r}{hint}.",
        )

    @property
    def bands(self) -> int:
        """The number b of bands: a record (or user) takes part in at most one of b consecutive steps."""
        return len(self.c)

    @property
    def norm(self) -> float:
        """‖c‖, the factor by which z is larger than noise without shaping."""
        return math.hypot(*self.c)

    @property
    def is_white(self) -> bool:
        """Whether the noise of different steps is independent."""
        return self.bands == 1

    def response(self, steps: int) -> Float64[np.ndarray, " steps"]:
        """Return g_0 ... g_{steps-1} of 1/c(x): y_t = Σ_τ g_τ z_{t-τ}, shape (steps,)."""
        return filtered([1.0], self.c, np.eye(1, number_of_steps(steps))[0])

    def std(self, step: int) -> float:
        """Return the standard deviation of the noise of a step, in units of σ.

        Steps are counted from 0. The standard deviation rises for about b steps and is constant from then on.
        """
        stds = _stds(self.c, blocks=number_of_steps(step) // SHORTEST_BLOCK + 1)
        return float(stds[min(step, len(stds) - 1)])

    def std_of_sum(self, rates: Sequence[float]) -> float:
        """Return the standard deviation of Σ_t rate_t y_t, the noise that SGD adds to the weights, in units of σ."""
        return self.norm * float(np.linalg.norm(filtered([1.0], self.c, rates[::-1])))

    def std_of_average(self, steps: int) -> float:
        """Return the standard deviation of the mean noise of the first steps, in units of σ: 1/√steps for white noise.

        How much a run learns from its data depends on the noise of its average gradient, whatever the numbers of examples,
        epochs and ε: recipes/results/few-examples.md.
        """
        ones = np.ones(number_of_steps(steps))
        return self.norm * float(np.linalg.norm(filtered([1.0], self.c, ones))) / max(1, steps)

    def __str__(self) -> str:
        """Return the name of the shape: white, banded:bands=4, or its coefficients."""
        if self.is_white:
            return "white"
        if self == NoiseShape.banded(self.bands):
            return f"banded:bands={self.bands}"
        return "banded:c=" + ",".join(map(repr, self.c))


WHITE: Final = NoiseShape()
# With more noise of the average gradient than this, in units of C, image classifiers learnt little:
# recipes/results/few-examples.md.
DROWNED: Final = 0.005


def in_units_of_c(noise: float) -> str:
    """Return the noise of a coordinate, in units of the clip norm C, with two digits, as every table and line shows it.

    Example:
        >>> in_units_of_c(7e-05), in_units_of_c(0.0099), in_units_of_c(12.3)
        ('7.0e-05 C', '0.0099 C', '12 C')
    """
    return f"{noise:#.2g}".rstrip(".") + " C"


@functools.lru_cache(maxsize=8)  # a run asks for the number of every step
def _stds(c: tuple[float, ...], *, blocks: int) -> Float64[np.ndarray, " steps"]:
    """Return the standard deviations of the noise of the first steps, in units of σ; if they end, the last one stays."""
    response = np.concatenate(list(itertools.islice(impulse_blocks([1.0], c), blocks)))
    return math.hypot(*c) * np.sqrt(np.cumsum(response**2))
