"""The global generators hold as many secret bits as they can, and the caller's come back."""

import random

import numpy as np
import pytest
import torch

from doppler_hf.privacy.generators import fill_generators, fill_in_worker, filled_generators, torch_state


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


def test_another_generator_in_the_place_of_numpys_is_refused():
    """It may keep a normal number from before, or less of a key."""
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(ValueError, match="must be its own, MT19937, in a private run, got PCG64"):
            fill_generators(None)
    finally:
        np.random.set_bit_generator(own)
    fill_generators(None)


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
