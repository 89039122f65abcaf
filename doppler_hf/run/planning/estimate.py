"""Estimate time and memory of a private step before training: time is measured, and memory is counted.

    time   = passes·t₀ + examples·t₁ + trained weights·(noise/P + optimizer) + 4·trained·2(P − 1)/P / bandwidth
    memory = weights + states of the optimizer + noise of earlier steps/P + clipped sums + a pass

for each of P processes. t is measured with two sizes of micro-batch, noise and optimizer with some millions of weights, and
`memory` counts the bytes of a pass. Data loading, padding, evaluation, the start check, libraries, and waiting for the
slowest process are not included.
"""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.errors import Refusal
from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.update import Base
from doppler_hf.privacy import ClippedGradients, GaussianMechanism
from doppler_hf.privacy.batching.cutting import Cut
from doppler_hf.run.planning.memory import move_in, without_memory

_TIMES: Final = 3
_SAMPLED: Final = 4_000_000  # So many weights make a step that is not only overhead, but still short.
_FLOAT: Final = 4


@dataclass(frozen=True)
class Setting:
    """The batch, processes and optimizer of a step; `bandwidth`, in bytes per second, is needed for several processes.

    A run on images `may_exceed` the micro-batch by a quarter (`privacy.batching.cutting`), which takes memory.
    """

    batch_size: int
    micro_batch: int
    processes: int
    bandwidth: float | None
    base: Base
    low_pass_filter: LowPassFilter
    noise_shape: NoiseShape
    may_exceed: bool = False

    def __post_init__(self) -> None:
        if min(self.batch_size, self.micro_batch, self.processes) < 1:
            numbers = f"{self.batch_size}, {self.micro_batch} and {self.processes}"
            raise Refusal(
                "out-of-range",
                f"Batch size, micro-batch and processes must be at least 1; got {numbers}. Use larger numbers.",
            )

    @property
    def most_rows(self) -> int:
        """The most rows of a pass, at its peak of memory."""
        most = Cut(self.micro_batch, may_exceed=self.may_exceed).most_rows(None)
        assert most is not None
        return most

    @property
    def passes(self) -> int:
        """The number of passes that a process makes in a step."""
        return -(-self.batch_size // (self.processes * self.micro_batch))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of some work on a warm device; on a CPU, the processor time."""
    marks = []
    for _ in range(2 + _TIMES):
        if device.type == "cuda":
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
        else:
            marks.append(time.process_time() / torch.get_num_threads())
        work()
    # Leave out the first time, when caches are cold and kernels are chosen.
    return float(np.median(np.diff(marks[1:])))


def seconds_of_step(
    model: nn.Module,
    *,
    batch: Callable[[int], dict[str, Tensor]],
    losses_of: Callable[[dict[str, Tensor]], Float[Tensor, " batch"]],
    setting: Setting,
) -> dict[str, float]:
    """Return the seconds of each part of a private step, on `setting.processes` devices like the model's.

    `batch` makes a batch of a number of examples, and `losses_of` returns the loss of each.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device, number = trained[0].device, sum(parameter.numel() for parameter in trained)
    less, more = max(1, setting.micro_batch // 2), max(2, setting.micro_batch)
    with ClippedGradients(model, clipping="automatic") as clipped:

        def a_pass_over(inputs: dict[str, Tensor]) -> None:
            clipped.backward(losses_of(inputs))

        of_less, of_more = (seconds_of(functools.partial(a_pass_over, batch(size)), device) for size in (less, more))
    per_example = max((of_more - of_less) / (more - less), 0.0)
    a_pass = max(of_more - per_example * more, 0.0)
    noise, step = _seconds_of_a_weight(setting, device=device, sampled=min(number, _SAMPLED))
    between = 0.0
    if setting.processes > 1:
        assert setting.bandwidth is not None
        between = _FLOAT * number * 2 * (setting.processes - 1) / setting.processes / setting.bandwidth
    return {
        "passes": setting.passes * a_pass + setting.batch_size / setting.processes * per_example,
        "between processes": between,
        "noise": noise * number / setting.processes,  # Each process makes the noise of its share.
        "optimizer": step * number,
    }


def bytes_of_step(
    model: nn.Module,
    *,
    batch: Callable[[int], dict[str, Tensor]],
    losses_of: Callable[[dict[str, Tensor]], Float[Tensor, " batch"]],
    setting: Setting,
    on_cuda: bool,
) -> dict[str, float]:
    """Return the bytes of each part of a private step at its peak on a process; the model is on the "meta" device."""
    number = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    states = setting.low_pass_filter.order + (setting.base != "sgd")
    with without_memory(on_cuda=on_cuda) as peak:
        move_in(model)
        weights = peak.bytes
        clipped = ClippedGradients(model, clipping="automatic")
        clipped.on_accelerator = clipped.in_kernels = on_cuda
        with clipped:
            sums = sum(total.nbytes for total in clipped.sums.values())
            peak.forget()
            clipped.backward(losses_of(batch(setting.most_rows)))
        # For weights in half precision, the gradient is a copy that exists when the pass is over.
        copied = sum(weight.nbytes for weight in clipped.parameters.values() if weight.itemsize < 4)
    return {
        "weights": weights,
        "optimizer": _FLOAT * number * states,
        "earlier noise": _FLOAT * number * (setting.noise_shape.bands - 1) / setting.processes,
        "clipped sums": sums,
        "a pass": max(peak.most - weights - sums, copied),
    }


def largest_micro_batch(bytes_of: Callable[[int], float], *, most: int, memory: float) -> int | None:
    """Return the largest power of two up to `most` of examples whose step takes at most `memory` bytes, or None.

    Example:
        >>> largest_micro_batch(lambda size: 10 * size, most=64, memory=100)
        8
    """
    size = None
    while (following := 2 * size if size else 1) <= most and bytes_of(following) <= memory:
        size = following
    return size


def seconds_of_noise(setting: Setting, *, number: int, device: torch.device) -> float:
    """Return by how many seconds the shaped noise of so many weights takes longer than white noise."""
    sampled = min(number, _SAMPLED)
    shaped, white = (
        _seconds_of_a_weight(replace(setting, noise_shape=shape), device=device, sampled=sampled)[0]
        for shape in (setting.noise_shape, WHITE)
    )
    return max(0.0, shaped - white) * number


def _seconds_of_a_weight(setting: Setting, *, device: torch.device, sampled: int) -> tuple[float, float]:
    """Return the seconds of noise and of the optimizer's step for one weight."""
    weight = nn.Parameter(torch.zeros(sampled, device=device))
    steps = itertools.count()
    mechanism = GaussianMechanism(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=setting.batch_size,
        shape=setting.noise_shape,
        device=device,
    )
    for _ in range(setting.noise_shape.bands - 1):  # Make the earlier noise that a later step needs.
        mechanism.privatize({"": torch.zeros_like(weight)}, step=next(steps))
    noise = seconds_of(lambda: mechanism.privatize({"": torch.zeros_like(weight)}, step=next(steps)), device)
    optimizer = DopplerOptimizer([weight], 1e-3, low_pass_filter=setting.low_pass_filter, base=setting.base, noise_std=1.0)
    weight.grad = torch.ones_like(weight)
    return noise / sampled, seconds_of(optimizer.step, device) / sampled
