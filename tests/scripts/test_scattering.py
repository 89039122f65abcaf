"""The scattering transform against its definition in space, and the classifier on it."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve
from torch.nn import functional as F

from doppler_hf.privacy import PrivacyLedger
from scripts.scattering.networks import (
    PATHS,
    Scattering,
    ScatteringConfig,
    ScatteringForImageClassification,
    flipped,
)
from scripts.scattering.train import ScatteringArguments, main
from tests.support.folders import write_mnist

SIDE = 16
REACH = 20
CONFIG = {"image_size": 8, "num_channels": 1, "num_labels": 3}


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


def test_coefficients_of_a_flipped_image_are_flipped(images):
    coefficients, expected = Scattering(SIDE)(images), Scattering(SIDE)(images.flip(-1))
    exact = torch.arange(PATHS).repeat(2) < 9  # the coarser wavelet is taken at every second pixel
    torch.testing.assert_close(flipped(coefficients)[:, exact], expected[:, exact], rtol=0, atol=1e-6)
    assert (flipped(coefficients) - expected).norm() < 0.02 * (coefficients - expected).norm()
    config = ScatteringConfig(image_size=SIDE, num_channels=2, num_filters=8, flip_invariant=True, num_labels=3)
    model = ScatteringForImageClassification(config).eval()
    logits, of_flipped = (model(coefficients=each).logits for each in (coefficients, flipped(coefficients)))
    torch.testing.assert_close(logits, of_flipped, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_filters", [0, 8])
def test_classifier_takes_images_or_their_coefficients_and_saves_itself(tmp_path, num_filters):
    model = ScatteringForImageClassification(ScatteringConfig(num_filters=num_filters, **CONFIG)).eval()
    model.save_pretrained(tmp_path)
    loaded = ScatteringForImageClassification.from_pretrained(tmp_path)
    pixels, labels = torch.rand(5, 1, 8, 8), torch.tensor([0, 1, 2, 1, 0])
    logits = model(pixel_values=pixels).logits
    assert logits.shape == (5, 3)
    again = loaded(coefficients=model.scattering(pixels), labels=labels)
    torch.testing.assert_close(again.logits, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.loss, F.cross_entropy(logits, labels), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"^Exactly one of pixel_values and coefficients must be given\. Leave"):
        model(labels=labels)


@pytest.mark.thorough
@pytest.mark.usefixtures("own_caches")
def test_a_recipe_trains_on_coefficients_and_knows_whose_they_are(tmp_path):
    folder, out = write_mnist(tmp_path / "images", train=12, test=4, writer=[*"aabbccddeeff"]), tmp_path / "out"
    flags = ["--image_size=8", "--num_filters=8", "--flip_invariant=true", "--noise_multiplier=1", "--use_cpu"]
    flags += [
        "--privacy_unit_column=writer",
        "--max_examples_per_unit=1",
        "--per_device_train_batch_size=3",
        "--max_steps=1",
    ]
    main([f"--dataset_dir={folder}", f"--output_dir={out}", "--report_to=none", *flags])
    assert PrivacyLedger.load(out).statement.num_units == 6
    assert 0 <= json.loads((out / "all_results.json").read_text())["eval_accuracy"] <= 1
    assert ScatteringForImageClassification.from_pretrained(out).config.flip_invariant


def test_a_folder_leaves_the_name_of_a_data_set_without_effect():
    with pytest.raises(ValueError, match="dataset_name='mnist' has no effect with dataset_dir='here'"):
        ScatteringArguments(dataset_name="mnist", dataset_dir="here")
