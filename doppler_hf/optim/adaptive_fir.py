"""A filter without feedback whose taps follow the private gradients (DOPPLER, Section 5.3, *Optimal FIR filter*).

    m̂_t = Σ_{τ<n} b_τ g_{t-τ} / Σ_{τ<min(t,n)} b_τ,    b_τ = c_τ / Σ c,    c_τ = ½ min(max(C_τ / C_0, 0), 1)

C_τ is the mean of ⟨g_t, g_{t-τ}⟩ over the coordinates of a parameter group and over time, less the noise's variance at lag
0. A step counts 0.998^age, since the autocorrelation changes. The taps of a group are found anew every `update_gap` steps if
the signal's power C_0 exceeds twice its standard error under noise alone.

They begin as a moving average. This was tried on synthetic gradients with noise power 10 to 1000 times the signal's. At
correlation 0.9 or 0.98 from step to step, 8 equal taps raise the cosine with the signal by 1.6 to 2.7 times; at 0.5, by 0.7
to 1.1 times. Gradients arrive private and the noise's size is public: this is post-processing.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import optimal_fir, parse_name
from doppler_hf.optim.update import Coefficients, ParameterTensors

MEMORY: Final = 0.998
DEFAULT_UPDATE_GAP: Final = 50
# Standard errors by which the power of the gradients must exceed that of the noise.
SIGNIFICANCE: Final = 2.0


@final
@dataclass(frozen=True)
class OptimalFIR:
    """A filter for `DopplerOptimizer` that finds its taps itself.

    Args:
        taps: How many gradients the filter looks at, this step's included; at least 2.
        update_gap: After how many steps the taps are found anew, at least 1.
    """

    taps: int
    update_gap: int = DEFAULT_UPDATE_GAP

    def __post_init__(self) -> None:
        if not isinstance(self.taps, Integral) or self.taps < 2:
            raise ValueError(f"taps must be a whole number of at least 2, got {self.taps}. One tap is no filter.")
        if not isinstance(self.update_gap, Integral) or self.update_gap < 1:
            raise ValueError(f"update_gap must be a whole number of at least 1, got {self.update_gap}.")

    @classmethod
    def parse(cls, name: str) -> "OptimalFIR":
        """Return the filter of a name in the grammar, as ``optimal-fir:taps=8``."""
        word, values = parse_name(name)
        if word != "optimal-fir":
            raise ValueError(f"The filter must be 'optimal-fir:taps=...', got {name!r}. LowPassFilter.parse reads others.")
        return cls(**{key: int(value) for key, value in values.items()})

    @property
    def order(self) -> int:
        """How many earlier gradients are kept for each parameter."""
        return self.taps - 1

    def __str__(self) -> str:
        gap = "" if self.update_gap == DEFAULT_UPDATE_GAP else f",update_gap={self.update_gap}"
        return f"optimal-fir:taps={self.taps}{gap}"

    def new_group(self) -> dict[str, Any]:
        """Return the taps to begin with."""
        return {"taps": [1 / self.taps] * self.taps}

    def new_state(self, zeros: Callable[[], Tensor]) -> dict[str, Any]:
        """Return the last gradients, newest first, and by lag the sums and counts of ⟨g_t, g_{t-τ}⟩."""
        history = [zeros() for _ in range(self.order)]
        products = torch.zeros(self.taps, dtype=torch.float64, device=history[0].device)
        pairs, bias_states = [0.0] * self.taps, [0.0] * self.order
        return {"filter_states": history, "bias_states": bias_states, "products": products, "pairs": pairs}

    def coefficients(self, group: dict[str, Any]) -> Coefficients:
        """Return the group's taps."""
        return (tuple(group["taps"]),)

    def begin(self, state: dict[str, Any], group: dict[str, Any], *, noise_std: float) -> float:
        """Let earlier products fade, make room for the new gradient, and return c_t (state modified in place)."""
        history, numel = state["filter_states"], state["filter_states"][0].numel()
        history.insert(0, history.pop())  # the oldest, whose place the newest takes
        state["products"].mul_(MEMORY)
        state["products"][0] -= numel * noise_std**2
        state["pairs"] = [MEMORY * pairs + numel * (lag < state["step"]) for lag, pairs in enumerate(state["pairs"])]
        return math.fsum(group["taps"][: state["step"]])

    @staticmethod
    def advance(
        grad: Float[Tensor, "*shape"], tensors: ParameterTensors, coefficients: Coefficients
    ) -> Float[Tensor, "*shape"]:
        r"""Return m_t = Σ b_τ g_{t-τ}; remember the gradient and add up ⟨g_t, g_{t-τ}⟩ (both modified in place)."""
        assert tensors.products is not None
        (taps,), (oldest, *history) = coefficients, tensors.filter_states
        flat, m = grad.flatten(), grad * taps[0]
        products = [torch.dot(flat, flat)]
        for past, tap in zip((*history, oldest), taps[1:], strict=True):
            products.append(torch.dot(flat, past.flatten()))
            m.add_(past, alpha=tap)
        tensors.products.add_(torch.stack(products))
        oldest.copy_(grad)
        return m

    def end(self, group: dict[str, Any], states: Iterable[dict[str, Any]], *, noise_std: float) -> None:
        """Find the taps of a group anew where its steps have come to a multiple of the gap."""
        all_states = list(states)
        if max((state["step"] for state in all_states), default=1) % self.update_gap == 0:
            group["taps"] = found_anew(group["taps"], all_states, noise_std=noise_std)


def found_anew(taps: list[float], states: Sequence[dict[str, Any]], *, noise_std: float) -> list[float]:
    """Return the taps of a group by the estimate so far, or the present `taps` if that is not certain enough."""
    pairs = np.sum([state["pairs"] for state in states], axis=0)
    if pairs[-1] == 0:
        return taps
    products = [state["products"].to(states[0]["products"].device) for state in states]
    means = np.sum(torch.stack(products).tolist(), axis=0) / pairs  # read from the device at once
    # Of the mean of as many squares of noise. Weights that fade as 0.998^age make it smaller still, by up to √2.
    standard_error = noise_std**2 * math.sqrt(2 / pairs[0])
    if means[0] <= SIGNIFICANCE * standard_error:
        return taps
    return list(optimal_fir(np.clip(means / means[0], 0, 1)).b)  # begin has taken the noise off
