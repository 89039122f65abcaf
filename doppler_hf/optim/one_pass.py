"""A step of Algorithm 2 for many tensors, at the speed of memory.

Compiled, the stages of `update.advance` are one pass over the numbers. Uncompiled they are a dozen, so a tensor is taken in
slices that stay in the cache from the first stage to the last.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.optim.update import Numbers, advance

# Elements of a slice, such that those of gradient, weight, states and temporaries fit into two cores' second-level caches.
CPU_SLICE: Final = 2**17
# A call into compiled code costs some 0.2 ms, as much as the pass over a million elements, so tensors share it.
TENSORS_AT_A_TIME: Final = 16
# Sizes of 0 and 1 would be constants of a compiled program.
SMALLEST_COMPILED: Final = 16
TYPICAL_SIZE: Final = 2**17


@dataclass(frozen=True)
class Work:
    """What one tensor's step reads and writes; arguments of `advance`."""

    weight: Float[Tensor, "*shape"]
    grad: Float[Tensor, "*shape"]
    filter_states: list[Float[Tensor, "*shape"]]
    exp_avg_sq: Float[Tensor, "*shape"] | None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.weight, self.grad, *self.filter_states, *([] if self.exp_avg_sq is None else [self.exp_avg_sq])]

    @property
    def is_contiguous(self) -> bool:
        """Whether all of them are."""
        return all(tensor.is_contiguous() for tensor in self.tensors)

    @property
    def flat(self) -> "Work":
        """The same in one dimension; what is not contiguous has no such view."""
        return self.each(lambda tensor: tensor.view(-1))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Work":
        """Returns the same of every tensor's image."""
        v = None if self.exp_avg_sq is None else change(self.exp_avg_sq)
        return Work(change(self.weight), change(self.grad), [change(state) for state in self.filter_states], v)

    def __getitem__(self, part: slice) -> "Work":
        """Returns a part of every tensor."""
        return self.each(operator.itemgetter(part))


def slices(work: Work) -> Iterator[Work]:
    """Yields parts of all tensors that fit into the cache together; on an accelerator, or not contiguous, the whole."""
    if not work.is_contiguous:
        yield work
        return
    flat, numel = work.flat, work.weight.numel()
    size = CPU_SLICE if work.weight.device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, size):
        yield flat[start : start + size]


class OnePass:
    """`advance` for many tensors, compiled or in slices.

    Args:
        b: Feed-forward coefficients of the filter, padded to ``order + 1``.
        a: Feedback coefficients, padded to ``order + 1``.
        beta2: Decay of the second moment.
        compiled: Whether to have torch compile it. Where no compiler is found that is said once, and slices are taken.
    """

    def __init__(self, *, b: Sequence[float], a: Sequence[float], beta2: float, compiled: bool) -> None:
        self._advance = functools.partial(advance, b=b, a=a, beta2=beta2)
        # The user's own switch, TORCH_COMPILE_DISABLE=1: a program that must not have gaps cannot be made then.
        self._is_compiled = compiled and not torch._dynamo.config.disable
        self._programs: dict[tuple[torch.dtype, torch.dtype, torch.device], Program] = {}

    def __call__(self, works: Sequence[Work], numbers: Numbers) -> None:
        """Makes one step for each (modified in place)."""
        rest = self._run_compiled(works, numbers) if self._is_compiled else works
        for part in chain.from_iterable(map(slices, rest)):
            self._advance(*vars(part).values(), **vars(numbers))

    def _run_compiled(self, works: Sequence[Work], numbers: Numbers) -> Sequence[Work]:
        """Does what it can, and returns the rest."""
        kinds: dict[tuple[torch.dtype, torch.dtype, torch.device], list[Work]] = {}
        rest = []
        for work in works:
            if work.weight.numel() < SMALLEST_COMPILED or not work.is_contiguous:
                rest.append(work)
            else:
                kinds.setdefault((work.weight.dtype, work.grad.dtype, work.weight.device), []).append(work.flat)
        for kind, some in kinds.items():  # all of them before any is run
            try:
                if kind not in self._programs:
                    self._programs[kind] = Program(self._advance, some[0])
            except (torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InductorError) as error:
                self._is_compiled = False
                warnings.warn(
                    f"torch.compile has no working compiler here ({type(error).__name__}); the optimizer goes on without, "
                    "about three times as slow. Install a C++ compiler, or pass compiled=False to say nothing.",
                    stacklevel=2,
                )
                return [*rest, *(work for works in kinds.values() for work in works)]
        for kind, some in kinds.items():
            self._programs[kind](some, numbers)
        return rest


class Program:
    """`advance`, compiled for a number of tensors of any sizes at a time: a call costs as much as a small tensor's pass.

    Args:
        function: What to compile.
        example: Of what dtypes, and with how many states.

    Raises:
        BackendCompilerFailed, InductorError: No working compiler; nothing has been modified.
    """

    def __init__(self, function: Callable[..., None], example: Work) -> None:
        def advance_all(works: list[tuple[Tensor, Tensor, list[Tensor], Tensor | None]], **numbers: Tensor) -> None:
            for work in works:
                function(*work, **numbers)

        # torch keeps programs with the code that they were made from, eight at most, and the ninth is an error. Every
        # optimizer of a process may have constants of its own, so each gets a copy of the code.
        advance_all.__code__ = advance_all.__code__.replace()
        self._advance_all = torch.compile(advance_all, dynamic=True, fullgraph=True)
        # The program is made with sizes that are all different, as it would expect that equal ones stay equal, and large
        # enough for threads to be worth their while.
        shape = [TYPICAL_SIZE + index for index in range(TENSORS_AT_A_TIME)]
        self._run([example.each(functools.partial(_zeros, size)) for size in shape], Numbers(step_size=0.0))
        self._fillers = [example.each(functools.partial(_zeros, SMALLEST_COMPILED)) for _ in range(TENSORS_AT_A_TIME)]

    def __call__(self, works: Sequence[Work], numbers: Numbers) -> None:
        """Makes one step for each (modified in place)."""
        for start in range(0, len(works), TENSORS_AT_A_TIME):
            some = works[start : start + TENSORS_AT_A_TIME]
            self._run([*some, *self._fillers[len(some) :]], numbers)

    def _run(self, works: Sequence[Work], numbers: Numbers) -> None:
        weight = works[0].weight
        tensors = numbers.as_tensors(torch.promote_types(weight.dtype, torch.float32), weight.device)
        self._advance_all([tuple(vars(work).values()) for work in works], **tensors)


def _zeros(size: int, like: Tensor) -> Tensor:
    return torch.zeros(size, dtype=like.dtype, device=like.device)
