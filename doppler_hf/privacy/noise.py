"""Secret randomness: the bits behind the sampling, and Gaussian noise that nobody can reproduce.

A noise generator with a guessable seed is no noise: whoever guesses it subtracts it. torch's CPU generator keeps 32 bits
of its seed and HF's `args.seed` is public, so neither is used. Bits come from AES-256 in counter mode under a key from
the operating system; normals are made from them by the Box–Muller transform,

    z₁ = √(−2 ln u₁)·cos(2πu₂),   z₂ = √(−2 ln u₁)·sin(2πu₂),   u₁ ∈ (0, 1], u₂ ∈ [0, 1).
"""

import math
import os
from abc import ABC, abstractmethod

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from jaxtyping import Float
from torch import Tensor

# Words of keystream turned into normals at a time: bounds the working memory to a few tens of MiB.
_CHUNK = 1 << 20


class BitStream(ABC):
    """Where random bits come from.

    Attributes:
        is_secret: Whether nobody can reproduce them.
    """

    is_secret: bool

    @abstractmethod
    def bits(self, count: int, *, step: int) -> np.ndarray:
        """Return `count` uniform 64-bit words, shape (count,), dtype uint64, for optimizer step `step`."""


class SecretBits(BitStream):
    """A keystream of AES-256-CTR, keyed from the operating system when it is made.

    The key lives in this process alone: it is never pickled, saved or logged, and a resumed run makes a new one. What a
    step needs is a running position of the stream, so `step` is not used: no two calls ever return the same words.
    """

    is_secret = True

    def __init__(self) -> None:
        # One key, one counter from zero: 2¹²⁸ blocks, so the counter never wraps.
        self._encryptor = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def bits(self, count: int, *, step: int) -> np.ndarray:
        """Return the next `count` words of the stream."""
        buffer = np.zeros(count, dtype=np.uint64)
        keystream = np.empty(count * 8 + 15, dtype=np.uint8)  # AES may hold back up to one block
        self._encryptor.update_into(buffer.view(np.uint8).data, keystream.data)
        return keystream[: count * 8].view(np.uint64)

    def __reduce__(self) -> str:
        """Refuse to be pickled: the key would travel with the copy."""
        raise TypeError("SecretBits holds a secret key and cannot be pickled or copied; make a new one instead.")


class ReproducibleBits(BitStream):
    """Words that depend on `seed`, `purpose` and the step alone. For tests: such noise protects nobody."""

    is_secret = False

    def __init__(self, seed: int, *, purpose: str, rank: int = 0) -> None:
        self._entropy = (seed, rank, *purpose.encode())
        self._step: int | None = None

    def bits(self, count: int, *, step: int) -> np.ndarray:
        """Return the next `count` words of the step; another step begins its own sequence."""
        if step != self._step:
            self._step = step
            self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._entropy, step))))
        return self._generator.integers(0, 2**64, size=count, dtype=np.uint64)


def bit_stream(seed: int | None, *, purpose: str, rank: int = 0) -> BitStream:
    """Return a secret stream, or with a `seed` a reproducible one for tests."""
    return SecretBits() if seed is None else ReproducibleBits(seed, purpose=purpose, rank=rank)


def box_muller(bits: np.ndarray) -> Float[Tensor, " n"]:
    """Turn an even number of uniform 64-bit words into as many standard normals.

    In float64 with 53-bit uniforms the tail is cut at 8.57 standard deviations; with 24-bit ones it would be cut at 5.8,
    a difference in distribution larger than the δ of a large model.

    Args:
        bits: Uniform words, shape (n,), n even, dtype uint64.

    Returns:
        Normals of mean 0 and variance 1, shape (n,), dtype float64.
    """
    mantissas = torch.from_numpy((bits >> np.uint64(11)).astype(np.int64)).to(torch.float64)
    half = len(bits) // 2
    radius = mantissas[:half].add_(1.0).mul_(2.0**-53).log_().mul_(-2.0).sqrt_()
    angle = mantissas[half:].mul_(2.0 * math.pi * 2.0**-53)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])


def add_gaussian_noise(values: Float[Tensor, "..."], *, std: float, stream: BitStream, step: int) -> None:
    """Add independent 𝒩(0, std²) to every coordinate of `values` (modified in place).

    Args:
        values: What to privatize, contiguous, on any device.
        std: Standard deviation of the noise, in the units of `values`.
        stream: Where the bits come from.
        step: Optimizer step, counted from 0.
    """
    for chunk in values.view(-1).split(_CHUNK):
        size = chunk.numel()
        normals = box_muller(stream.bits(size + size % 2, step=step))[:size]
        chunk.add_(normals.mul_(std).to(chunk.device, chunk.dtype))
