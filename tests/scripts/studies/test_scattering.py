"""The scattering transform against its definition in space."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve

from scripts.studies.scattering import PATHS, Scattering

SIDE = 16
REACH = 20


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 2, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def wavelet(scale: int, angle: float) -> np.ndarray:
    """A wave of 3/8 of the pixels' rate, or half of that, under a Gaussian twice as long as wide; its mean taken away."""
    rows, columns = np.mgrid[-REACH : REACH + 1, -REACH : REACH + 1]
    along = rows * math.cos(angle) + columns * math.sin(angle)
    beside = columns * math.cos(angle) - rows * math.sin(angle)
    bell = np.exp(-(along**2 + beside**2 / 4) / (2 * (0.8 * scale) ** 2))
    wave = bell * np.exp(1j * 3 * math.pi / 4 / scale * along)
    return (wave - bell * wave.sum() / bell.sum()) / (4 * math.pi * (0.8 * scale) ** 2)


def modulus(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    return np.hypot(convolve(image, kernel.real, mode="wrap"), convolve(image, kernel.imag, mode="wrap"))


def average(image: np.ndarray) -> np.ndarray:
    rows, columns = np.mgrid[-REACH : REACH + 1, -REACH : REACH + 1]
    bell = np.exp(-((rows + 1.5) ** 2 + (columns + 1.5) ** 2) / (2 * 1.6**2))  # convolve turns the kernel around
    return convolve(image, bell / bell.sum(), mode="wrap")[4:-4:4, 4:-4:4]


@pytest.mark.thorough
def test_coefficients_are_averages_of_moduli_of_wavelets(images):
    image = np.pad(images[0, 0].double().numpy(), 4, mode="reflect")
    angles = [(3 - index) * math.pi / 8 for index in range(8)]
    fine, coarse = ([modulus(image, wavelet(scale, angle)) for angle in angles] for scale in (1, 2))
    second = [modulus(each, wavelet(2, angle)) for each in fine for angle in angles]
    expected = np.stack([average(each) for each in (image, *fine, *coarse, *second)])
    found = Scattering(SIDE)(images)[0, :PATHS].double().numpy()
    assert found.shape == expected.shape == (81, 4, 4)
    np.testing.assert_allclose(found[:9], expected[:9], rtol=0, atol=1e-6)
    # The coarser wavelet is taken at every second pixel, where the ends of its band meet.
    for orders in (slice(9, 17), slice(17, 81)):
        error = np.linalg.norm(found[orders] - expected[orders]) / np.linalg.norm(expected[orders])
        assert 0 < error < 0.05


def test_coefficients_are_of_one_image_and_one_channel(images):
    scattering = Scattering(SIDE)
    together = scattering(images)
    assert together.shape == (3, 2 * PATHS, 4, 4)
    for row, image in zip(together, images, strict=True):
        torch.testing.assert_close(row, scattering(image[None])[0], rtol=0, atol=1e-6)
    swapped = scattering(images.flip(1))
    torch.testing.assert_close(swapped, together.unflatten(1, (2, PATHS)).flip(1).flatten(1, 2), rtol=0, atol=1e-6)
