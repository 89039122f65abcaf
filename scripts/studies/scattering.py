"""Wavelet scattering of images: features that nobody trained, and that a linear classifier tells apart under noise.

    S x = (x * φ,  |x * ψ_jθ| * φ,  ||x * ψ_0θ| * ψ_1θ'| * φ)    sampled in the middle of every four by four pixels

with Morlet wavelets ψ of two scales j and eight directions θ, and a Gaussian φ (Bruna & Mallat, *Invariant Scattering
Convolution Networks*, 2013). Features that are not learnt need no noisy weights. With privacy, small networks on these
coefficients do better than others from scratch (Tramèr & Boneh, *Differentially Private Learning Needs Better Features (or
Much More Data)*, 2021).

Sensitivity: the coefficients of an image are a fixed function of it alone, without statistics of the data, and so they are
features of the example as its pixels are.
"""

import math
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from doppler_hf.errors import Refusal

DIRECTIONS: Final = 8
STRIDE: Final = 4
PATHS: Final = 1 + 2 * DIRECTIONS + DIRECTIONS**2
"""Coefficients of a channel at a place."""
# Widths of the Gaussian envelopes and frequencies of the finer wavelet, in pixels; the coarser has twice and half of them.
_WIDTH: Final = 0.8
_FREQUENCY: Final = 3 * math.pi / 4
_PERIODS: Final = range(-2, 3)


class Scattering(nn.Module):
    """The scattering transform of square images, without parameters.

    Args:
        side: Of the images in pixels, a multiple of four.

    Raises:
        ValueError: If `side` is not a multiple of four, or below eight.
    """

    fine: Tensor
    coarse: Tensor
    low: Tensor
    low_of_half: Tensor

    def __init__(self, side: int) -> None:
        super().__init__()
        if side % STRIDE or side < 2 * STRIDE:
            sides = f"that is a multiple of {STRIDE} and at least {2 * STRIDE}"
            raise Refusal("wrong-shape", f"Images to scatter must have a side {sides}, got {side}. Resize them.")
        padded = side + 2 * STRIDE
        angles = [(DIRECTIONS // 2 - 1 - index) * math.pi / DIRECTIONS for index in range(DIRECTIONS)]
        for name, scale in (("fine", 1), ("coarse", 2)):
            wavelets = [_morlet(padded, _WIDTH * scale, _FREQUENCY / scale, angle) for angle in angles]
            self.register_buffer(name, torch.stack([_spectrum(wavelet) for wavelet in wavelets]))
        # A Gaussian is a product of one in each direction: a matrix on either side averages and samples at once.
        self.register_buffer("low", _averages(padded, 2 * _WIDTH, STRIDE))
        self.register_buffer("low_of_half", _averages(padded // 2, _WIDTH, STRIDE // 2))

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch coefficients small small"]:
        """Return the coefficients of each image, `PATHS` of a channel, with a quarter of the side."""
        images = F.pad(images, [STRIDE] * 4, mode="reflect")
        spectrum = torch.fft.fft2(images)[:, :, None]
        finer = torch.fft.ifft2(spectrum * self.fine).abs()
        coarser = _filtered_at_half(spectrum, self.coarse)
        paths = [_averaged(images[:, :, None], self.low), _averaged(finer, self.low), _averaged(coarser, self.low_of_half)]
        for each in torch.fft.fft2(finer).split(1, dim=2):
            paths.append(_averaged(_filtered_at_half(each, self.coarse), self.low_of_half))
        return torch.cat(paths, dim=2).flatten(1, 2)


def _filtered_at_half(spectrum: Tensor, wavelets: Tensor) -> Tensor:
    """Return moduli at every second pixel, which keeps a wavelet whose band is narrower than half of all frequencies."""
    product = spectrum * wavelets
    half = product.shape[-1] // 2
    # Sampling in space is folding in frequency.
    folded = product.unflatten(-1, (2, half)).unflatten(-3, (2, half)).mean(dim=(-4, -2))
    return torch.fft.ifft2(folded).abs()


def _averaged(values: Tensor, low: Tensor) -> Tensor:
    return low @ values @ low.T


def _averages(side: int, width: float, stride: int) -> Tensor:
    """Return a circular Gaussian average for every `stride` of `side` places, but for the first and last: the padding."""
    # In the middle of four pixels, of which each place has STRIDE / stride, so that a flipped image has flipped averages.
    places = np.arange(side) - (STRIDE - 1) / 2 * stride / STRIDE
    gaussian = sum(np.exp(-(((places + period * side) / width) ** 2) / 2) for period in _PERIODS)
    rows = [np.roll(gaussian / np.sum(gaussian), place) for place in range(0, side, stride)]
    return torch.tensor(np.stack(rows[1:-1]), dtype=torch.float32)


def _morlet(side: int, width: float, frequency: float, angle: float) -> np.ndarray:
    """Return a wave under an elongated Gaussian, of mean zero, on a torus."""
    envelope, wave = np.zeros((side, side)), np.zeros((side, side), dtype=complex)
    for down in _PERIODS:
        for across in _PERIODS:
            rows, columns = np.mgrid[down * side : (down + 1) * side, across * side : (across + 1) * side]
            along = rows * math.cos(angle) + columns * math.sin(angle)
            beside = columns * math.cos(angle) - rows * math.sin(angle)
            # Directions are told apart by an envelope that is longer along the wave's crests than across them.
            bell = np.exp(-(along**2 + (4 / DIRECTIONS * beside) ** 2) / (2 * width**2))
            envelope += bell
            wave += bell * np.exp(1j * frequency * along)
    area = 2 * math.pi * width**2 * DIRECTIONS / 4
    return (wave - wave.sum() / envelope.sum() * envelope) / area


def _spectrum(wavelet: np.ndarray) -> Tensor:
    # That of a Morlet wavelet is real: its real part is even and its imaginary part odd.
    return torch.tensor(np.fft.fft2(wavelet).real, dtype=torch.float32)
