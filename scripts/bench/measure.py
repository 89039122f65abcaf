"""Shared functions of the benchmarks: ratios of paired times, and peak memory in a separate process.

A machine's speed changes over time. Two ways are therefore timed in turn, and the result is the median of the pairs' ratios
with its quartiles.
"""

import ctypes
import json
import multiprocessing
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch.profiler import DeviceType, ProfilerActivity, profile

from doppler_hf.errors import Refusal

# Nothing of doppler_hf: the tests' conftest imports this before the checks of arrays are in place, which it would pass by.
MIB = 2**20
WARM_UP = 3  # steps of each kind before anything is timed


def quartiles(ratios: Float[np.ndarray, " pairs"]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile.

    Example:
        >>> quartiles(np.array([1.0, 2.0, 3.0]))
        (1.5, 2.0, 2.5)
    """
    q1, median, q3 = np.percentile(ratios, [25, 50, 75]).tolist()
    return q1, median, q3


def seconds_of(step: Callable[[], Any], *, device: str) -> float:
    """Time one step, from an empty queue of the device to the end of what it queued there."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds_in_turn(*steps: Callable[[], Any], pairs: int, device: str) -> np.ndarray:
    """Return the seconds of steps that are made in turn, shape (pairs, steps)."""
    for step in steps * WARM_UP:
        step()
    return np.array([[seconds_of(step, device=device) for step in steps] for _ in range(pairs)])


def kernels_of(step: Callable[[], Any], *, device: str) -> tuple[int, float]:
    """Return how many kernels and copies a step has, and the seconds that they keep the device busy; of a CPU, operators."""
    is_cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU], acc_events=True) as found:
        seconds_of(step, device=device)
    where = DeviceType.CUDA if is_cuda else DeviceType.CPU
    events = [event for event in found.events() if event.device_type == where and not event.is_user_annotation]
    return len(events), sum(event.time_range.elapsed_us() for event in events) / 1e6


def added_mib(step: Callable[[], Any], *, device: str) -> float:
    """Return the most memory that a step adds on CUDA to what is there, in MiB; a CPU keeps no such count, and adds 0."""
    if device != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = memory_now(device)
    step()
    return (memory_peak(device) - before) / MIB


def memory_now(device: str) -> int:
    """Return the memory in use, in bytes: resident memory of this process on the CPU, allocated tensors on CUDA."""
    return torch.cuda.memory_allocated() if device == "cuda" else resident_bytes("VmRSS")


def memory_peak(device: str) -> int:
    """Return the most that was ever in use, in bytes. On the CPU this counts whatever the process has done before."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident_bytes("VmHWM")


def forget_peak(device: str) -> None:
    """Let the most memory that was ever in use be what is in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(name: str) -> int:
    """Read VmRSS (now) or VmHWM (the highest) of this process; `getrusage` would give the parent's if that is higher."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back: no trimming (M_TRIM_THRESHOLD) and no blocks of their own (M_MMAP_MAX).

    Raises:
        ValueError: If the system has another C library.
    """
    libc = ctypes.CDLL("libc.so.6")
    if not (libc.mallopt(-1, 2**31 - 1) and libc.mallopt(-4, 0)):
        raise Refusal("no-glibc", "--heap keep needs glibc, which this system does not have. Use --heap return.")


def in_fresh_process(function: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> Any:
    """Call a function in a new process, so that nothing else has used that process's memory.

    Raises:
        BrokenProcessPool: If the process was killed, as for want of memory.
        TimeoutError: If it takes longer than the limit. The process is killed.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result(limit_s)
        except TimeoutError:
            for child in multiprocessing.active_children():
                child.kill()
            raise


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a child of this process, which has imported what it needs; not for CUDA once it is in use."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def chosen(flag: str, names: str, known: Collection[str]) -> list[str]:
    """Return the names in a flag's value, separated by commas, and refuse one that is not known."""
    for name in names.split(","):
        if name not in known:
            raise Refusal("unknown-value", f"{flag} must be of {', '.join(known)}, got {name!r}.")
    return names.split(",")


def settings(args: Any) -> dict[str, Any]:
    """Return what a measurement was made with: the device, torch's version, and a benchmark's arguments."""
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return {"device": device, "torch": torch.__version__, "settings": asdict(args)}


def append_json_line(result: dict[str, Any], path: str | None) -> None:
    """Add a result to a file, which is made if there is none. Do nothing for None."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.write(json.dumps(result) + "\n")
