r"""One step of Algorithm 2 for one tensor.

    m_t = lowpass(g_t),    v_t = β₂ v_{t-1} + (1 - β₂) g_t²
    x_{t+1} = (1 - lr·weight_decay) x_t - (lr √k_t / c_t) · m_t / denominator(v_t)

Every number is read and written once or twice, so that what a step costs is how often it travels between memory and
processor; see `one_pass`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.linalg import in_float32
from doppler_hf.optim.low_pass import low_pass
from doppler_hf.optim.rounding import store
from doppler_hf.optim.second_moment import denominator, second_moment


@dataclass(frozen=True)
class Numbers:
    """What a step is made with, apart from the tensors. The corrections of the zero start have been taken into it.

    Attributes:
        step_size: lr / c_t, and √k_t times that where there is a second moment; k_t = 1 - β₂ᵗ.
        decay: 1 - lr·weight_decay.
        noise_var: k_t times the variance of the noise.
        floor: k_t times the least squared denominator.
    """

    step_size: float
    decay: float = 1.0
    noise_var: float = 0.0
    floor: float = 0.0

    def as_tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Returns the same as tensors without dimensions. As floats they would be constants of a compiled program."""
        return dict(zip(vars(self), torch.tensor([*vars(self).values()], dtype=dtype, device=device), strict=True))


def filtered(
    grad: Float[Tensor, "*shape"],
    states: Iterable[Float[Tensor, "*shape"]],
    *,
    b: Sequence[float],
    a: Sequence[float],
) -> Float[Tensor, "*shape"]:
    """Advances the filter, whose states may be of half precision (modified in place), and returns m_t."""
    stored = list(states)
    wide = [in_float32(state) for state in stored]
    result = low_pass(grad, wide, b=b, a=a)
    for state, value in zip(stored, wide, strict=True):
        if state is not value:
            state.copy_(value)
    return result


def descend(
    weight: Float[Tensor, "*shape"],
    grad: Float[Tensor, "*shape"],
    filtered_grad: Float[Tensor, "*shape"],
    exp_avg_sq: Float[Tensor, "*shape"] | None,
    *,
    beta2: float,
    step_size: float | Tensor,
    decay: float | Tensor,
    noise_var: float | Tensor,
    floor: float | Tensor,
) -> None:
    """Moves the weight against the filtered gradient over its denominator (modified in place).

    Args:
        weight: x_t, any shape.
        grad: g_t, in float32 at least.
        filtered_grad: m_t, not corrected for its zero start.
        exp_avg_sq: v_{t-1} (modified in place), or None to divide by nothing.
        beta2: Decay of the second moment.
        step_size: See `Numbers`, and so for the others.
        decay: The factor of the weight.
        noise_var: What is taken from the second moment.
        floor: What is left of it at least.
    """
    # In half precision, decay and step are rounded once, together; a decay of 1 - 1e-5 rounded by itself is lost.
    wide = in_float32(weight)
    if isinstance(decay, Tensor) or decay != 1.0:
        wide.mul_(decay)
    if exp_avg_sq is None:
        subtract(wide, filtered_grad, None, factor=step_size)
    else:
        moment = in_float32(exp_avg_sq)
        second_moment(grad, moment, beta2=beta2)
        if moment is not exp_avg_sq:
            store(exp_avg_sq, moment, entropy=grad)
        subtract(wide, filtered_grad, denominator(moment, noise_var=noise_var, floor=floor), factor=step_size)
    if wide is not weight:
        weight.copy_(wide)


def subtract(weight: Tensor, numerator: Tensor, divisor: Tensor | None, *, factor: float | Tensor) -> None:
    """Takes factor · numerator / divisor, or without the latter, from a weight (modified in place)."""
    if isinstance(factor, Tensor):
        weight.sub_(factor * (numerator if divisor is None else numerator / divisor))
    elif divisor is None:
        weight.add_(numerator, alpha=-factor)
    else:
        weight.addcdiv_(numerator, divisor, value=-factor)


def advance(
    weight: Float[Tensor, "*shape"],
    grad: Float[Tensor, "*shape"],
    filter_states: list[Float[Tensor, "*shape"]],
    exp_avg_sq: Float[Tensor, "*shape"] | None,
    *,
    b: Sequence[float],
    a: Sequence[float],
    beta2: float,
    **numbers: float | Tensor,
) -> None:
    """Makes one step: filter, then descend; arguments as there (modified in place)."""
    grad = in_float32(grad)
    descend(weight, grad, filtered(grad, filter_states, b=b, a=a), exp_avg_sq, beta2=beta2, **numbers)
