"""Noise is prepared in a thread: every normal is used once, in one process, and a failure is never silent."""

import gc
import itertools
import os
import threading
import time
import weakref

import numpy as np
import pytest
import scipy.stats
import torch

from doppler_hf.privacy import GaussianMechanism
from doppler_hf.privacy.bits import BitStream, SecretBits
from doppler_hf.privacy.noise import ahead as module
from doppler_hf.privacy.noise.ahead import MAX_PREPARED, NoiseAhead

SIGMA, C, B = 1.3, 0.7, 50


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "noise-ahead"]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_full(ahead):
    wait_until(lambda: ahead.prepared >= ahead._wanted)


@pytest.fixture
def ahead():
    store = NoiseAhead(SecretBits, std=1.0, floating_point_safe=False)
    yield store
    store.close()


@pytest.fixture
def numbered(monkeypatch):
    """The prepared "normals" are 1, 2, 3, …: what is used twice, or left out, can be seen."""
    last = [0]

    def pieces(count, **others):
        for start in range(0, count, 1000):
            size = min(1000, count - start)
            yield torch.arange(last[0] + 1, last[0] + size + 1, dtype=torch.float64)
            last[0] += size

    monkeypatch.setattr(module, "gaussian_pieces", pieces)
    monkeypatch.setattr(module, "_BLOCK", 2500)


def taken(ahead, count, std=1.0):
    values = torch.zeros(count)
    done = ahead.add_to(values, std=std)
    assert torch.all(values[done:] == 0)
    return values[:done].tolist()


@pytest.mark.usefixtures("numbered")
def test_every_normal_is_used_once_whatever_is_taken(ahead):
    generator, used = np.random.default_rng(0), []
    for _ in range(60):
        need = int(generator.integers(1, 12_000))
        ahead.expect(6000, pinned=False)
        if generator.random() < 0.7:
            wait_until_full(ahead)
        for size in np.diff(np.sort(generator.integers(0, need + 1, size=4)), prepend=0, append=need).tolist():
            used += taken(ahead, size)
    assert len(used) > 50_000
    assert used == list(map(float, range(1, len(used) + 1)))


@pytest.mark.usefixtures("numbered")
def test_a_step_that_fails_loses_what_it_took(ahead):
    ahead.expect(6000, pinned=False)
    wait_until_full(ahead)
    assert taken(ahead, 10) == list(range(1, 11))
    leaf = torch.zeros(20, requires_grad=True)  # torch refuses to add to it in place
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        ahead.add_to(leaf, std=1.0)
    assert taken(ahead, 5, std=2.0) == list(range(62, 72, 2))


@pytest.mark.usefixtures("numbered")
@pytest.mark.parametrize(("most", "blocks"), [(MAX_PREPARED, 4), (4000, 2)])
def test_the_store_holds_a_step_and_no_more_than_a_block_beyond(ahead, monkeypatch, most, blocks):
    monkeypatch.setattr(module, "MAX_PREPARED", most)
    for _ in range(3):
        ahead.expect(9000, pinned=False)
        wait_until_full(ahead)
        time.sleep(0.02)
        assert blocks * 2500 <= ahead.prepared < (blocks + 1) * 2500
        assert taken(ahead, 9000)
    assert MAX_PREPARED * 4 == 512 * 2**20


def test_in_floating_point_safe_mode_four_are_added_and_nothing_rounded_is_multiplied():
    words = []

    class Counted(BitStream):
        is_secret = True

        def fill(self, out, *, step):
            words.append(len(out))
            SecretBits().fill(out, step=step)

    ahead = NoiseAhead(Counted, std=1.0, floating_point_safe=True)
    ahead.expect(1000, pinned=False)
    wait_until_full(ahead)
    assert words == [1000] * 4
    assert ahead.add_to(torch.zeros(10), std=1.0001) == 0
    assert ahead.add_to(torch.zeros(10), std=1.0) == 10
    ahead.close()


# --- the mechanism with it ------------------------------------------------------------------------------------------


def gaussian(**overrides):
    return GaussianMechanism(
        **(dict(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B, draw_ahead=True) | overrides)
    )


@pytest.mark.parametrize(("generator", "safe"), [("csprng", False), ("philox", True)])
def test_the_noise_is_the_mechanisms_whether_prepared_or_not(generator, safe):
    """Steps of several sizes, with and without time to prepare: Kolmogorov–Smirnov and correlations at 1e-6 each."""
    with gaussian(generator=generator, floating_point_safe=safe) as mechanism:
        noise = []
        for step, size in enumerate((50_000, 50_000, 30_000, 70_000, 50_000)):
            sums = {"a": torch.zeros(17), "w": torch.zeros(size - 17)}
            gradient = mechanism.privatize(sums, step=step)
            noise.append(torch.cat([gradient["a"], gradient["w"]]).double().numpy() / mechanism.noise_std(0))
            if step != 2:
                wait_until_full(mechanism._ahead)
    everything = np.concatenate(noise)
    assert scipy.stats.kstest(everything, "norm").pvalue > 1e-6
    assert len(np.unique(everything)) > 0.98 * len(everything)
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], len(everything))
    assert low < np.sum(everything**2) < high
    for left, right in itertools.pairwise(noise):
        size = min(len(left), len(right))
        assert abs(np.corrcoef(left[:size], right[:size])[0, 1]) < 5.5 / np.sqrt(size)  # 4e-8 each
    assert abs(np.corrcoef(everything[:-1], everything[1:])[0, 1]) < 5.5 / np.sqrt(len(everything))


@pytest.mark.parametrize("arguments", [dict(seed=0), dict(noise_multiplier=0.0), dict(draw_ahead=False)], ids=str)
def test_nothing_is_drawn_ahead_that_must_not_be(arguments):
    mechanism = gaussian(**arguments)
    mechanism.privatize({"w": torch.zeros(9)}, step=0)
    assert threads() == []
    mechanism.close()


def broken_pieces(count, **others):
    yield torch.ones(count, dtype=torch.float64)[: count // 2]
    raise MemoryError("in the middle of a block")


def test_a_failure_of_the_thread_surfaces_before_anything_is_released(monkeypatch):
    mechanism = gaussian()
    monkeypatch.setattr(module, "gaussian_pieces", broken_pieces)
    mechanism._ahead.expect(99, pinned=False)
    wait_until(lambda: not mechanism._ahead._thread.is_alive())
    for step in range(2):  # and it does not heal
        sums = {"w": torch.ones(99)}
        with pytest.raises(RuntimeError, match="prepares noise ahead has failed") as raised:
            mechanism.privatize(sums, step=step)
        assert isinstance(raised.value.__cause__, MemoryError)
        assert torch.equal(sums["w"], torch.ones(99))
    mechanism.close()


# --- processes and threads ------------------------------------------------------------------------------------------


def drawn_at(mechanism, *steps, size=5000):
    return torch.cat([mechanism.privatize({"w": torch.zeros(size)}, step=step)["w"] for step in steps]).numpy()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_noise_of_its_own():
    """Though the store is full when it is forked."""
    with gaussian() as mechanism:
        drawn_at(mechanism, 0)
        wait_until_full(mechanism._ahead)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # OpenMP's threads are not forked, and would be waited for
                first = drawn_at(mechanism, 1, 2)
                wait_until_full(mechanism._ahead)
                os.write(writer, np.concatenate([first, drawn_at(mechanism, 3)]).tobytes())
                mechanism.close()
                os._exit(0)
            finally:
                os._exit(1)
        ours = drawn_at(mechanism, 1, 2, 3)
        os.close(writer)
        with open(reader, "rb") as pipe:
            theirs = np.frombuffer(pipe.read(), dtype=np.float32)
        assert os.waitpid(child, 0)[1] == 0
    assert len(theirs) == len(ours)
    assert np.all(theirs != 0)
    # 15,000 float32 normals each, of which two independent sets share about 15,000²·2.8e-8 ≈ 6 by chance.
    assert len(np.intersect1d(ours, theirs)) < 60  # Poisson(6): below 1e-30


def test_close_and_the_end_of_a_with_statement_end_the_thread_and_may_be_repeated():
    with gaussian() as mechanism:
        assert threads() == []
        mechanism.privatize({"w": torch.zeros(100)}, step=0)
        assert len(threads()) == 1
    for _ in range(2):
        assert threads() == []
        assert mechanism.prepared == 0
        mechanism.close()
    assert torch.all(mechanism.privatize({"w": torch.zeros(100)}, step=1)["w"] != 0)  # drawn on the spot
    assert threads() == []
    never_began = gaussian()
    never_began.close()
    never_began.privatize({"w": torch.zeros(100)}, step=0)
    assert never_began._ahead._thread is None


def test_a_dropped_mechanism_ends_its_thread():
    mechanism = gaussian()
    mechanism.privatize({"w": torch.zeros(100)}, step=0)
    gone = weakref.ref(mechanism)
    del mechanism
    gc.collect()
    assert gone() is None
    wait_until(lambda: threads() == [])
