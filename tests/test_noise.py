"""The noise is standard normal, never repeats, and cannot be reproduced. False-alarm rates are stated for each test."""

import copy
import pickle

import numpy as np
import pytest
import scipy.stats
import torch

from doppler_hf.privacy.noise import ReproducibleBits, SecretBits, add_gaussian_noise, bit_stream, box_muller


def normals(count, stream=None, std=1.0, dtype=torch.float32):
    values = torch.zeros(count, dtype=dtype)
    add_gaussian_noise(values, std=std, stream=stream or SecretBits(), step=0)
    return values.double().numpy()


def test_distribution_is_standard_normal():
    # Kolmogorov–Smirnov at 1e-6: one false alarm in a million runs.
    assert scipy.stats.kstest(normals(200_000), "norm").pvalue > 1e-6


@pytest.mark.parametrize("count", [1, 2, 3, 7, (1 << 20) + 1])
def test_any_size_gets_noise_everywhere(count):
    values = normals(count)
    assert values.shape == (count,)
    assert np.all(values != 0.0)  # a float32 normal is 0 with a probability below 1e-38


def test_coordinates_are_independent_of_their_neighbours():
    # Box–Muller makes pairs (i, i + n/2): neither they nor neighbours may be correlated. The correlation of n pairs of
    # independent normals has standard deviation 1/√n; six of them are exceeded once in 5e8 runs.
    values = normals(200_000)
    half = len(values) // 2
    for left, right in ((values[:half], values[half:]), (values[:-1], values[1:])):
        assert abs(np.corrcoef(left, right)[0, 1]) < 6 / np.sqrt(len(left))
        assert abs(np.corrcoef(left**2, right**2)[0, 1]) < 6 / np.sqrt(len(left))


def test_two_calls_and_two_streams_never_repeat():
    stream = SecretBits()
    first, second = stream.bits(1000, step=0), stream.bits(1000, step=0)
    other = SecretBits().bits(1000, step=0)
    assert len(np.unique(np.concatenate([first, second, other]))) == 3000  # a repeat has probability 2.4e-13


def test_keystream_is_continuous_over_odd_sizes():
    # 8-byte words and 16-byte blocks: an odd count must not lose or repeat half a block.
    stream = SecretBits()
    words = np.concatenate([stream.bits(count, step=0).copy() for count in (1, 3, 2, 5, 1)])
    assert len(np.unique(words)) == 12
    assert np.all(words != 0)


def test_torch_and_numpy_seeds_do_not_matter():
    draws = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        draws.append(normals(100))
    assert not np.any(draws[0] == draws[1])


def test_secret_stream_cannot_be_copied_or_pickled():
    with pytest.raises(TypeError, match="secret key"):
        pickle.dumps(SecretBits())
    with pytest.raises(TypeError, match="secret key"):
        copy.deepcopy(SecretBits())


def test_reproducible_stream_depends_on_seed_purpose_rank_and_step():
    def bits(seed, purpose, rank, step):
        return tuple(ReproducibleBits(seed, purpose=purpose, rank=rank).bits(4, step=step))

    assert bits(0, "noise", 0, 3) == bits(0, "noise", 0, 3)
    variants = {bits(0, "noise", 0, 3), bits(1, "noise", 0, 3), bits(0, "sampling", 0, 3), bits(0, "noise", 1, 3)}
    assert len(variants | {bits(0, "noise", 0, 4)}) == 5


def test_only_an_unseeded_stream_is_secret():
    assert bit_stream(None, purpose="noise").is_secret
    assert not bit_stream(0, purpose="noise").is_secret


def test_box_muller_of_the_extreme_words_is_finite():
    words = np.array([0, 2**64 - 1, 0, 2**64 - 1], dtype=np.uint64)
    values = box_muller(words)
    assert torch.isfinite(values).all()
    assert values.abs().max() < 8.58
