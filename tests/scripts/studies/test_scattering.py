"""The scattering transform is of one image and one channel."""

import pytest
import torch

from scripts.studies.scattering import PATHS, Scattering

SIDE = 16


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 2, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def test_coefficients_are_of_one_image_and_one_channel(images):
    scattering = Scattering(SIDE)
    together = scattering(images)
    assert together.shape == (3, 2 * PATHS, 4, 4)
    for row, image in zip(together, images, strict=True):
        torch.testing.assert_close(row, scattering(image[None])[0], rtol=0, atol=1e-6)
    swapped = scattering(images.flip(1))
    torch.testing.assert_close(swapped, together.unflatten(1, (2, PATHS)).flip(1).flatten(1, 2), rtol=0, atol=1e-6)
