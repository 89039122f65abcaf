"""Secret words never repeat, in no call, stream or process; the global generators are filled with them, and come back."""

import copy
import os
import pickle
import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from doppler_hf.privacy import randomness as module
from doppler_hf.privacy.randomness import (
    ReproducibleBits,
    SecretBits,
    WordsByNumber,
    bit_stream,
    fill_generators,
    fill_in_worker,
    filled_generators,
    torch_state,
)


def test_two_calls_and_two_streams_never_repeat():
    stream = SecretBits()
    first, second = stream.bits(1000, step=0), stream.bits(1000, step=0)
    other = SecretBits().bits(1000, step=0)
    assert len(np.unique(np.concatenate([first, second, other]))) == 3000  # a repeat has probability 2.4e-13


def test_every_bit_of_the_words_is_a_coin():
    words = SecretBits().bits(100_000, step=0)
    ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.all(np.abs(ones - 0.5) < 6.5 * 0.5 / np.sqrt(len(words)))  # 8e-11 each, 64 times


def test_the_stream_is_aes_256_in_counter_mode_from_zero(monkeypatch):
    key = bytes(range(32))
    monkeypatch.setattr(module.os, "urandom", lambda size: key[:size])
    counts = (2, 1, 3, 32_768, 7, 100_001, 4)
    stream = SecretBits()
    words = np.concatenate([stream.bits(count, step=0) for count in counts])
    # Block by block with another mode of the library: E_k(0), E_k(1), …
    counters = b"".join(number.to_bytes(16, "big") for number in range((sum(counts) + 1) // 2))
    expected = Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(counters)
    assert words.tobytes() == expected[: 8 * sum(counts)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_words_of_its_own():
    stream = SecretBits()
    stream.bits(3, step=0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, stream.bits(100, step=0).tobytes())
        os._exit(0)
    ours = stream.bits(100, step=0)
    theirs = np.frombuffer(os.read(reader, 800), dtype=np.uint64)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert len(theirs) == 100
    assert len(np.unique(np.concatenate([ours, theirs]))) == 200


def test_secret_stream_cannot_be_copied_or_pickled():
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(SecretBits())
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(SecretBits())


def test_reproducible_stream_depends_on_seed_purpose_rank_and_step():
    def words(seed, purpose, rank, step):
        return tuple(ReproducibleBits(seed, purpose=purpose, rank=rank).bits(4, step=step))

    assert words(0, "noise", 0, 3) == words(0, "noise", 0, 3)
    variants = {words(0, "noise", 0, 3), words(1, "noise", 0, 3), words(0, "sampling", 0, 3), words(0, "noise", 1, 3)}
    assert len(variants | {words(0, "noise", 0, 4)}) == 5


def test_only_an_unseeded_stream_is_secret():
    assert bit_stream(None, purpose="noise").is_secret
    assert not bit_stream(0, purpose="noise").is_secret


def test_a_number_has_one_word_under_a_key_and_others_under_others():
    words, others = (WordsByNumber(SecretBits().bits(4, step=0).tobytes()) for _ in range(2))
    numbers = np.arange(100_000)
    found = words.of(numbers, series=0)
    assert np.array_equal(words.of(numbers[::-7], series=0), found[::-7])
    several = (found, words.of(numbers, series=1), others.of(numbers, series=0))
    assert len({word for each in several for word in each.tolist()}) == 300_000  # two are equal with probability 3e-9
    # Of each bit half are set: 64 counts beyond 6 deviations with probability 1e-7.
    ones = np.unpackbits(np.ascontiguousarray(found).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=0)
    assert np.all(np.abs(ones.astype(float) - 50_000) < 6 * np.sqrt(25_000))


def states():
    """Return the words of the three generators, shape (3, 623): of the first the twister uses a single bit."""
    return np.array(
        [
            torch.get_rng_state().numpy()[24 : 24 + 8 * 624].view(np.uint64),
            np.random.get_state()[1],
            random.getstate()[1][:624],
        ],
        dtype=np.uint64,
    )[:, 1:]


@pytest.fixture(autouse=True)
def kept():
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def test_torch_counts_on_from_the_words_as_the_twister_does():
    words = np.random.default_rng(0).integers(0, 2**32, 624, dtype=np.uint32)
    torch.set_rng_state(torch_state(words))
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    drawn = torch.randint(0, 2**20, (2000,))  # a power of two: the lowest bits of each word
    np.testing.assert_array_equal(drawn.numpy(), twister.random_raw(2000) % 2**20)


def test_no_word_is_the_same_in_two_generators_fills_or_after_one_seed():
    filled = []
    for fill in (fill_generators, fill_generators, lambda seed: fill_in_worker(0, seed=seed, rank=0)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        fill(None)
        filled.append(states())
    words = np.concatenate([state.ravel() for state in filled])
    # Of 5,607 words of 32 bits, 0.004 pairs are equal by chance; more than two have probability 1e-8.
    assert len(np.unique(words)) >= len(words) - 2
    assert words.max() < 2**32
    bits = np.unpackbits(words.astype(np.uint32).view(np.uint8)).mean()
    assert abs(bits - 0.5) < 6.5 * 0.5 / np.sqrt(32 * len(words))  # 8e-11


def test_a_seed_reproduces_and_every_rank_and_worker_has_its_own():
    def drawn(seed, rank, worker=0, step=0):
        fill_generators(seed, rank=rank, worker=worker, step=step)
        return torch.rand(1).item(), np.random.rand(), random.random()

    cases = [(1, 0), (2, 0), (1, 1), (1, 0, 1), (1, 0, 2), (1, 1, 1), (1, 0, 0, 1)]
    first = [drawn(*case) for case in cases]
    assert [drawn(*case) for case in cases] == first
    assert len({number for numbers in first for number in numbers}) == 3 * len(cases)


def test_no_normal_number_is_left_from_before():
    def drawn(before):
        np.random.seed(7)
        random.seed(7)
        for _ in range(before):
            np.random.normal(), random.gauss(0, 1), torch.randn(1)
        fill_generators(5)
        return np.random.normal(), random.gauss(0, 1), torch.randn(1).item()

    assert drawn(0) == drawn(1)


def test_the_callers_generators_come_back_even_after_an_error():
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)

    @filled_generators(None)
    def fail():
        torch.rand(5), np.random.rand(5), random.random()
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected


def test_a_build_for_cuda_works_without_a_device(monkeypatch):
    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    def no_driver():
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "current_device_index", no_driver)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    before = torch.get_rng_state()
    with filled_generators(None):
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)
