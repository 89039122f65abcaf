"""Gaussian noise that cannot be reproduced, from uniform words by the Box–Muller transform.

    z₁ = ρ·cos θ,   z₂ = ρ·sin θ,   ρ = √(−2 ln u),   u = |t|,   θ = πt′,   t, t′ uniform on [−1, 1],
    cos θ = 2/(1 + τ²) − 1,   sin θ = 2τ/(1 + τ²),   τ = tan(θ/2)

"csprng" (AES-256-CTR) protects against every attacker, even one who reads every step's gradient. That gradient shows bare
noise, such as an embedding row that no example touched. "philox" protects against attackers who see the last model only: a
sum over all steps, which reveals no word of the generator. An attacker who sees single steps would have to break Philox,
which was not built to withstand that.

The transform is computed in float64 with a 64-bit word for each t. The smallest u is 2⁻⁶⁴, so the tail reaches 9.4 standard
deviations, beyond which a normal lies once in 10²⁰ draws. u is 1, and both are 0, with a probability of 2⁻⁵⁴; cos θ or sin θ
is 0 with one below 2⁻⁵². With 24-bit uniforms the tail would end at 5.8, and one pair in 2²⁵ would get no noise. In a large
model these are several coordinates at every step, and its δ allows none. Only the finished noise is rounded, to the values'
dtype, which keeps every number of that dtype possible.

`floating_point_safe` adds four independent normals and halves the sum. The set of floating-point numbers that a single
transform can return reveals something about the value to which noise was added (Mironov 2012). For a sum of four that set
cannot feasibly be computed (Holohan and Braghin, https://arxiv.org/abs/2107.10138, section 5.1).
"""

import math
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from doppler_hf.privacy.bits import BitStream, RekeyedBits, ReproducibleBits, SecretBits

NoiseGenerator = Literal["csprng", "philox"]
_GENERATORS: Final[Mapping[NoiseGenerator, tuple[type[BitStream], str]]] = {
    "csprng": (SecretBits, "AES-256-CTR keyed by the operating system"),
    "philox": (RekeyedBits, "Philox keyed anew by the operating system at every step"),
}

# Normals made at a time: enough to divide among torch's threads, and on a GPU among many more; working memory 4 and 16 MiB.
_PIECE: Final = 1 << 18
_PIECE_ON_GPU: Final = 1 << 20
# In one thread the working memory stays in its core's cache (0.5 MiB). Up to 32,768 numbers torch copies and adds in one
# thread.
_PIECE_OF_ONE_THREAD: Final = 1 << 15
# The number of normals that `floating_point_safe` adds.
_TERMS: Final = 4


def noise_stream(generator: NoiseGenerator, *, seed: int | None = None) -> BitStream:
    """Return a stream of words for noise: new ones at every call, or for tests with a `seed` reproducible ones."""
    return _GENERATORS[generator][0]() if seed is None else ReproducibleBits(seed, purpose="noise")


def noise_source(generator: NoiseGenerator, *, floating_point_safe: bool = False, seed: int | None = None) -> str:
    """Return the source of the noise in one line, with the options of `noise_stream`.

    Raises:
        ValueError: If `generator` is unknown.

    Example:
        >>> noise_source("csprng")
        'AES-256-CTR keyed by the operating system, Box-Muller'
    """
    if generator not in _GENERATORS:
        raise ValueError(f"generator must be one of {', '.join(_GENERATORS)}, got {generator!r}.")
    bits = _GENERATORS[generator][1] if seed is None else "reproducible from a seed: not private"
    return f"{bits}, Box-Muller" + (", sum of four against floating-point attacks" if floating_point_safe else "")


def box_muller(words: Any, out: Any, *, std: float, library: ModuleType) -> None:
    """Turn an even number of uniform words into as many independent draws of 𝒩(0, std²).

    Args:
        words: Uniform int64 words, shape (n,), n even: an array of NumPy or a tensor (modified in place: overwritten).
        std: Standard deviation.
        out: The draws in float64, of the same kind and shape (modified in place).
        library: NumPy or torch, whose functions compute them.
    """
    half = len(words) // 2
    radius, tangent = out[:half], out[half:]
    radius[:] = words[:half]
    tangent[:] = words[half:]
    factor = words[:half].view(library.float64)  # the words have been read, so that their memory is free
    # Half a unit beside an integer t is never 0. A float64 is finest at 0, where the logarithm needs it.
    library.add(radius, 0.5, out=radius)
    library.multiply(radius, 2.0**-63, out=radius)
    library.abs(radius, out=radius)
    library.log(radius, out=radius)
    library.multiply(radius, -2.0 * std * std, out=radius)
    library.sqrt(radius, out=radius)
    library.multiply(tangent, math.pi / 2.0 * 2.0**-63, out=tangent)
    library.tan(tangent, out=tangent)
    # With f = 2ρ/(1 + τ²): z₁ = f − ρ and z₂ = τf.
    library.multiply(tangent, tangent, out=factor)
    library.multiply(factor, 0.5, out=factor)
    library.add(factor, 0.5, out=factor)
    library.divide(radius, factor, out=factor)
    library.multiply(tangent, factor, out=tangent)
    library.subtract(factor, radius, out=radius)


def gaussian_pieces(
    count: int,
    *,
    std: float,
    stream: BitStream,
    step: int,
    device: torch.device,
    floating_point_safe: bool,
    one_thread: bool = False,
) -> Iterator[Float64[Tensor, " n"]]:
    """Yield `count` independent draws of 𝒩(0, std²) in pieces, each in the memory of the one before.

    Args:
        count: The number of draws, over all pieces.
        std: Standard deviation.
        stream: The source of the words.
        step: Optimizer step, counted from 0.
        device: The device that computes them, the CPU or a CUDA device.
        floating_point_safe: Whether each is the sum of four.
        one_thread: Whether to compute without torch's threads, as a background thread must. On the CPU only.
    """
    piece = _PIECE_OF_ONE_THREAD if one_thread else _piece_on(device)
    words = torch.empty(min(piece, count + count % 2), dtype=torch.int64, device=device)
    out = torch.empty_like(words, dtype=torch.float64)
    terms, total = (_TERMS, torch.empty_like(out)) if floating_point_safe else (1, out)
    # torch's logarithm and tangent run in all of its threads from 128 numbers on; NumPy's are as fast in one.
    given, made, library = (words.numpy(), out.numpy(), np) if one_thread else (words, out, torch)
    for start in range(0, count, piece):
        size = min(piece, count - start)
        even = size + size % 2
        if floating_point_safe:
            total.zero_()
        for _ in range(terms):
            stream.fill(words[:even], step=step)
            box_muller(given[:even], made[:even], std=std / math.sqrt(terms), library=library)
            if floating_point_safe:
                total[:even].add_(out[:even])
        yield total[:size]


def _piece_on(device: torch.device) -> int:
    return _PIECE if device.type == "cpu" else _PIECE_ON_GPU


def add_gaussian_noise(
    values: Float[Tensor, "..."], *, std: float, stream: BitStream, step: int, floating_point_safe: bool = False
) -> None:
    """Add independent 𝒩(0, std²) to every coordinate of `values` (modified in place).

    Args:
        values: The values to privatize, contiguous, on any device. On a CUDA device the noise is made there.
        std: Standard deviation of the noise, in the units of `values`.
        stream: The source of the words.
        step: Optimizer step, counted from 0.
        floating_point_safe: Whether each draw is the sum of four.
    """
    # Every coordinate gets its own draw: the pieces have as many numbers as there are coordinates, in their order, and no
    # word of the stream is used twice.
    flat, position = values.view(-1), 0
    device = flat.device if flat.is_cuda else torch.device("cpu")
    rounded = torch.empty(min(_piece_on(device), len(flat)), dtype=flat.dtype, device=device)
    for noise in gaussian_pieces(
        len(flat), std=std, stream=stream, step=step, device=device, floating_point_safe=floating_point_safe
    ):
        part = flat[position : position + len(noise)]
        # Rounded as a whole: torch adds two dtypes slowly, number by number.
        part.add_(rounded[: len(noise)].copy_(noise).to(flat.device))
        position += len(noise)
    assert position == len(flat)
