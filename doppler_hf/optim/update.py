r"""One step of Algorithm 2 for one tensor, at the speed of memory.

    m_t = lowpass(g_t),    v_t = β₂ v_{t-1} + (1 - β₂) g_t²
    x_{t+1} = (1 - lr·weight_decay) x_t - (lr √k_t / c_t) · m_t / denominator(v_t)

Every number of a step is read and written once or twice, so what a step costs is how often it travels between memory and
processor. Compiled, the stages are one pass. Uncompiled they are a dozen, so a tensor is taken in slices that stay in the
cache from the first stage to the last.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.optim.adam import adam_bc_denominator, adam_denominator, second_moment
from doppler_hf.optim.low_pass import low_pass
from doppler_hf.optim.rounding import in_float32, store

Base = Literal["sgd", "adam", "adam_bc"]
BASES: Final[tuple[Base, ...]] = get_args(Base)

# Elements of a slice, such that those of gradient, weight, states and temporaries fit into two cores' second-level caches.
CPU_SLICE: Final = 2**17
# Below this a call into compiled code costs more than it saves.
COMPILED_FROM: Final = 2**14


@dataclass(frozen=True)
class Rule:
    """What stays the same from step to step.

    Attributes:
        b: Feed-forward coefficients, padded to ``order + 1``.
        a: Feedback coefficients, padded to ``order + 1``.
        base: What is done with the filtered gradient.
        beta2: Decay of the second moment.
        eps: Least denominator of ``"adam"``.
        noise_std: Standard deviation of the noise per coordinate.
        floor: Least squared denominator of ``"adam_bc"``.
    """

    b: tuple[float, ...]
    a: tuple[float, ...]
    base: Base
    beta2: float
    eps: float
    noise_std: float
    floor: float


def filtered(
    grad: Float[Tensor, "*shape"], states: Iterable[Float[Tensor, "*shape"]], *, rule: Rule
) -> Float[Tensor, "*shape"]:
    """Advances the filter, whose states may be of half precision (modified in place), and returns m_t."""
    stored = list(states)
    wide = [in_float32(state) for state in stored]
    result = low_pass(grad, wide, b=rule.b, a=rule.a)
    for state, value in zip(stored, wide, strict=True):
        store(state, value, grad)
    return result


def descend(
    weight: Float[Tensor, "*shape"],
    grad: Float[Tensor, "*shape"],
    filtered_grad: Float[Tensor, "*shape"],
    exp_avg_sq: Float[Tensor, "*shape"] | None,
    *,
    rule: Rule,
    correction: float,
    step_size: float,
    decay: float,
) -> None:
    """Moves the weight against the filtered gradient over its denominator (modified in place).

    Args:
        weight: x_t, any shape.
        grad: g_t, in float32 at least.
        filtered_grad: m_t, not corrected for its zero start.
        exp_avg_sq: v_{t-1} (modified in place); None for base ``"sgd"``.
        rule: The constants.
        correction: k_t = 1 - β₂ᵗ.
        step_size: lr / c_t, and √k_t times that for the bases with a second moment.
        decay: 1 - lr·weight_decay.
    """
    # In half precision, decay and step are rounded once, together; a decay of 1 - 1e-5 rounded by itself is lost.
    wide = in_float32(weight)
    if decay != 1.0:
        wide.mul_(decay)
    if exp_avg_sq is None:
        wide.add_(filtered_grad, alpha=-step_size)
    else:
        moment = in_float32(exp_avg_sq)
        second_moment(grad, moment, beta2=rule.beta2)
        if rule.base == "adam":
            denominator = adam_denominator(moment, eps=rule.eps, correction=correction)
        else:
            denominator = adam_bc_denominator(moment, noise_std=rule.noise_std, floor=rule.floor, correction=correction)
        store(exp_avg_sq, moment, grad)
        wide.addcdiv_(filtered_grad, denominator, value=-step_size)
    if wide is not weight:
        weight.copy_(wide)


def advance(
    weight: Float[Tensor, "*shape"],
    grad: Float[Tensor, "*shape"],
    filter_states: list[Float[Tensor, "*shape"]],
    exp_avg_sq: Float[Tensor, "*shape"] | None,
    *,
    rule: Rule,
    correction: float,
    step_size: float,
    decay: float,
) -> None:
    """Makes one step: filter, then descend; arguments as there, and `filter_states` (modified in place)."""
    grad = in_float32(grad)
    filtered_grad = filtered(grad, filter_states, rule=rule)
    descend(weight, grad, filtered_grad, exp_avg_sq, rule=rule, correction=correction, step_size=step_size, decay=decay)


class OnePass:
    """`advance` for a whole tensor, compiled or in slices.

    Args:
        rule: The constants.
        compiled: Whether to have torch compile it. Where no compiler is found that is said once, and slices are taken.
    """

    def __init__(self, rule: Rule, *, compiled: bool) -> None:
        self._advance: Callable[..., None] = functools.partial(advance, rule=rule)
        self._compiled: Callable[..., None] | None = None
        if compiled:
            # One program for every size: the sizes of slices and tensors are no constants of it.
            self._compiled = torch.compile(self._advance, dynamic=True, fullgraph=True)

    def __call__(
        self,
        weight: Float[Tensor, "*shape"],
        grad: Float[Tensor, "*shape"],
        filter_states: list[Float[Tensor, "*shape"]],
        exp_avg_sq: Float[Tensor, "*shape"] | None,
        **numbers: float,
    ) -> None:
        """Makes one step; arguments as `advance`."""
        tensors = [weight, grad, *filter_states, *(() if exp_avg_sq is None else (exp_avg_sq,))]
        if not all(tensor.is_contiguous() for tensor in tensors):
            self._advance(weight, grad, filter_states, exp_avg_sq, **numbers)
            return
        flat = [tensor.view(-1) for tensor in tensors]
        if self._compiled is not None and weight.numel() >= COMPILED_FROM:
            try:
                self._compiled(*arranged(flat, exp_avg_sq), **numbers)
                return
            except (torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InductorError) as error:
                # Nothing has run yet: this is raised while the program is made.
                self._compiled = None
                warnings.warn(
                    f"torch.compile has no working compiler here ({type(error).__name__}); the optimizer goes on without, "
                    "two to three times slower. Install a C++ compiler, or pass compiled=False to say nothing.",
                    stacklevel=2,
                )
        size = CPU_SLICE if weight.device.type == "cpu" else weight.numel()
        for start in range(0, weight.numel(), max(size, 1)):
            self._advance(*arranged([tensor[start : start + size] for tensor in flat], exp_avg_sq), **numbers)


def arranged(tensors: list[Tensor], exp_avg_sq: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor], Tensor | None]:
    """Returns a flat list of tensors as the arguments of `advance`."""
    if exp_avg_sq is None:
        return tensors[0], tensors[1], tensors[2:], None
    return tensors[0], tensors[1], tensors[2:-1], tensors[-1]
