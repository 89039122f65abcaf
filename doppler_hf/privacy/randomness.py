"""Secret random numbers: for random batches and noise, and for the global generators that dropout and collators use.

A generator with a guessable seed hides nothing: torch's CPU generator keeps 32 bits of its seed and HF's `args.seed` is
public, so neither is used. Secret words come from AES-256 in counter mode, where each word of a stream is half a block of

    AES_k(0), AES_k(1), AES_k(2), …          with k from the operating system, a different one in each process.

An attacker who could tell AES's words from coin flips would have broken AES, even one who knows the rest of the stream.

Dropout masks, random crops and masked tokens come from the global generators of torch, NumPy and Python, in the order of the
draw. After a public seed they would be public numbers: one example more shifts everybody's mask, and the sum then moves by
more than C. With secret words, the others' masks are as likely with the example as without it. A coupling then leaves them
unchanged, and the sum moves by at most C. Metrics, callbacks and other code seed these generators too (`set_seed`). So they
are filled when a private run starts, in each worker of the data loader, and before the passes of each piece of a draw.
"""

import contextlib
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from jaxtyping import Int64, UInt64
from torch import Tensor

# Encrypting zeros gives the keystream itself. 32,768 words fit into the cache.
_ZEROS: Final = memoryview(bytes(1 << 18))
# All three generators are MT19937: 624 words of 32 bits. The seeding of Python and NumPy spreads a key of 256 bits over
# these words. Torch keeps only 32 bits of a seed on the CPU, which an attacker could try out, so its words are filled
# directly.
_KEY, _WORDS = 8, 624
# In torch's state a 64-bit seed, two 32-bit fields and a 64-bit position precede torch's words, which take 64 bits each.
_TORCH_STATE = torch.Generator().manual_seed(0).get_state()
_TORCH_WORDS = slice(24, 24 + 8 * _WORDS)


class BitStream(ABC):
    """A source of uniform 64-bit words, which returns no word twice."""

    is_secret: bool

    @abstractmethod
    def fill(self, words: Int64[Tensor, " n"], *, step: int) -> None:
        """Overwrite contiguous `words` with the next words of optimizer step `step`."""

    def bits(self, count: int, *, step: int) -> UInt64[np.ndarray, " n"]:
        """Return the next `count` words of optimizer step `step`."""
        words = torch.empty(count, dtype=torch.int64, device="cpu")
        self.fill(words, step=step)
        return words.numpy().view(np.uint64)


class SecretBits(BitStream):
    """A keystream of AES-256-CTR, keyed from the operating system when it is made.

    The key stays in this process: the cipher's context cannot be pickled, and a resumed run makes a new one. The position
    in the stream only moves forward, whatever the `step`, so that no two calls return the same words. Not thread-safe.
    """

    is_secret = True

    def __init__(self) -> None:
        self._take_key()

    def _take_key(self) -> None:
        # There is one key and one counter from zero. It has 2¹²⁸ blocks, so it never wraps.
        self._encryptor = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
        self._process = os.getpid()

    def fill(self, words: Int64[Tensor, " n"], *, step: int) -> None:
        """Overwrite `words` with the next words of the stream."""
        # A forked process has a copy of the key and of the counter. It must not repeat its parent's noise.
        if os.getpid() != self._process:
            self._take_key()
        keystream = words.numpy().view(np.uint8)
        for start in range(0, len(keystream), len(_ZEROS)):
            part = keystream[start : start + len(_ZEROS)]
            # `update_into` needs room for a block that it might hold back, so the last block is computed by `update`. If
            # `update` computed all blocks, its copy of them would take half as long as the encryption itself.
            body = max(0, len(part) - 16)
            if body:
                self._encryptor.update_into(_ZEROS[:body], part.data)
            part[body:] = np.frombuffer(self._encryptor.update(_ZEROS[: len(part) - body]), dtype=np.uint8)


class ReproducibleBits(BitStream):
    """Words that depend only on `seed`, `purpose` and the step. For tests only, because such noise protects nothing."""

    is_secret = False

    def __init__(self, seed: int, *, purpose: str, rank: int = 0) -> None:
        self._entropy = (seed, rank, *purpose.encode())
        self._step: int | None = None
        self._generator: np.random.Generator | None = None

    def fill(self, words: Int64[Tensor, " n"], *, step: int) -> None:
        """Overwrite `words` with the next words of the step; each step has its own sequence."""
        if step != self._step or self._generator is None:
            self._step = step
            self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._entropy, step))))
        words.copy_(torch.from_numpy(self._generator.integers(0, 2**64, size=len(words), dtype=np.uint64).view(np.int64)))


class WordsByNumber:
    """A uniform 64-bit word for each pair of numbers, computed on demand: AES-256 of the pair, with 32 secret bytes as key.

    An attacker who could tell them from coin flips would have broken AES, even one who chooses the numbers.
    """

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()

    def of(self, numbers: np.ndarray, *, series: int) -> UInt64[np.ndarray, " n"]:
        """Return the words of some non-negative integers, both of shape (n,), in one of many series."""
        blocks = np.full((len(numbers), 2), series, dtype=np.uint64)
        blocks[:, 0] = numbers
        return np.frombuffer(self._encryptor.update(blocks.tobytes()), dtype=np.uint64)[::2]


def bit_stream(seed: int | None, *, purpose: str, rank: int = 0) -> BitStream:
    """Return a secret stream, or with a `seed` a reproducible stream for tests."""
    return SecretBits() if seed is None else ReproducibleBits(seed, purpose=purpose, rank=rank)


# --- the global generators ------------------------------------------------------------------------------------------------


def fill_generators(seed: int | None, *, rank: int = 0, worker: int = 0, step: int = 0) -> None:
    """Fill the global generators with new secret random words, at least 256 bits each, or reproducibly with a seed.

    Workers of the data loader are counted from 1; 0 is the process itself. `step` numbers the fillings.
    """
    stream = bit_stream(seed, purpose=f"generators of worker {worker}", rank=rank)
    of_python, of_numpy, of_torch = np.split(stream.bits(_KEY + _WORDS // 2, step=step).view(np.uint32), [_KEY, 2 * _KEY])
    random.seed(int.from_bytes(of_python.tobytes(), "little"))
    np.random.seed(of_numpy)
    torch.set_rng_state(torch_state(of_torch))
    if worker == 0 and torch.accelerator.is_available():  # CUDA uses Philox, with a key of 64 bits.
        # The seed has 63 bits. Workers of the loader are excluded, because CUDA does not work in a forked process.
        torch.get_device_module().manual_seed(int(stream.bits(1, step=step)[0] >> np.uint64(1)))


def torch_state(words: np.ndarray) -> torch.Tensor:
    """Return a state of torch's CPU generator with these words in its Mersenne twister, uint32 of shape (624,)."""
    state = _TORCH_STATE.clone()
    state.numpy()[_TORCH_WORDS].view(np.uint64)[:] = words
    return state


def fill_in_worker(worker: int, *, seed: int | None, rank: int) -> None:
    """Fill the generators in a worker of the data loader; this is its `worker_init_fn`."""
    fill_generators(seed, rank=rank, worker=worker + 1)


def next_numbers() -> tuple[float, float, float]:
    """Return the next number of each global generator, by which one can tell whether a number was drawn."""
    return random.random(), np.random.random(), torch.rand(()).item()


def states_of_generators() -> dict[str, Any]:
    """Return owner → state for the global generators."""
    kind, words, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": (kind, words.tobytes() if isinstance(words, np.ndarray) else words, *rest),
        "Python": random.getstate(),
    }
    if torch.accelerator.is_available():
        states["torch's device"] = torch.get_device_module().get_rng_state().numpy(force=True).tobytes()
    return states


@contextlib.contextmanager
def filled_generators(seed: int | None, *, rank: int = 0) -> Iterator[None]:
    """Fill the global generators inside the block, and restore their former states afterwards."""
    # A CUDA build reports an accelerator even on a machine without one.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if accelerator is None else accelerator.type):
            fill_generators(seed, rank=rank)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
