"""The same filter on the weights: the trajectory of training is low-passed, and the filtered weights are used.

    m_t = lowpass(w)_t,    ŵ_t = m_t / c_t,    w_t the weights after step t

Momentum's filter gives the exponential moving average of weights of De et al. 2022 ("Unlocking High-Accuracy Differentially
Private Image Classification through Scale"). Training goes on with w. Private weights in, so this is post-processing.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.filters import LowPassFilter
from doppler_hf.linalg import in_float32
from doppler_hf.optim.low_pass import bias_correction, low_pass, padded_coefficients
from doppler_hf.optim.one_pass import ParameterTensors
from doppler_hf.optim.state import full_dtype


@final
class WeightFilter:
    """Low-passes the trajectory of trained parameters, with ``low_pass_filter.order + 1`` tensors each, float32 at least.

    Example:
        >>> weight_filter = WeightFilter(model.parameters(), LowPassFilter.parse("momentum:beta=0.99"))
        >>> weight_filter.update()  # after each optimizer step
        >>> with weight_filter.applied():
        ...     evaluate(model)
    """

    def __init__(self, params: Iterable[Tensor], low_pass_filter: LowPassFilter) -> None:
        self.low_pass_filter = low_pass_filter
        self._params = list(params)
        if not self._params:
            raise ValueError("params must not be empty. Give the parameters that are trained.")
        # c_t of the last update; 0 before the first, when there is nothing to apply.
        self._response = 0.0
        self._bias_states = [0.0] * low_pass_filter.order
        self._filter_states = [[_zeros(p) for _ in range(low_pass_filter.order)] for p in self._params]
        self._filtered = [_zeros(p) for p in self._params]
        self._raw: list[Tensor] | None = None  # while the filtered weights are in the parameters

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after an optimizer step into the average; refused inside of `applied`."""
        self._refuse_while_applied("update()")
        b, a = padded_coefficients(self.low_pass_filter)
        self._response = bias_correction(self._bias_states, b=b, a=a)
        for p, states, filtered in zip(self._params, self._filter_states, self._filtered, strict=True):
            for part in ParameterTensors(filtered, p.detach(), states).slices():  # a parameter in the place of its gradient
                part.weight.copy_(low_pass(in_float32(part.grad), part.filter_states, b=b, a=a))

    @torch.no_grad()
    def copy_to_params(self) -> None:
        """Put the filtered weights into the parameters, rounded to their dtype; nothing before the first update."""
        if self._response:
            for p, filtered in zip(self._params, self._filtered, strict=True):
                p.copy_(filtered / self._response)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Have the filtered weights in the parameters for the block, and then the raw ones; nested it changes nothing."""
        if self._raw is not None:
            yield
            return
        self._raw = [p.detach().clone() for p in self._params]
        try:
            self.copy_to_params()
            yield
        finally:
            _copy(self._raw, self._params)
            self._raw = None

    def state_dict(self) -> dict[str, Any]:
        """Return the filter's states and the raw weights, whichever are in the parameters."""
        return {
            "b": list(self.low_pass_filter.b),
            "a": list(self.low_pass_filter.a),
            "response": self._response,
            "bias_states": list(self._bias_states),
            "filter_states": self._filter_states,
            "filtered": self._filtered,
            "raw": self._raw if self._raw is not None else [p.detach() for p in self._params],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of the same filter and parameters, with the raw weights; refuse others and change nothing."""
        self._refuse_while_applied("load_state_dict()")
        saved = LowPassFilter(b=tuple(state_dict["b"]), a=tuple(state_dict["a"]))
        if saved != self.low_pass_filter:
            raise ValueError(
                f"The checkpoint is of the weight filter {saved}, this one is {self.low_pass_filter}. Set the checkpoint's."
            )
        shapes, own = ([tuple(tensor.shape) for tensor in tensors] for tensors in (state_dict["raw"], self._params))
        if shapes != own:
            raise ValueError(
                f"The checkpoint's weights have the shapes {shapes}, the parameters {own}. Build the checkpoint's model."
            )
        self._response = state_dict["response"]
        self._bias_states = list(state_dict["bias_states"])
        for states, saved_states in zip(self._filter_states, state_dict["filter_states"], strict=True):
            _copy(saved_states, states)
        _copy(state_dict["filtered"], self._filtered)
        _copy(state_dict["raw"], self._params)

    def _refuse_while_applied(self, call: str) -> None:
        if self._raw is not None:
            raise ValueError(
                f"{call} was called inside of applied(), where the parameters hold the filtered weights. Call it outside."
            )


def _zeros(p: Tensor) -> Float[Tensor, "*shape"]:
    return torch.zeros_like(p, dtype=full_dtype(p), requires_grad=False)


@torch.no_grad()
def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
