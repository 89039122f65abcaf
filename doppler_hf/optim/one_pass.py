"""One step of many tensors, at the speed of memory.

Compiled, a step is one pass over the numbers. Uncompiled it is a dozen, so a tensor is taken in slices that stay in the
cache, and small tensors are joined. What is computed is the caller's, a function of `ParameterTensors` and `StepConstants`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

CPU_SLICE: Final = 9 * 2**15  # elements: half a 768 × 768 matrix; gradient, weight, states, temporaries fit into caches
DEVICE_SLICE: Final = 2**24  # of an accelerator, for the memory of temporaries
SMALL: Final = 2**16  # elements below which a tensor's calls cost more than copying it
TENSORS_AT_A_TIME: Final = 16  # a call into compiled code costs some 0.5 ms, as a pass over a million elements
FILLER_SIZE: Final = 16  # sizes of 0 and 1 would be constants of a compiled program
TYPICAL_SIZE: Final = 2**17
MOST_PROGRAMS: Final = 256  # for each filter, base, dtype and device of a process; torch's limit of 8 is an error


@dataclass(frozen=True)
class ParameterTensors:
    """What a step of one parameter reads and writes: x_t, g_t, filter states, v_{t-1} if any, and an `OptimalFIR`'s sums."""

    weight: Float[Tensor, "*shape"]
    grad: Float[Tensor, "*shape"]
    filter_states: list[Float[Tensor, "*shape"]]
    exp_avg_sq: Float[Tensor, "*shape"] | None = None
    products: Float64[Tensor, " taps"] | None = None

    @property
    def of_shape(self) -> list[Float[Tensor, "*shape"]]:
        """All tensors of the parameter's shape, the gradient first."""
        return [self.grad, self.weight, *self.filter_states, *([] if self.exp_avg_sq is None else [self.exp_avg_sq])]

    @property
    def flat(self) -> "ParameterTensors | None":
        """The tensors flattened; None if one is not contiguous."""
        tensors = self.of_shape
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
        return self.replaced([tensor if tensor.ndim == 1 else tensor.view(-1) for tensor in tensors])

    def replaced(self, of_shape: Sequence[Tensor]) -> "ParameterTensors":
        """Return a copy with other tensors, in the order of `of_shape`."""
        grad, weight, *states = of_shape
        v = None if self.exp_avg_sq is None else states.pop()
        return ParameterTensors(weight, grad, states, v, self.products)

    def slices(self) -> Iterator["ParameterTensors"]:
        """Yield parts that fit into the cache together; not contiguous, the whole."""
        flat, size = self.flat, slice_size(self.weight)
        if flat is None:
            yield self
            return
        for start in range(0, self.weight.numel(), size):
            yield flat.replaced([tensor[start : start + size] for tensor in flat.of_shape])


def slice_size(like: Tensor) -> int:
    """Return the number of elements that are updated at a time without a compiler."""
    return CPU_SLICE if like.device.type == "cpu" else DEVICE_SLICE


@dataclass(frozen=True)
class StepConstants:
    """The constants of a step, with the corrections of the zero start, k_t = 1 - β₂ᵗ."""

    advance: "Advance"  # of the filter; see `low_pass.FixedFilter`
    coefficients: "Coefficients" = ()  # of the filter, and the last argument of `advance`
    beta2: float = 0.0
    step_size: float | Float[Tensor, ""] = 0.0  # lr / c_t, times √k_t where there is a second moment
    decay: float | Float[Tensor, ""] = 1.0  # 1 - lr·weight_decay
    noise_var: float | Float[Tensor, ""] = 0.0  # k_t times the noise's mean variance, weighted as the second moment
    floor: float | Float[Tensor, ""] = 0.0  # k_t times the least squared denominator

    def with_tensors(self, dtype: torch.dtype, device: torch.device) -> "StepConstants":
        """Return a copy with tensors for values that change every step; a program would take floats for constants."""
        advance, coefficients, beta2, *floats = vars(self).values()
        moved = torch.tensor(floats, dtype=dtype).to(device, non_blocking=True)  # made there, it would be waited for
        return StepConstants(advance, coefficients, beta2, *moved)


Coefficients = tuple[tuple[float, ...], ...]
Advance = Callable[[Tensor, ParameterTensors, Coefficients], Tensor]
Update = Callable[[ParameterTensors, StepConstants], None]
# What a program is made for: the filter's `advance`, and the dtypes of weight and gradient, and the device.
Kind = tuple[Advance, torch.dtype, torch.dtype, torch.device]


class OnePass:
    """A step for many tensors by `update`, compiled or in slices; without a compiler it warns once and takes slices."""

    def __init__(self, update: Update, *, compiled: bool) -> None:
        self._update = update
        # The user's own switch, TORCH_COMPILE_DISABLE=1: a program that must not have gaps cannot be made then.
        self._is_compiled = compiled and not torch._dynamo.config.disable
        self._programs: dict[Kind, Program] = {}

    def __call__(self, batch: Sequence[ParameterTensors], constants: StepConstants) -> None:
        """Make one step for each (modified in place)."""
        small: dict[Kind, list[ParameterTensors]] = {}
        large: dict[Kind, list[ParameterTensors]] = {}
        rest = []
        uses = Counter(tensors.weight.untyped_storage()._cdata for tensors in batch)
        for tensors in batch:
            weight = tensors.weight
            kind = (constants.advance, weight.dtype, tensors.grad.dtype, weight.device)
            # Two parameters of one storage, as PEFT ties adapters, take their steps one after the other: joined, both would
            # begin with the same weights, and one step would be lost.
            if uses[weight.untyped_storage()._cdata] > 1:
                rest.append(tensors)
            elif weight.numel() < SMALL and tensors.products is None:
                small.setdefault(kind, []).append(tensors)
            elif self._is_compiled and (flat := tensors.flat):
                large.setdefault(kind, []).append(flat)
            else:
                rest.append(tensors)
        if large and not self._run_compiled(large, constants):
            rest += chain.from_iterable(large.values())
        for part in chain.from_iterable(tensors.slices() for tensors in rest):
            self._update(part, constants)
        for piece in chain.from_iterable(map(_pieces, small.values())):
            self._update_joined(piece, constants)

    def _update_joined(self, piece: Sequence[ParameterTensors], constants: StepConstants) -> None:
        columns = list(zip(*(tensors.of_shape for tensors in piece), strict=True))
        joined = piece[0].replaced([torch.cat([tensor.reshape(-1) for tensor in column]) for column in columns])
        self._update(joined, constants)
        for column, whole in zip(columns[1:], joined.of_shape[1:], strict=True):  # all but the gradients
            parts = whole.split([tensor.numel() for tensor in column])
            torch._foreach_copy_(column, [part.view(tensor.shape) for part, tensor in zip(parts, column, strict=True)])

    def _run_compiled(self, kinds: dict[Kind, list[ParameterTensors]], constants: StepConstants) -> bool:
        """Make the compiled steps, or none and return False if there is no compiler."""
        for kind, some in kinds.items():  # all of them before any is run
            try:
                if kind not in self._programs:
                    self._programs[kind] = Program(self._update, some[0], constants)
            except (torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InductorError) as error:
                self._is_compiled = False
                warnings.warn(
                    f"torch.compile finds no working compiler here ({type(error).__name__}). The optimizer runs without it, "
                    "about three times slower. Install a C++ compiler, or pass compiled=False to silence this.",
                    stacklevel=2,
                )
                return False
        for kind, some in kinds.items():
            self._programs[kind](some, constants)
        return True


def _pieces(small: Sequence[ParameterTensors]) -> Iterator[list[ParameterTensors]]:
    """Yield runs of small tensors that are updated as one."""
    ends = accumulate(tensors.weight.numel() for tensors in small)
    size = slice_size(small[0].weight)
    for _, piece in groupby(zip(ends, small, strict=True), key=lambda pair: pair[0] // size):
        yield [tensors for _, tensors in piece]


class Program:
    """A step, compiled for a number of tensors of any sizes at a time: a call costs as much as a small tensor's pass."""

    def __init__(self, update: Update, example: ParameterTensors, constants: StepConstants) -> None:
        self._update = update
        self._compiled = torch.compile(_update_all, dynamic=True, fullgraph=True)
        # The program is made with sizes that are all different, as it would expect that equal ones stay equal, and large
        # enough for threads to be worth their while.
        sizes = [TYPICAL_SIZE + index for index in range(TENSORS_AT_A_TIME)]
        self._run([_zeros(size, example) for size in sizes], _as_tensors(constants, example))
        self._fillers = [_zeros(FILLER_SIZE, example) for _ in range(TENSORS_AT_A_TIME)]

    def __call__(self, batch: Sequence[ParameterTensors], constants: StepConstants) -> None:
        """Make one step for each (modified in place)."""
        constants = _as_tensors(constants, batch[0])
        for start in range(0, len(batch), TENSORS_AT_A_TIME):
            some = batch[start : start + TENSORS_AT_A_TIME]
            self._run([*some, *self._fillers[len(some) :]], constants)

    def _run(self, batch: Sequence[ParameterTensors], constants: StepConstants) -> None:
        with torch.compiler.config.patch(recompile_limit=MOST_PROGRAMS):  # type: ignore[attr-defined]
            self._compiled(self._update, batch, constants)


def _as_tensors(constants: StepConstants, like: ParameterTensors) -> StepConstants:
    return constants.with_tensors(torch.promote_types(like.weight.dtype, torch.float32), like.weight.device)


def _update_all(update: Update, batch: Sequence[ParameterTensors], constants: StepConstants) -> None:
    for tensors in batch:
        update(tensors, constants)


def _zeros(size: int, like: ParameterTensors) -> ParameterTensors:
    return like.replaced([tensor.new_zeros(size) for tensor in like.of_shape])
