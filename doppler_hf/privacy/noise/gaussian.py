"""Gaussian noise that cannot be reproduced, from uniform words by the Box–Muller transform.

    z₁ = ρ·cos θ,   z₂ = ρ·sin θ,   ρ = √(−2 ln u),   u = |t|,   θ = πt′,   t, t′ uniform on [−1, 1],
    cos θ = 2/(1 + τ²) − 1,   sin θ = 2τ/(1 + τ²),   τ = tan(θ/2)

The words come from a cipher, since every step's gradient shows bare noise, such as that of an embedding row that no example
touched. On a CPU it is AES-256-CTR (`bits`), on an accelerator ChaCha20 in a kernel (`chacha`), or where Triton is missing
the noise comes from the CPU.

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
from typing import Final

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from doppler_hf import triton_support
from doppler_hf.privacy.randomness import BitStream

# Normals made at a time: enough to divide among torch's threads, in 4 MiB of working memory.
_PIECE: Final = 1 << 18
# The number of normals that `floating_point_safe` adds.
TERMS: Final = 4


def noise_source(device: torch.device, *, floating_point_safe: bool = False, seed: int | None = None) -> str:
    """Return the source of the noise for sums on a device in one line.

    Example:
        >>> noise_source(torch.device("cpu"))
        'AES-256-CTR keyed by the operating system, Box-Muller'
    """
    secret = "ChaCha20 keyed at every step" if seed is None and triton_support.are_usable(device) else "AES-256-CTR keyed"
    bits = f"{secret} by the operating system" if seed is None else "reproducible from a seed: not private"
    return f"{bits}, Box-Muller" + (", sum of four against floating-point attacks" if floating_point_safe else "")


def box_muller(words: Int64[Tensor, " n"], out: Float64[Tensor, " n"], *, std: float) -> None:
    """Turn an even number of uniform words into as many independent draws of 𝒩(0, std²) (both modified in place)."""
    half = len(words) // 2
    radius, tangent = out[:half], out[half:]
    radius[:] = words[:half]
    tangent[:] = words[half:]
    factor = words[:half].view(torch.float64)  # the words have been read, so that their memory is free
    # Half a unit beside an integer t is never 0. A float64 is finest at 0, where the logarithm needs it.
    radius.add_(0.5).mul_(2.0**-63).abs_().log_().mul_(-2.0 * std * std).sqrt_()
    tangent.mul_(math.pi / 2.0 * 2.0**-63).tan_()
    # With f = 2ρ/(1 + τ²): z₁ = f − ρ and z₂ = τf.
    torch.mul(tangent, tangent, out=factor)
    factor.mul_(0.5).add_(0.5)
    torch.div(radius, factor, out=factor)
    tangent.mul_(factor)
    torch.sub(factor, radius, out=radius)


def add_gaussian_noise(
    values: Float[Tensor, "..."], *, std: float, stream: BitStream, step: int, floating_point_safe: bool = False
) -> None:
    """Add independent 𝒩(0, std²) to every coordinate of contiguous `values` (modified in place), on any device.

    The noise is made on the CPU; with `floating_point_safe` each draw is the sum of four.
    """
    # Every coordinate gets its own draw, in their order, and no word of the stream is used twice.
    terms = TERMS if floating_point_safe else 1
    flat, most = values.view(-1), min(_PIECE, values.numel() + values.numel() % 2)
    words = torch.empty(most, dtype=torch.int64, device="cpu")
    drawn, rounded = torch.empty_like(words, dtype=torch.float64), torch.empty_like(words, dtype=flat.dtype)
    total = torch.empty_like(drawn) if floating_point_safe else drawn  # one pass less takes a seventh of the time
    for part in flat.split(_PIECE):
        even = len(part) + len(part) % 2
        if floating_point_safe:
            total.zero_()
        for _ in range(terms):
            stream.fill(words[:even], step=step)
            box_muller(words[:even], drawn[:even], std=std / math.sqrt(terms))
            if floating_point_safe:
                total[:even].add_(drawn[:even])
        # Rounded as a whole: torch adds two dtypes slowly, number by number.
        part.add_(rounded[: len(part)].copy_(total[: len(part)]).to(part.device))
