r"""A filter without feedback whose taps follow the private gradients (DOPPLER, Section 4.3, *Optimal FIR filter*).

    m̂_t = Σ_{τ<n} b_τ g_{t-τ} / Σ_{τ<min(t,n)} b_τ,    b_τ = c_τ / Σ c,    c_τ = ½ min(max(C_τ / C_0, 0), 1)

C_τ is the mean of ⟨g_t, g_{t-τ}⟩ over the coordinates of a parameter group and over time, less the noise's variance for
lag 0. The mean over time forgets: a step counts 0.998^age, so that it is over all steps at first and over the last 500 or so
later, for the autocorrelation changes as training goes on. The taps of a group are found anew every `update_gap` steps, if
the signal's power C_0 is then more than twice its own standard error under noise alone; otherwise they stay as they are.

They begin as a moving average. On synthetic gradients of correlation 0.9 or 0.98 from step to step and of noise power 10 to
1000 times that of the signal, 8 equal taps give 1.6 to 2.7 times the gradient's own cosine with the signal; at correlation
0.5 they give 0.7 to 1.1 times it. Where the signal is weak the taps stay long as they are, so the beginning counts.

All of this reads gradients that are private when they arrive, and the size of the noise, which is public: post-processing,
which costs no privacy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from doppler_hf.filters import autocorrelation_from_products, optimal_fir
from doppler_hf.linalg import in_float32
from doppler_hf.optim.one_pass import Work, slices
from doppler_hf.optim.update import Numbers, descend

MEMORY: Final = 0.998
DEFAULT_UPDATE_GAP: Final = 50
# Standard errors by which the power of the gradients must exceed that of the noise.
SIGNIFICANCE: Final = 2.0


@final
@dataclass(frozen=True)
class OptimalFIR:
    """What a `DopplerOptimizer` takes as its filter to find the taps itself.

    Args:
        taps: How many gradients the filter looks at, this step's included; at least 2.
        update_gap: After how many steps the taps are found anew, at least 1.

    Raises:
        ValueError: If either is not such a number.

    Example:
        >>> print(OptimalFIR(taps=8), OptimalFIR(taps=8, update_gap=20))
        optimal-fir:taps=8 optimal-fir:taps=8,update_gap=20
    """

    taps: int
    update_gap: int = DEFAULT_UPDATE_GAP

    def __post_init__(self) -> None:
        if not isinstance(self.taps, Integral) or self.taps < 2:
            raise ValueError(f"taps is {self.taps}: give a whole number of at least 2; one tap is no filter")
        if not isinstance(self.update_gap, Integral) or self.update_gap < 1:
            raise ValueError(f"update_gap is {self.update_gap}: give a whole number of at least 1")

    @property
    def order(self) -> int:
        """How many earlier gradients are kept for each parameter."""
        return self.taps - 1

    def __str__(self) -> str:
        gap = "" if self.update_gap == DEFAULT_UPDATE_GAP else f",update_gap={self.update_gap}"
        return f"optimal-fir:taps={self.taps}{gap}"


def fir(
    grad: Float[Tensor, "*shape"], history: Sequence[Float[Tensor, "*shape"]], *, taps: Sequence[float]
) -> tuple[Float[Tensor, "*shape"], Float64[Tensor, " taps"]]:
    r"""One step of a filter in direct form, and what its taps are estimated from.

    Args:
        grad: g_t, any shape, in float32 at least.
        history: g_{t-1}, g_{t-2}, ..., one fewer than taps; zeros before the first.
        taps: b.

    Returns:
        m_t = Σ b_τ g_{t-τ}, a new tensor, not corrected for its zero start; and ⟨g_t, g_{t-τ}⟩, shape (taps,).

    Example:
        >>> filtered, products = fir(torch.tensor([3.0]), [torch.tensor([1.0])], taps=[0.5, 0.5])
        >>> filtered, products.tolist()
        (tensor([2.]), [9.0, 3.0])
    """
    flat, filtered = grad.flatten(), grad * taps[0]
    products = [torch.dot(flat, flat)]
    for past, tap in zip(map(in_float32, history), taps[1:], strict=True):
        products.append(torch.dot(flat, past.flatten()))
        filtered.add_(past, alpha=tap)
    return filtered, torch.stack(products).double()


def advance_fir(work: Work, *, taps: Sequence[float], beta2: float, numbers: Numbers) -> Float64[Tensor, " taps"]:
    """Makes one step for one tensor: filter, remember, then descend (modified in place).

    Args:
        work: The tensors; the filter's states are the last gradients, the newest first.
        taps: b.
        beta2: Decay of the second moment.
        numbers: What else the step is made with.

    Returns:
        ⟨g_t, g_{t-τ}⟩, shape (taps,).
    """
    products = torch.zeros(len(taps), dtype=torch.float64, device=work.weight.device)
    for part in slices(work):
        grad = in_float32(part.grad)
        filtered, some = fir(grad, part.filter_states, taps=taps)
        products += some
        part.filter_states[-1].copy_(grad)
        descend(part.weight, grad, filtered, part.exp_avg_sq, beta2=beta2, **vars(numbers))
    # The oldest gradient has made room for the newest.
    work.filter_states.insert(0, work.filter_states.pop())
    return products


def new_estimate(taps: int, device: torch.device) -> dict[str, Any]:
    """Returns a parameter's share of its group's estimate, before any step."""
    return {"products": torch.zeros(taps, dtype=torch.float64, device=device), "pairs": [0.0] * taps}


def record(state: dict[str, Any], products: Float64[Tensor, " taps"], *, numel: int, noise_std: float) -> None:
    """Adds a step's products to a parameter's share of the estimate, and lets earlier ones fade (modified in place).

    Args:
        state: ``products``, their sums over time and coordinates, and ``pairs``, how many of them there are, by lag. Both
            fade alike, so that their quotient is a mean. And ``step``, counted up to this one.
        products: ⟨g_t, g_{t-τ}⟩, shape (taps,).
        numel: How many coordinates the parameter has.
        noise_std: Of the noise in this gradient. It leaves the sums at once, since a later run may have another.
    """
    state["products"].mul_(MEMORY).add_(products)
    state["products"][0] -= numel * noise_std**2
    state["pairs"] = [MEMORY * pairs + numel * (lag < state["step"]) for lag, pairs in enumerate(state["pairs"])]


def found_anew(taps: list[float], states: Sequence[dict[str, Any]], *, noise_std: float) -> list[float]:
    """Returns the taps of a group by the estimate so far, or those that it has if that is not certain enough.

    Args:
        taps: b.
        states: Of the group's parameters, ``products`` and ``pairs`` of each.
        noise_std: Standard deviation of the noise.
    """
    pairs = np.sum([state["pairs"] for state in states], axis=0)
    if pairs[-1] == 0:
        return taps
    means = np.sum([state["products"].tolist() for state in states], axis=0) / pairs
    # Of the mean of as many squares of noise. Weights that fade as 0.998^age make it smaller still, by up to √2.
    standard_error = noise_std**2 * math.sqrt(2 / pairs[0])
    if means[0] <= SIGNIFICANCE * standard_error:
        return taps
    # The noise was taken off before, and one coordinate stands for all: the means are per coordinate.
    return list(optimal_fir(autocorrelation_from_products(means, 0.0, dimension=1, steps=1)).b)
