"""Secret words never repeat, in no call, stream or process; reproducible ones depend on what they say."""

import copy
import os
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from doppler_hf.privacy import random_words as module
from doppler_hf.privacy.random_words import ReproducibleBits, SecretBits, WordsByNumber, bit_stream


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
    with pytest.raises(TypeError, match="secret key"):
        pickle.dumps(SecretBits())
    with pytest.raises(TypeError, match="secret key"):
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


# --- words by number ------------------------------------------------------------------------------------------------------


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
