"""One step of many tensors, at the speed of memory.

Compiled, a step is one pass over the numbers. Uncompiled it is a dozen, so a tensor is taken in slices that stay in the
cache. What is computed is the caller's, a function of `ParameterTensors` and `StepConstants`.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

CPU_SLICE: Final = 2**17  # elements: a slice of gradient, weight, states and temporaries fits into second-level caches
TENSORS_AT_A_TIME: Final = 16  # a call into compiled code costs 0.2 ms, as a pass over a million elements
SMALLEST_COMPILED: Final = 16  # sizes of 0 and 1 would be constants of a compiled program
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
    def is_contiguous(self) -> bool:
        """Whether all of them are."""
        several = [self.weight, self.grad, *self.filter_states, *([] if self.exp_avg_sq is None else [self.exp_avg_sq])]
        return all(tensor.is_contiguous() for tensor in several)

    @property
    def flat(self) -> "ParameterTensors":
        """The same in one dimension; what is not contiguous has no such view."""
        return self.each(lambda tensor: tensor.view(-1))

    def each(self, change: Callable[[Tensor], Tensor]) -> "ParameterTensors":
        """Return the same of every tensor's image."""
        v, states = self.exp_avg_sq, [change(state) for state in self.filter_states]
        return ParameterTensors(
            change(self.weight), change(self.grad), states, None if v is None else change(v), self.products
        )

    def slices(self) -> Iterator["ParameterTensors"]:
        """Yield parts that fit into the cache together; on an accelerator, or not contiguous, the whole."""
        if not self.is_contiguous:
            yield self
            return
        flat, numel = self.flat, self.weight.numel()
        size = CPU_SLICE if self.weight.device.type == "cpu" else max(numel, 1)
        for start in range(0, numel, size):
            yield flat.each(operator.itemgetter(slice(start, start + size)))


@dataclass(frozen=True)
class StepConstants:
    """What a step is made with, apart from the tensors; with the corrections of the zero start, k_t = 1 - β₂ᵗ."""

    advance: "Advance"  # of the filter; see `low_pass.FixedFilter`
    coefficients: "Coefficients" = ()  # of the filter, and the last argument of `advance`
    beta2: float = 0.0
    step_size: float | Float[Tensor, ""] = 0.0  # lr / c_t, times √k_t where there is a second moment
    decay: float | Float[Tensor, ""] = 1.0  # 1 - lr·weight_decay
    noise_var: float | Float[Tensor, ""] = 0.0  # k_t times the noise's mean variance, weighted as the second moment
    floor: float | Float[Tensor, ""] = 0.0  # k_t times the least squared denominator

    def with_tensors(self, dtype: torch.dtype, device: torch.device) -> "StepConstants":
        """Return the same with tensors for what differs from step to step; floats would be constants of a program."""
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
        rest = self._run_compiled(batch, constants) if self._is_compiled else batch
        for part in chain.from_iterable(tensors.slices() for tensors in rest):
            self._update(part, constants)

    def _run_compiled(self, batch: Sequence[ParameterTensors], constants: StepConstants) -> Sequence[ParameterTensors]:
        """Make the compiled steps, and return the tensors that are left."""
        kinds: dict[Kind, list[ParameterTensors]] = {}
        rest = []
        for tensors in batch:
            if tensors.weight.numel() < SMALLEST_COMPILED or not tensors.is_contiguous:
                rest.append(tensors)
            else:
                kind = (constants.advance, tensors.weight.dtype, tensors.grad.dtype, tensors.weight.device)
                kinds.setdefault(kind, []).append(tensors.flat)
        for kind, some in kinds.items():  # all of them before any is run
            try:
                if kind not in self._programs:
                    self._programs[kind] = Program(self._update, some[0], constants)
            except (torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InductorError) as error:
                self._is_compiled = False
                warnings.warn(
                    f"torch.compile has no working compiler here ({type(error).__name__}); the optimizer goes on without, "
                    "about three times as slow. Install a C++ compiler, or pass compiled=False to say nothing.",
                    stacklevel=2,
                )
                return batch
        for kind, some in kinds.items():
            self._programs[kind](some, constants)
        return rest


class Program:
    """A step, compiled for a number of tensors of any sizes at a time: a call costs as much as a small tensor's pass."""

    def __init__(self, update: Update, example: ParameterTensors, constants: StepConstants) -> None:
        self._update = update
        self._compiled = torch.compile(_update_all, dynamic=True, fullgraph=True)
        # The program is made with sizes that are all different, as it would expect that equal ones stay equal, and large
        # enough for threads to be worth their while.
        sizes = [TYPICAL_SIZE + index for index in range(TENSORS_AT_A_TIME)]
        self._run([example.each(functools.partial(_zeros, size)) for size in sizes], _as_tensors(constants, example))
        self._fillers = [example.each(functools.partial(_zeros, SMALLEST_COMPILED)) for _ in range(TENSORS_AT_A_TIME)]

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


def _zeros(size: int, like: Tensor) -> Tensor:
    return torch.zeros(size, dtype=like.dtype, device=like.device)
