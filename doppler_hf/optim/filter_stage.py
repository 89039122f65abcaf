"""The filter as `DopplerOptimizer` asks it: a fixed one, or an `OptimalFIR`, which follows the gradients.

It keeps its states with each parameter's. A step of a parameter begins (`begin`, which returns c_t), then `advance` turns
g_t into m_t, for the whole or slice by slice; the step of a group ends with `end`. Only a fixed filter, which is linear with
coefficients that stay, may have its states rotated, or be compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.low_pass import bias_correction, low_pass, padded_coefficients
from doppler_hf.optim.one_pass import Coefficients, ParameterTensors


@final
class FixedFilter:
    """A `LowPassFilter` as a stage.

    Attributes:
        order: How many tensors it keeps for each parameter.
    """

    is_fixed: Final = True

    def __init__(self, low_pass_filter: LowPassFilter) -> None:
        self.order = low_pass_filter.order
        self._coefficients = padded_coefficients(low_pass_filter)

    def new_group(self) -> dict[str, Any]:
        """Return what it adds to the options of a parameter group: nothing."""
        return {}

    def new_state(self, zeros: Callable[[], Tensor]) -> dict[str, Any]:
        """Return the states of filter and step response; the latter too, since a parameter may begin later than others."""
        return {"filter_states": [zeros() for _ in range(self.order)], "bias_states": [0.0] * self.order}

    def coefficients(self, group: dict[str, Any]) -> Coefficients:
        """Return the last argument of `advance` for the parameters of a group: (b, a)."""
        return self._coefficients

    def begin(self, state: dict[str, Any], group: dict[str, Any], *, noise_std: float) -> float:
        """Begin a step of one parameter, whose state is modified in place, and return c_t, what `advance` makes of ones."""
        b, a = self._coefficients
        return bias_correction(state["bias_states"], b=b, a=a)

    @staticmethod
    def advance(
        grad: Float[Tensor, "*shape"], tensors: ParameterTensors, coefficients: Coefficients
    ) -> Float[Tensor, "*shape"]:
        """Return m_t from g_t, in float32 at least (the states modified in place)."""
        b, a = coefficients
        return low_pass(grad, tensors.filter_states, b=b, a=a)

    def end(self, group: dict[str, Any], states: Sequence[dict[str, Any]], *, noise_std: float) -> None:
        """End a step of a group with these states of its parameters: nothing is left to do."""


FilterStage = FixedFilter | OptimalFIR


def filter_stage(low_pass_filter: LowPassFilter | OptimalFIR) -> FilterStage:
    """Return the stage of what a user asks for."""
    return low_pass_filter if isinstance(low_pass_filter, OptimalFIR) else FixedFilter(low_pass_filter)
