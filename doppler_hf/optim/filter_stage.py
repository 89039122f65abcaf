"""The filter as an object: what `DopplerOptimizer` asks of it, be it fixed or one that follows the gradients."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, final

from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.low_pass import bias_correction, low_pass, padded_coefficients
from doppler_hf.optim.one_pass import Advance, Coefficients, ParameterTensors


class FilterStage(Protocol):
    """A filter of a parameter's gradients, whose states are the parameter's and are kept in its ``state``."""

    @property
    def order(self) -> int:
        """How many tensors it keeps for each parameter."""

    @property
    def is_fixed(self) -> bool:
        """Whether it is linear, with coefficients that stay; only then may its states be rotated, or a step be compiled."""

    def new_group(self) -> dict[str, Any]:
        """Return what it adds to the options of a parameter group."""

    def new_state(self, zeros: Callable[[], Tensor]) -> dict[str, Any]:
        """Return the state of a parameter before any step: ``filter_states``, made by `zeros`, ``bias_states``, and more."""

    def coefficients(self, group: dict[str, Any]) -> Coefficients:
        """Return the last argument of `advance` for the parameters of a group."""

    def begin(self, state: dict[str, Any], group: dict[str, Any], *, noise_std: float) -> float:
        """Begin a step of one parameter and return c_t, what `advance` makes of ones.

        Args:
            state: The parameter's, ``step`` counted up to this one (modified in place).
            group: The parameter's.
            noise_std: Of the noise in this step's gradient.
        """

    @property
    def advance(self) -> Advance:
        """The function from g_t (in float32 at least), a parameter's tensors or a slice of them, and `coefficients`, to m_t.

        It modifies the states in place, and is the same one at every step.
        """

    def end(self, group: dict[str, Any], states: Sequence[dict[str, Any]], *, noise_std: float) -> None:
        """End a step of a group with these states of its parameters (modified in place)."""


def filter_stage(low_pass_filter: LowPassFilter | OptimalFIR) -> FilterStage:
    """Return the stage of what a user asks for."""
    return low_pass_filter if isinstance(low_pass_filter, OptimalFIR) else FixedFilter(low_pass_filter)


@final
class FixedFilter:
    """A `LowPassFilter` as a stage."""

    is_fixed: Final = True

    def __init__(self, low_pass_filter: LowPassFilter) -> None:
        self.order = low_pass_filter.order
        self._coefficients = padded_coefficients(low_pass_filter)

    def new_group(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def new_state(self, zeros: Callable[[], Tensor]) -> dict[str, Any]:
        """Return the states of filter and step response; the latter too, since a parameter may begin later than others."""
        return {"filter_states": [zeros() for _ in range(self.order)], "bias_states": [0.0] * self.order}

    def coefficients(self, group: dict[str, Any]) -> Coefficients:
        """Return (b, a)."""
        return self._coefficients

    def begin(self, state: dict[str, Any], group: dict[str, Any], *, noise_std: float) -> float:
        """Return c_t."""
        b, a = self._coefficients
        return bias_correction(state["bias_states"], b=b, a=a)

    @staticmethod
    def advance(
        grad: Float[Tensor, "*shape"], tensors: ParameterTensors, coefficients: Coefficients
    ) -> Float[Tensor, "*shape"]:
        """Return m_t (the states modified in place)."""
        b, a = coefficients
        return low_pass(grad, tensors.filter_states, b=b, a=a)

    def end(self, group: dict[str, Any], states: Sequence[dict[str, Any]], *, noise_std: float) -> None:
        """Do nothing."""
