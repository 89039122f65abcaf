"""The noise of the next step, prepared by a background thread while the gradients are computed.

The thread keeps a store of normals for about one step, four bytes each. They are assigned to coordinates when they are
taken. The step orders a block for each that it takes, and draws itself what is missing.

    step:  orders        thread:  own stream → blocks of float32 𝒩(0, std²) → store        step:  store → coordinates

A block is in the store, or has been taken out of it for good: never both. If a step fails, the normals it took are lost.
"""

import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
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
# Normals made at a time: 4 MiB, some milliseconds of work.
_BLOCK: Final = 1 << 20


class NoiseAhead:
    """A store of normals that a background thread fills up to what the first step needs.

    The thread starts with that step, and ends with `close`. A forked process begins with an empty store and a thread of its
    own: its parent's normals must not be used twice.

    Args:
        make_stream: A function that returns the stream of words. The thread calls it once, so that the stream is its own.
        std: Standard deviation of the prepared noise.
        floating_point_safe: Whether each normal is the sum of four.
    """

    def __init__(self, make_stream: Callable[[], BitStream], *, std: float, floating_point_safe: bool) -> None:
        self._make_stream, self._std, self._floating_point_safe = make_stream, std, floating_point_safe
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        """Start with an empty store and no thread, in this process."""
        self._process = os.getpid()
        # Reentrant, because the garbage collector may close a store in the middle of a call on it.
        self._orders: SimpleQueue[bool] = SimpleQueue()  # one for each block, False to end
        self._store: SimpleQueue[Float[Tensor, " block"]] = SimpleQueue()
        self._rest = torch.empty(0)  # of the block that was begun
        self._wanted = self._block = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def prepared(self) -> int:
        """The number of normals in the store."""
        return self._store.qsize() * self._block + len(self._rest)

    def expect(self, coordinates: int, *, pinned: bool) -> None:
        """Begin a step that needs so many normals, pinned if they go to CUDA; raise an error if the thread has failed."""
        if os.getpid() != self._process:
            self._begin()
        if self._failure is not None:
            raise RuntimeError(
                "The thread that prepares noise ahead has failed, and nothing was released. Resume from the last checkpoint."
            ) from self._failure
        if self._thread is None and not self._is_closed:
            self._wanted = min(coordinates, MAX_PREPARED)
            self._block = min(max(1, coordinates), _BLOCK)
            for _ in range(0, self._wanted, self._block):
                self._orders.put(True)
            # A daemon, so that a process that never closes the store can end.
            self._thread = threading.Thread(target=self._prepare, args=(pinned,), name="noise-ahead", daemon=True)
            self._thread.start()

    def add_to(self, values: Float[Tensor, "..."], *, std: float) -> int:
        """Add 𝒩(0, std²) to the first of some contiguous values, as far as the store lasts, and return to how many."""
        # A prepared normal has been rounded to float32. In a float64 sum, or times a factor in floating_point_safe mode,
        # the numbers that cannot occur would tell it from a shifted one, so that noise for these is drawn in the step.
        exact = values.dtype != torch.float64 and (std == self._std or not self._floating_point_safe)
        flat, done = values.view(-1), 0
        while exact and len(noise := self._take(len(flat) - done)):
            part = flat[done : done + len(noise)]
            part.add_(noise.to(part.device, part.dtype, non_blocking=True), alpha=std / self._std)
            done += len(noise)
        return done

    def _take(self, most: int) -> Float[Tensor, " n"]:
        """Take at most `most` normals out of the store, none if it is empty."""
        # Every normal is used once: it is out of the store before it is returned, and is never put back.
        if most and not len(self._rest) and not self._store.empty():
            self._rest = self._store.get()
            self._orders.put(True)
        taken, self._rest = self._rest[:most], self._rest[most:]
        return taken

    def _prepare(self, pinned: bool) -> None:
        """Carry out orders until the store is closed (the thread's main function)."""
        # Nothing here may use torch's threads: a second OpenMP team would compete with the one that computes gradients.
        try:
            if sys.platform == "linux":
                # On Linux a priority belongs to a thread. The gradients come first: this thread gets idle time, and about
                # a tenth of a busy core, which is enough to be ready in time.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            stream = self._make_stream()
            while self._orders.get() and not self._is_closed:
                block = torch.empty(self._block, dtype=torch.float32, device="cpu", pin_memory=pinned)
                position = 0
                for piece in gaussian_pieces(
                    len(block),
                    std=self._std,
                    stream=stream,
                    step=0,  # without effect: only streams that do not depend on the step are drawn ahead
                    device=block.device,
                    floating_point_safe=self._floating_point_safe,
                    one_thread=True,
                ):
                    block[position : position + len(piece)].copy_(piece)
                    position += len(piece)
                self._store.put(block)
        except BaseException as failure:
            self._failure = failure

    def close(self) -> None:
        """End the thread and clear the store. From then on nothing is prepared."""
        self._is_closed = True
        self._orders.put(False)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()  # at once in a forked process, which has none but its own
        self._store, self._rest = SimpleQueue(), torch.empty(0)
