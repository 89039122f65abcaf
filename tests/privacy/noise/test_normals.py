"""The noise is standard normal and never repeats. False-alarm rates are stated for each test."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from doppler_hf.privacy.noise import mechanism as module
from doppler_hf.privacy.noise.mechanism import Normals, box_muller, in_pieces
from doppler_hf.privacy.randomness import ReproducibleBits, SecretBits

PIECE = module._PIECE  # normals made at a time


def normals(count, stream=None, std=1.0, dtype=torch.float32, safe=False):
    drawn = Normals(count, std=std, stream=stream or SecretBits(), dtype=dtype, floating_point_safe=safe)
    values = torch.zeros(count, dtype=dtype)
    for (piece,) in in_pieces({"w": values}):
        piece.copy_(drawn.draw(len(piece), step=0))
    return values.double().numpy()


def words_of(*words):
    return torch.tensor([int(np.array(word, dtype=np.uint64).view(np.int64)) for word in words])


def transformed(*words, std=1.0):
    given = words_of(*words)
    out = torch.empty(len(given), dtype=torch.float64)
    box_muller(given, out, std=std)
    return out


@pytest.mark.parametrize("safe", [False, True])
def test_distribution_is_standard_normal(safe):
    values = normals(200_000, std=250.0, safe=safe) / 250.0
    # Kolmogorov–Smirnov at 1e-6, and Σz², which is χ², two-sided at 1e-6: four false alarms in a million runs, over both
    # and the fourth moment, whose standard deviation is √(96/n): six are exceeded once in 5e8 runs.
    assert scipy.stats.kstest(values, "norm").pvalue > 1e-6
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], len(values))
    assert low < np.sum(values**2) < high
    assert abs(np.mean(values**4) - 3) < 6 * np.sqrt(96 / len(values))


@pytest.mark.parametrize(("count", "safe"), [(0, False), (1, True), (7, False), (2 * PIECE + 1, False), (PIECE + 1, True)])
def test_any_size_gets_noise_everywhere(count, safe):
    values = normals(count, safe=safe)
    assert values.shape == (count,)
    assert np.all(values != 0.0)  # a float32 normal is 0 with a probability below 1e-15
    assert len(np.unique(values)) >= 0.99 * count  # nothing is used for two pieces


@pytest.mark.parametrize("safe", [False, True])
def test_coordinates_are_independent_of_their_neighbours(safe):
    # Box–Muller makes pairs (i, i + n/2) of a piece of n: neither they nor neighbours nor the same places of two pieces may
    # be correlated. The correlation of n pairs of independent normals has standard deviation 1/√n, and that of their
    # squares too; six of them are exceeded once in 5e8 runs.
    values = normals(6 * PIECE, safe=safe)
    pieces = values.reshape(6, 2, PIECE // 2)
    pairs = [(pieces[:, 0], pieces[:, 1]), (values[:-1], values[1:]), (values[:-PIECE], values[PIECE:])]
    for left, right in pairs:
        left, right = left.ravel(), right.ravel()
        assert abs(np.corrcoef(left, right)[0, 1]) < 6 / np.sqrt(len(left))
        assert abs(np.corrcoef(left**2, right**2)[0, 1]) < 6 / np.sqrt(len(left))
        assert abs(np.corrcoef(np.abs(left), right)[0, 1]) < 6 / np.sqrt(len(left))


def test_floating_point_safe_noise_is_half_the_sum_of_four():
    words = torch.empty(40, dtype=torch.int64)
    ReproducibleBits(0, purpose="noise").fill(words, step=0)
    terms = [transformed(*part.numpy().view(np.uint64)) for part in words.split(10)]
    values = normals(10, ReproducibleBits(0, purpose="noise"), std=3.0, dtype=torch.float64, safe=True)
    np.testing.assert_allclose(values, 3.0 * sum(terms).numpy() / 2, rtol=1e-12, atol=1e-14)


def test_noise_is_rounded_once_from_float64():
    """A float32 value is the float64 noise to the nearest; a product in float32 would have skipped some numbers."""
    exact, rounded = (
        normals(1000, ReproducibleBits(0, purpose="noise"), std=1.7, dtype=dtype) for dtype in (torch.float64, torch.float32)
    )
    assert np.array_equal(exact.astype(np.float32), rounded.astype(np.float32))
    assert not np.array_equal(exact, rounded)


def test_torch_and_numpy_seeds_do_not_matter():
    draws = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        draws.append(normals(100))
    assert not np.any(draws[0] == draws[1])
    assert module.noise_source(torch.device("cpu"), seed=0).startswith("reproducible from a seed: not private")


def test_the_transform_is_box_mullers():
    """Against sine and cosine in extended precision."""
    words = SecretBits().bits(20_000, step=0).view(np.int64)
    t = (words.astype(np.longdouble) + np.array([0.5] * 10_000 + [0.0] * 10_000)) * np.longdouble(2) ** -63
    radius, angle = 1.5 * np.sqrt(-2 * np.log(np.abs(t[:10_000]))), np.longdouble("3.14159265358979323846") * t[10_000:]
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).astype(float)
    out = torch.empty(20_000, dtype=torch.float64)
    box_muller(torch.from_numpy(words.copy()), out, std=1.5)
    # The logarithms and tangents of the usual libraries are within 4 units in the last place, and a dozen operations around
    # them round once each: less than 32 roundings of the largest radius that a word can give.
    largest = 1.5 * math.sqrt(2 * 64 * math.log(2))
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=32 * np.finfo(float).eps * largest)


# Words as t sees them: a signed integer in units of 2⁻⁶³.
ZERO, ONE, HALF, MINUS_ONE = 0, 2**63 - 1, 2**62, 2**63


def test_the_tail_reaches_beyond_nine_standard_deviations():
    largest = math.sqrt(2 * 64 * math.log(2))
    assert largest > 9.4
    # |t| is as small for the word 0 as for the word −1, and t′ = 0, 1, ½, −½ turn it to either end of either axis.
    for word in (0, 2**64 - 1):
        for turn, expected in [(ZERO, (1, 0)), (MINUS_ONE, (-1, 0)), (HALF, (0, 1)), (2**64 - HALF, (0, -1))]:
            np.testing.assert_allclose(transformed(word, turn), largest * np.array(expected), rtol=1e-12, atol=1e-14)
    # The next word is a third: no gap at the end, and the tail is as fine as the words are.
    assert transformed(1, 0)[0] == pytest.approx(math.sqrt(2 * (64 * math.log(2) - math.log(3))), rel=1e-12)


def test_the_smallest_radius_is_not_an_atom():
    """Near u = 1 the radius is √(2(1 − u)), for every float64 below 1; 24 bits would make it 0 for 2⁻²⁵ of all words."""
    for below in (2**11, 2**12, 2**20, 2**39, 2**40):
        for word in (2**63 - below, 2**63 + below - 1):  # t and −t
            radius = transformed(word, ZERO)[0].item()
            assert radius == pytest.approx(math.sqrt(2 * (below - 0.5) * 2.0**-63), rel=0.3 if below == 2**11 else 0.2)
            assert np.float32(radius) > 0
    assert 0 <= abs(transformed(ONE, ZERO)[0].item()) < 2e-8  # the last 2⁹ words: one in 2⁵⁴


def test_the_angle_is_as_fine_near_the_axes_as_a_float64_is():
    radius = transformed(2**62, ZERO)[0].item()
    for step in (1, 3, 2**20):
        sine = transformed(2**62, step)[1].item()
        assert sine == pytest.approx(radius * math.pi * step * 2.0**-63, rel=1e-12)
    for axis in (HALF, 2**64 - HALF):  # where the cosine is 0
        cosine = transformed(2**62, axis + 2**11)[0].item()
        assert 1e-16 < abs(cosine) / radius < 4e-15
