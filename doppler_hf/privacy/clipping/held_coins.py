"""Torch's random numbers at fixed values: training mode without chance, wherever a model keeps its coins.

A comparison must be made in training mode, where examples may be coupled, and must not be random. Zero probabilities do not
reach `F.dropout(x, 0.1)` with a number, and what bears the name of a probability may be no coin at all: `token_drop_ratio`
may say how many tokens of least norm in the batch are dropped. Here nothing is changed but the numbers themselves: each is
drawn, and replaced by its mean, so that dropout drops nothing. What is multiplied by a mean of zero does not show, as noise
whose size follows the batch; that does at numbers off their mean.
"""

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the only way to see what a composite operation draws

from doppler_hf.privacy.shared_coins import draws

aten = torch.ops.aten


def _dropout(result: Any, values: Tensor, p: float, *_: Any) -> Any:
    return values / (1.0 - p) if p < 1.0 else result[0], torch.ones_like(result[1])


# What an operation returns instead of its result, of that and of its arguments.
_AT_MEAN: Final[dict[Any, Callable[..., Any]]] = {
    aten.native_dropout: _dropout,
    aten.bernoulli: lambda result, values, p=None, **_: result.copy_(
        (values if p is None else values.new_full((), p)).round()
    ),
    aten.bernoulli_: lambda result, _values, p=0.5, **_: result.copy_(torch.as_tensor(p)),
    aten.rand: lambda result, *_, **__: result.fill_(0.5),
    aten.rand_like: lambda result, *_, **__: result.fill_(0.5),
    aten.uniform_: lambda result, _values, low=0.0, high=1.0, **_: result.fill_((low + high) / 2),
    aten.randn: lambda result, *_, **__: result.zero_(),
    aten.randn_like: lambda result, *_, **__: result.zero_(),
    aten.normal_: lambda result, _values, mean=0.0, *_, **__: result.fill_(mean),
    aten.exponential_: lambda result, _values, rate=1.0, **_: result.fill_(1 / rate),
}


def _wave(numbers: Tensor) -> Tensor:
    """Return by how much numbers are off their mean: all rows alike, not all along one, which a normalization undoes."""
    if numbers.ndim < 2:
        return numbers.new_ones(())
    return torch.arange(numbers.shape[-1], device=numbers.device, dtype=torch.float64).cos().to(numbers)


_OFF_MEAN: Final[dict[Any, Callable[..., Any]]] = _AT_MEAN | {
    aten.rand: lambda result, *_, **__: result.copy_(0.5 + 0.25 * _wave(result)),
    aten.rand_like: lambda result, *_, **__: result.copy_(0.5 + 0.25 * _wave(result)),
    aten.uniform_: lambda result, _values, low=0.0, high=1.0, **_: result.copy_(
        low + (high - low) * (0.5 + 0.25 * _wave(result))
    ),
    aten.randn: lambda result, *_, **__: result.copy_(_wave(result)),
    aten.randn_like: lambda result, *_, **__: result.copy_(_wave(result)),
    aten.normal_: lambda result, _values, mean=0.0, std=1.0, **_: result.copy_(mean + std * _wave(result)),
    aten.exponential_: lambda result, _values, rate=1.0, **_: result.copy_((1.5 + 0.5 * _wave(result)) / rate),
}


@final
class HeldCoins(TorchDispatchMode):
    """Holds random numbers at their mean during a block; what an order or a choice is drawn by is left.

    Args:
        rows: Number of examples, of which those numbers are held that are drawn for each; by default all are.
        off_mean: Whether numbers other than coins are held off their mean.

    Attributes:
        are_all_held: Whether no others have been drawn so far.
        has_numbers: Whether numbers other than coins have been drawn so far.
    """

    def __init__(self, rows: int = 1, *, off_mean: bool = False) -> None:
        super().__init__()
        self._values = _OFF_MEAN if off_mean else _AT_MEAN
        self._rows, self.are_all_held, self.has_numbers = rows, True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and hold what it has drawn."""
        result = func(*args, **(kwargs or {}))
        if not draws(func, args, kwargs or {}):
            return result
        held = self._values.get(func.overloadpacket)
        size = (result if isinstance(result, Tensor) else result[0]).numel()
        if held is None or size % self._rows:
            self.are_all_held = False
            return result
        self.has_numbers |= _OFF_MEAN[func.overloadpacket] is not _AT_MEAN[func.overloadpacket]
        return held(result, *args, **(kwargs or {}))
