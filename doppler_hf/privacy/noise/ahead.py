"""The noise of the next step, prepared by a background thread while the gradients are computed.

The thread keeps a store of normals for about one step, four bytes each. Which of them goes to which coordinate is decided
when they are taken, so that the next step may need another number of them: what is missing is drawn on the spot by
whoever takes, and what is left over stays for the step after.

    thread:  own stream → blocks of float32 𝒩(0, std²) → store        step:  store → coordinates

A block is in one place at a time: in the store, or taken out of it for good. A step that fails loses what it took.
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

# The most normals in store, 512 MiB. A step of a model of up to 134 million parameters finds all of its noise there. Four
# bytes a parameter are then an eighth to a quarter of what parameters, gradients, sums and optimizer take (16 to 32); for a
# larger model memory is what there is least of, and the rest of its noise is drawn on the spot.
MAX_PREPARED: Final = 1 << 27
# Normals made between two looks at what is asked for: 4 MiB, some milliseconds of work. The store overshoots by one block.
_BLOCK: Final = 1 << 20


class NoiseAhead:
    """A store of normals that a background thread fills up to what a step needs.

    The thread starts with the first step, and ends with `close`. In a forked process the store is empty and the thread is
    another: its parent's normals belong to the parent.

    Args:
        make_stream: Returns where the words come from. The thread calls it once, so that the stream is its own.
        std: Standard deviation of the prepared noise.
        floating_point_safe: Whether each normal is the sum of four.
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
        self._prepared = 0
        self._wanted = 0
        self._last_need: int | None = None
        self._pinned = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def prepared(self) -> int:
        """How many normals are in the store."""
        return self._prepared

    def expect(self, coordinates: int, *, pinned: bool) -> None:
        """Begin a step, and have the noise of the next one prepared meanwhile.

        Args:
            coordinates: How many normals this step needs.
            pinned: Whether they go to a CUDA device, which copies faster from pinned memory.

        Raises:
            RuntimeError: The thread has failed.
        """
        if self._closed:
            return
        if os.getpid() != self._process:
            self._begin()
        self._raise_failure()
        with self._changed:
            # One step that needs more than its neighbours, as when GaLore looks for a new subspace, must not fill the
            # memory with what the others take long to use.
            self._wanted = min(coordinates, coordinates if self._last_need is None else self._last_need, MAX_PREPARED)
            self._last_need = coordinates
            self._pinned = pinned
            self._changed.notify_all()
        if self._thread is None:
            # A daemon, so that a process that never closes the store can end.
            self._thread = threading.Thread(target=self._prepare, name="noise-ahead", daemon=True)
            self._thread.start()

    def add_to(self, values: Float[Tensor, "..."], *, scale: float) -> int:
        """Add prepared noise to as many coordinates as there is some for, the first ones (modified in place).

        Args:
            values: What to privatize, contiguous, on any device.
            scale: What the noise is multiplied by: its standard deviation becomes scale·std.

        Returns:
            How many coordinates have got noise. The others have not.

        Raises:
            RuntimeError: The thread has failed.
        """
        # A prepared normal has been rounded to float32. In a float64 sum, or times a factor in floating_point_safe mode, it
        # could be told from a shifted one by the numbers that cannot occur: those draw theirs on the spot.
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
        """Take at most so many normals out of the store, None if there are none."""
        # Exactly once: what is returned is out of the store before anybody sees it, and no way leads back.
        with self._changed:
            if not self._store:
                return None
            block = self._store.popleft()
            if len(block) > most:
                self._store.appendleft(block[most:])
                block = block[:most]
            self._prepared -= len(block)
            self._changed.notify_all()
            return block

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("The thread that prepares noise ahead has failed; nothing was released.") from self._failure

    def _prepare(self) -> None:
        """Keep the store full: what the thread does."""
        # Nothing here may use torch's threads: a second OpenMP team would fight with the one that computes gradients.
        try:
            if sys.platform == "linux":
                # On Linux a priority belongs to a thread. The gradients come first: this takes what they leave idle, and of
                # a busy core about a tenth, which is enough to be ready in time.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            stream = self._make_stream()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._prepared < self._wanted)
                    if self._closed:
                        return
                    size, pinned = min(_BLOCK, self._wanted), self._pinned
                block = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=pinned)
                position = 0
                for piece in gaussian_pieces(
                    size,
                    std=self._std,
                    stream=stream,
                    step=0,  # no stream that is drawn from ahead depends on it
                    device=block.device,
                    floating_point_safe=self._floating_point_safe,
                    one_thread=True,
                ):
                    block[position : position + len(piece)].copy_(piece)
                    position += len(piece)
                with self._changed:
                    self._store.append(block)
                    self._prepared += size
        except BaseException as failure:
            self._failure = failure

    def close(self) -> None:
        """End the thread and forget the store. From then on nothing is prepared."""
        self._closed = True
        if os.getpid() != self._process:
            return  # the thread and its lock are the parent's
        with self._changed:
            self._store.clear()
            self._prepared = 0
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._store.clear()  # what it had in hand
