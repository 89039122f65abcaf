"""Time and memory of a private step, before training: a linear model, whose constants are measured on the spot.

    time   = passes·t₀ + examples·t₁ + trained weights·(noise/P + optimizer) + 4·trained·2(P − 1)/P / bandwidth
    memory = weights + states of the optimizer + noise of earlier steps/P + clipped sums + max(m₀ + examples·m₁, a gradient)

for each of P processes. t and m come from two sizes of micro-batch, noise and optimizer from some millions of weights. Data
loading, padding, evaluation, the start check, libraries, and waiting for the slowest process are not included.
"""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.filters import LowPassFilter, NoiseShape
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.state import Base
from doppler_hf.privacy import ClippedGradients, GaussianMechanism
from doppler_hf.privacy.clipping.clipped_gradients import Engine

_TIMES: Final = 3
_SAMPLED: Final = 4_000_000  # weights: enough that a step is not all overhead, and done in a moment
_FLOAT: Final = 4
_FORGET_PEAK: Final = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Setting:
    """What is to be trained, and how; `bandwidth` is in bytes a second, and must be given for several processes."""

    batch_size: int
    micro_batch: int
    processes: int
    bandwidth: float | None
    engine: Engine
    base: Base
    low_pass_filter: LowPassFilter
    noise_shape: NoiseShape

    def __post_init__(self) -> None:
        if min(self.batch_size, self.micro_batch, self.processes) < 1:
            numbers = f"{self.batch_size}, {self.micro_batch} and {self.processes}"
            raise ValueError(f"Batch size, micro-batch and processes must be at least 1, got {numbers}. Give larger ones.")
        if self.processes > 1 and not (self.bandwidth is not None and self.bandwidth > 0):
            raise ValueError(
                f"--bandwidth must be given for {self.processes} processes, got {self.bandwidth}: it is not measured here. "
                "Give the bytes per second between them, as --bandwidth 1e10."
            )

    @property
    def passes(self) -> int:
        """Passes of a process in a step."""
        return -(-self.batch_size // (self.processes * self.micro_batch))


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and bytes of a process at its peak, each by part."""

    seconds: dict[str, float]
    bytes: dict[str, float]


class Meter:
    """Seconds and memory of work on a device; on a CPU of one process, and the seconds are its processor's."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if not self._is_cuda and not _FORGET_PEAK.exists():
            raise ValueError(
                f"The peak memory on a CPU is read from Linux's {_FORGET_PEAK}, which must be there, got none. Run it on "
                "Linux, or with --device cuda."
            )

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of some work, once it is warm."""
        found = []
        for _ in range(1 + _TIMES):
            self._wait()
            start = self._now()
            work()
            self._wait()
            found.append(self._now() - start)
        return float(np.median(found[1:]))

    def peak(self, work: Callable[[], object]) -> float:
        """Return how many bytes more than before are in use at most."""
        if self._is_cuda:
            self._wait()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            return torch.cuda.max_memory_allocated() - before
        _FORGET_PEAK.write_text("5")
        before = _resident("VmRSS")
        work()
        return _resident("VmHWM") - before

    def _now(self) -> float:
        return time.perf_counter() if self._is_cuda else time.process_time() / torch.get_num_threads()

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def estimate(
    model: nn.Module,
    *,
    batch: Callable[[int], dict[str, Tensor]],
    losses_of: Callable[[dict[str, Tensor]], Float[Tensor, " batch"]],
    setting: Setting,
) -> Estimate:
    """Return what a private step takes on this machine's device, and on `setting.processes` such ones.

    `batch` makes a batch of a number of examples, `losses_of` returns the loss of each.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device, number = trained[0].device, sum(parameter.numel() for parameter in trained)
    meter = Meter(device)
    sizes = (max(1, setting.micro_batch // 2), max(2, setting.micro_batch))
    found = []
    with ClippedGradients(model, engine=setting.engine, clipping="automatic") as clipped:
        for size in sizes:
            one_pass = functools.partial(lambda inputs: clipped.backward(losses_of(inputs)), batch(size))
            one_pass()  # so that the sums are there, which are counted
            found.append((meter.peak(one_pass), meter.seconds(one_pass)))
    (low, per_example) = _line(sizes, found)
    noise, step, kept = _of_a_weight(setting, device=device, sampled=min(number, _SAMPLED), meter=meter)
    examples, passes = setting.batch_size / setting.processes, setting.passes
    between = 0.0
    if setting.bandwidth is not None:
        between = _FLOAT * number * 2 * (setting.processes - 1) / setting.processes / setting.bandwidth
    activations = low[0] + per_example[0] * setting.micro_batch
    return Estimate(
        seconds={
            "passes": passes * low[1] + examples * per_example[1],
            "between processes": between,
            "noise": noise * number / setting.processes,  # each makes that of its share
            "optimizer": step * number,
        },
        bytes={
            "weights": float(sum(parameter.nbytes for parameter in model.parameters())),
            "optimizer": kept * number,
            "earlier noise": _FLOAT * number * (setting.noise_shape.bands - 1) / setting.processes,
            "clipped sums": float(_FLOAT * number),
            "a pass, or the gradient": max(activations, float(_FLOAT * number)),
        },
    )


def _line(sizes: tuple[int, int], found: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes and seconds of a pass of no examples, and of an example; none is negative."""
    first, second = np.array(found)
    slope = np.maximum((second - first) / (sizes[1] - sizes[0]), 0.0)
    return np.maximum(second - slope * sizes[1], 0.0), slope


def _of_a_weight(setting: Setting, *, device: torch.device, sampled: int, meter: Meter) -> tuple[float, float, float]:
    """Return the seconds of noise and of the optimizer's step, and the bytes of its state, for one weight."""
    weight = nn.Parameter(torch.zeros(sampled, device=device))
    steps = itertools.count()
    with GaussianMechanism(
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=setting.batch_size, shape=setting.noise_shape
    ) as mechanism:
        for _ in range(setting.noise_shape.bands - 1):  # so that all earlier noise is there
            mechanism.privatize({"": torch.zeros_like(weight)}, step=next(steps))
        noise = meter.seconds(lambda: mechanism.privatize({"": torch.zeros_like(weight)}, step=next(steps)))
    optimizer = DopplerOptimizer([weight], 1e-3, low_pass_filter=setting.low_pass_filter, base=setting.base, noise_std=1.0)
    weight.grad = torch.ones_like(weight)
    step = meter.seconds(optimizer.step)
    return noise / sampled, step / sampled, sum(map(_bytes_in, optimizer.state[weight].values())) / sampled


def _bytes_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_in, value)) if isinstance(value, list | tuple) else 0
