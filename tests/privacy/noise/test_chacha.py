"""The release in one kernel: the words of ChaCha20, each used once, and their noise. Without a GPU it is interpreted."""

import os

import numpy as np
import pytest
import scipy.stats
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from doppler_hf import triton_support
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import GaussianMechanism
from doppler_hf.privacy.noise import chacha
from tests.support.tiers import thorough

KEY = bytes(range(32))
SIGMA, C, B = 1.3, 0.7, 50


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """Few of them, so that small tensors are several programs, each of which takes half a second to interpret."""
    monkeypatch.setattr(chacha, "LANES", 16)
    return 16


def keystream(blocks, key=KEY):
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(64 * blocks)), dtype="<u8").reshape(blocks, 8)


def normals_of(sizes, *, lanes, terms=1, key=KEY):
    """The noise of tensors of some sizes from `cryptography`'s ChaCha20, by the text-book's Box–Muller."""
    programs = [-(-size // (lanes * 8)) for size in sizes]
    words = keystream(sum(programs) * terms * lanes, key).reshape(sum(programs), terms, lanes, 4, 2)
    uniform = (words.astype(float) + 0.5) * 2.0**-64
    radius, angle = np.sqrt(-2 * np.log(uniform[..., 0])), 2 * np.pi * uniform[..., 1]
    drawn = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).sum(axis=1) / np.sqrt(terms)
    drawn = drawn.reshape(-1, lanes, 8).transpose(0, 2, 1).reshape(-1, lanes * 8)
    each = np.split(drawn, np.cumsum(programs)[:-1])
    return [part.ravel()[:size] for part, size in zip(each, sizes, strict=True)]


def test_the_reference_is_the_cipher_of_the_standard():
    """RFC 8439, appendix A.1, test vectors 1 and 2: a key and a nonce of zeros, blocks 0 and 1."""
    stream = keystream(2, key=bytes(32)).tobytes()
    assert stream[:16].hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert stream[64:80].hex() == "9f07e7be5551387a98ba977c732d080d"


@pytest.mark.parametrize(("dtype", "terms"), [(torch.float64, 1), (torch.float32, 4), *thorough((torch.float16, 1))])
def test_every_coordinate_gets_the_normal_of_its_own_words(monkeypatch, lanes, dtype, terms):
    """Tensors of one number, of whole programs and of one number more; and nothing beside them is written."""
    monkeypatch.setattr(os, "urandom", lambda count: KEY[:count])
    sizes = [1, 0, 8 * lanes, 8 * lanes + 1] if terms == 1 else [2, 0]
    memory = [torch.full((size + 2,), 3.0, dtype=dtype) for size in sizes]
    chacha.add_noise_and_scale([each[1:-1] for each in memory], std=2.0, scale=0.25, terms=terms)
    expected = normals_of([size for size in sizes if size], lanes=lanes, terms=terms)
    expected.insert(sizes.index(0), np.zeros(0))
    for each, noise in zip(memory, expected, strict=True):
        assert each[0] == each[-1] == 3.0
        # A dozen operations in float64, and one rounding to the dtype.
        exact = torch.from_numpy((3.0 + 2.0 * noise) / 4)
        bound = torch.finfo(dtype).eps / 2 * exact.abs() + 64 * torch.finfo(torch.float64).eps
        assert ((each[1:-1].double() - exact).abs() <= bound).all()


def test_noise_is_shaped_by_what_earlier_steps_left():
    """Against the recursion in float64, over more steps than it remembers; the memory is that of the tensors it was in."""
    shape, sizes = NoiseShape((1.0, 0.6, -0.2)), (100, 5)
    mechanism, whites = in_kernel(shape=shape), []
    drawn = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: whites[-1][:count])
        for step in range(4):
            whites.append(bytes([step]) * 32)
            sums = {str(size): torch.zeros(size, dtype=torch.float64) for size in sizes}
            for name, mean in mechanism.privatize(sums, step=step).items():
                drawn.setdefault(name, []).append(mean.numpy() * B)
    z = [normals_of(sizes, lanes=16, key=key) for key in whites]
    for index, size in enumerate(sizes):
        y = []
        for step in range(4):
            past = sum(c * y[step - k] for k, c in enumerate(shape.c) if 0 < k <= step)
            y.append(SIGMA * C * shape.norm * z[step][index] - past)
        np.testing.assert_allclose(drawn[str(size)], y, rtol=0, atol=1e-12)


def in_kernel(**options):
    """A mechanism that takes the way of an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "are_usable", lambda device: True)
        return GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B, **options)


def test_the_mechanism_releases_the_mean_and_noise_of_its_size(monkeypatch):
    monkeypatch.setattr(chacha, "LANES", 4096)
    mechanism = in_kernel()
    sums = {"w": torch.full((300, 200), 10.0), "b": torch.full((), 5.0, dtype=torch.float64)}
    released = mechanism.privatize(sums, step=0)
    assert all(released[name] is total for name, total in sums.items())
    noise = (released["w"].double().numpy().ravel() - 10.0 / B) / mechanism.noise_std(0)
    # Kolmogorov–Smirnov at 1e-6, Σz² two-sided at 1e-6, and correlations of neighbours and of the pairs of Box–Muller
    # beyond six of their standard deviations, at 2e-9 each.
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-6
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], len(noise))
    assert low < noise @ noise < high
    for apart in (1, 4096):
        for left, right in ((noise[apart:], noise[:-apart]), (noise[apart:] ** 2, noise[:-apart] ** 2)):
            assert abs(np.corrcoef(left, right)[0, 1]) < 6 / np.sqrt(len(left))
    assert abs(released["b"].item() - 5.0 / B) < 10 * mechanism.noise_std(0)
    assert mechanism.source.startswith("ChaCha20 keyed at every step by the operating system, Box-Muller")


def test_no_release_shares_its_key_with_another():
    """Nor do the dtypes of one release; and the noise of none comes twice."""
    keys, urandom, mechanism = [], os.urandom, in_kernel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: keys.append(urandom(count)) or keys[-1])
        found = []
        for step in range(2):
            sums = {"a": torch.zeros(70), "b": torch.zeros(70, dtype=torch.float64)}
            found += [mean.float() for mean in mechanism.privatize(sums, step=step).values()]
    assert len(set(keys)) == 4
    assert {len(key) for key in keys} == {32}
    assert len(torch.cat(found).unique()) == 4 * 70


def test_a_key_is_not_asked_for_more_blocks_than_its_counter_counts(monkeypatch):
    """With 2³² blocks, of eight normals each, the counter would begin again."""
    monkeypatch.setattr(chacha, "LANES", 1 << 31)
    values = [torch.zeros(3), torch.zeros(3)]
    monkeypatch.setattr(chacha, "_release", {(2,): lambda *args, **options: None, (3,): None})
    chacha.add_noise_and_scale(values, std=1.0, scale=1.0)
    with pytest.raises(AssertionError, match="too many coordinates for one key"):
        chacha.add_noise_and_scale([*values, torch.zeros(3)], std=1.0, scale=1.0)
