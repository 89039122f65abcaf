"""The noise of the next step, prepared by a background thread while the gradients are computed.

The thread keeps a store of normals for about one step, four bytes each. They are assigned to coordinates when they are
taken, so that the next step may need another number of them. The step draws missing normals itself, and leaves surplus ones
for the step after.

    thread:  own stream → blocks of float32 𝒩(0, std²) → store        step:  store → coordinates

A block is in the store, or has been taken out of it for good: never both. If a step fails, the normals it took are lost.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.bits import BitStream
from doppler_hf.privacy.noise.gaussian import gaussian_pieces

# The most normals in store, 512 MiB: all of a step's noise for a model of up to 134 million parameters. That is four bytes
# a parameter, where parameters, gradients, sums and optimizer take 16 to 32. For a larger model memory is scarce, and the
# rest of its noise is drawn in the step.
MAX_PREPARED: Final = 1 << 27
# Normals made at a time: 4 MiB, some milliseconds of work. The store may exceed the number wanted by one such block.
_BLOCK: Final = 1 << 20


class NoiseAhead:
    """A store of normals that a background thread fills up to what a step needs.

    The thread starts with the first step, and ends with `close`. A forked process begins with an empty store and a thread
    of its own: its parent's normals must not be used twice.

    Args:
        make_stream: A function that returns the stream of words. The thread calls it once, so that the stream is its own.
        std: Standard deviation of the prepared noise.
        floating_point_safe: Whether each normal is the sum of four.

    Attributes:
        prepared: The number of normals in the store.
    """

    def __init__(self, make_stream: Callable[[], BitStream], *, std: float, floating_point_safe: bool) -> None:
        self._make_stream = make_stream
        self._std = std
        self._floating_point_safe = floating_point_safe
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Start with an empty store and no thread, in this process."""
        self._process = os.getpid()
        # Reentrant, because the garbage collector may close another store while this thread holds a lock.
        self._changed = threading.Condition(threading.RLock())
        self._store: deque[Float[Tensor, " n"]] = deque()
        self.prepared = 0
        self._wanted = 0
        self._pinned = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def expect(self, coordinates: int, *, pinned: bool) -> None:
        """Begin a step, and let the thread prepare the noise of the next one.

        Args:
            coordinates: The number of normals that this step needs.
            pinned: Whether they go to a CUDA device, which copies faster from pinned memory.

        Raises:
            RuntimeError: If the thread has failed.
        """
        if self._closed:
            return
        if os.getpid() != self._process:
            self._begin()
        self._raise_failure()
        with self._changed:
            self._wanted = min(coordinates, MAX_PREPARED)
            self._pinned = pinned
            self._changed.notify_all()
        if self._thread is None:
            # A daemon, so that a process that never closes the store can end.
            self._thread = threading.Thread(target=self._prepare, name="noise-ahead", daemon=True)
            self._thread.start()

    def add_to(self, values: Float[Tensor, "..."], *, scale: float) -> int:
        """Add prepared noise to the first coordinates, as many as there are normals in store (modified in place).

        Args:
            values: The values to privatize, contiguous, on any device.
            scale: The factor of the noise, whose standard deviation becomes scale·std.

        Returns:
            The number of coordinates that got noise. The others got none.

        Raises:
            RuntimeError: If the thread has failed.
        """
        # A prepared normal has been rounded to float32. In a float64 sum, or times a factor in floating_point_safe mode,
        # the numbers that cannot occur would tell it from a shifted one, so that noise for these is drawn in the step.
        exact = values.dtype != torch.float64 and (scale == 1.0 or not self._floating_point_safe)
        flat, done = values.view(-1), 0
        while exact and done < len(flat):
            self._raise_failure()
            noise = self._take(len(flat) - done)
            if noise is None:
                break
            part = flat[done : done + len(noise)]
            part.add_(noise.to(part.device, part.dtype, non_blocking=True), alpha=scale)
            done += len(noise)
        return done

    def _take(self, most: int) -> Float[Tensor, " n"] | None:
        """Take at most `most` normals out of the store, None if there are none."""
        # Every normal is used once: it is out of the store before it is returned, and is never put back.
        with self._changed:
            if not self._store:
                return None
            block = self._store.popleft()
            if len(block) > most:
                self._store.appendleft(block[most:])
                block = block[:most]
            self.prepared -= len(block)
            self._changed.notify_all()
            return block

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "The thread that prepares noise ahead has failed, and nothing was released. Resume from the last checkpoint."
            ) from self._failure

    def _prepare(self) -> None:
        """Keep the store full (the thread's main function)."""
        # Nothing here may use torch's threads: a second OpenMP team would compete with the one that computes gradients.
        try:
            if sys.platform == "linux":
                # On Linux a priority belongs to a thread. The gradients come first: this thread gets idle time, and about
                # a tenth of a busy core, which is enough to be ready in time.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            stream = self._make_stream()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self.prepared < self._wanted)
                    if self._closed:
                        return
                    size, pinned = min(_BLOCK, self._wanted), self._pinned
                block = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=pinned)
                position = 0
                for piece in gaussian_pieces(
                    size,
                    std=self._std,
                    stream=stream,
                    step=0,  # without effect: only streams that do not depend on the step are drawn ahead
                    device=block.device,
                    floating_point_safe=self._floating_point_safe,
                    one_thread=True,
                ):
                    block[position : position + len(piece)].copy_(piece)
                    position += len(piece)
                with self._changed:
                    self._store.append(block)
                    self.prepared += size
        except BaseException as failure:
            self._failure = failure

    def close(self) -> None:
        """End the thread and clear the store. From then on nothing is prepared."""
        self._closed = True
        if os.getpid() != self._process:
            self._begin()  # the normals, the thread and its lock are the parent's
        with self._changed:
            self._store.clear()
            self.prepared = 0
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._store.clear()  # of the block that the thread was making
