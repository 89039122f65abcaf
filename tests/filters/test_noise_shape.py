"""The shape of noise over time against linear algebra and SciPy."""

import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import scipy.special

from doppler_hf.filters import PAPER_FILTERS, NoiseShape, noise_gain
from doppler_hf.filters.noise_shape import WHITE
from tests.support.refusals import refused

SHAPES = [NoiseShape(), NoiseShape.banded(4), NoiseShape((1.0, 0.6, -0.2)), NoiseShape.banded(16)]


def matrix(shape, steps):
    column = np.zeros(steps)
    column[: min(steps, shape.bands)] = shape.c[:steps]
    return scipy.linalg.toeplitz(column, np.zeros(steps))


def test_the_series_is_that_of_the_inverse_square_root():
    series = scipy.special.binom(2 * np.arange(12), np.arange(12)) / 4.0 ** np.arange(12)
    np.testing.assert_allclose(NoiseShape.banded(12).c, series, rtol=1e-14)
    np.testing.assert_allclose(np.convolve(series, series)[:12], np.ones(12), rtol=1e-14)  # (1 - x)^(-1/2) squared
    assert NoiseShape.banded(300).bands == 300  # (600 choose 300) is no float


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_response_and_deviation_are_those_of_the_inverse_matrix(shape):
    inverse = np.linalg.inv(matrix(shape, 40))
    np.testing.assert_allclose(shape.response(40), inverse[:, 0], atol=1e-13)
    covariance = shape.norm**2 * inverse @ inverse.T
    np.testing.assert_allclose([shape.std(step) for step in range(40)], np.sqrt(np.diag(covariance)), rtol=1e-12)
    settled = shape.norm * np.linalg.norm(shape.response(20_000))
    assert shape.std(10**9) == pytest.approx(settled, rel=1e-12)


@pytest.mark.parametrize("root", [0.9, 0.9999, 0.999998])
def test_the_deviation_of_slow_noise_rises_for_as_long_as_its_root_says(root):
    shape, z = NoiseShape((1.0, -root)), 1 - root**2
    for step in (0, 200, 10_000, 300_000):
        expected = shape.norm * np.sqrt(-np.expm1(2 * (step + 1) * np.log(root)) / z)
        assert shape.std(step) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["none", "second-order", "f6"])
def test_noise_gain_is_the_energy_of_both_responses(shape, name):
    both = scipy.signal.lfilter(PAPER_FILTERS[name].b, PAPER_FILTERS[name].a, shape.response(20_000))
    assert noise_gain(PAPER_FILTERS[name], shape) == pytest.approx(shape.norm**2 * np.sum(both**2), rel=1e-12)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("white", "white"), ("banded:bands=1", "white"), (" banded : bands = 4", "banded:bands=4"),
        ("banded:c=1,0.5,0.375", "banded:bands=3"), ("banded:c=1,0.3", "banded:c=1.0,0.3"),
    ],
)  # fmt: skip
def test_names_are_read_and_written(text, name):
    assert str(NoiseShape.parse(text)) == name
    assert NoiseShape.parse(name) == NoiseShape.parse(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pink", "pink"), ("banded:bands=0", "0"), ("banded:c=1,1", "modulus 1"), ("banded:c=0.5,1", "0.5"),
        ("banded:c=1,nan", "nan"), ("banded:c=1,0", "0"),
    ],
)  # fmt: skip
def test_what_is_no_shape_is_refused(text, found):
    with refused("not-a-noise-shape", match=found):
        NoiseShape.parse(text)


@pytest.mark.parametrize(
    ("c", "code"),
    [
        ((1.0, 1.0), "noise-grows"),
        ((0.5, 1.0), "not-normalized"),
        ((1.0, np.nan), "not-finite"),
        ((1.0, 0.0), "ends-with-zero"),
    ],
)
def test_a_strategy_that_is_no_shape_is_refused_for_its_reason(c, code):
    with refused(code):
        NoiseShape(c)


def test_the_noise_of_the_average_of_all_gradients():
    assert WHITE.std_of_average(100) == pytest.approx(1 / 10)
    shape, noise = NoiseShape.parse("banded:bands=3"), np.random.default_rng(0).standard_normal((100, 20_000))
    shaped = shape.norm * scipy.signal.lfilter([1.0], shape.c, noise, axis=0)
    # The standard error of a deviation of 20,000 numbers is 0.5 %.
    assert shape.std_of_average(100) == pytest.approx(shaped.mean(axis=0).std(), rel=0.025)
