"""The private gradient is the mean of the clipped sum plus noise of σC/B, once, on the expected batch size."""

import copy
import pickle
import random
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
import torch
from torch.distributed.tensor import DTensor

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import GaussianMechanism
from doppler_hf.privacy.noise import mechanism as mechanism_module
from tests.support.refusals import refused

SIGMA, C, B, D = 1.3, 0.7, 50, 100_000


def gaussian(**overrides):
    return GaussianMechanism(**(dict(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B) | overrides))


def released(mechanism, steps=1):
    return [mechanism.privatize({"w": torch.zeros(D)}, step=step)["w"].double().numpy() for step in range(steps)]


def test_the_mean_is_over_the_expected_batch_size_in_the_memory_of_the_sum():
    sums = {"w": torch.full((2, 3), 10.0), "b": torch.ones(3)}
    gradient = gaussian(noise_multiplier=0.0).privatize(sums, step=0)
    torch.testing.assert_close(gradient["w"], torch.full((2, 3), 10.0 / B))
    torch.testing.assert_close(gradient["b"], torch.full((3,), 1.0 / B))
    assert all(gradient[name] is total for name, total in sums.items())  # no second copy of a large model's gradient


@pytest.mark.parametrize("seed", [None, 0])
def test_parameters_releases_of_a_step_and_seeds_never_share_their_noise(seed):
    mechanisms = gaussian(seed=seed), gaussian(seed=None if seed is None else seed + 1)
    noise = [each.privatize({"a": torch.zeros(9), "b": torch.zeros(9)}, step=0) for each in mechanisms for _ in range(2)]
    assert len(torch.cat([released[name] for released in noise for name in released]).unique()) == 72


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_sums_of_other_than_real_numbers_are_refused(dtype):
    sums = {"a": torch.zeros(3), "b": torch.zeros(3, dtype=dtype)}
    with refused("not-real", match=f"'b' .*{dtype}"):
        gaussian().privatize(sums, step=0)
    assert not any(total.any() for total in sums.values())


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (dict(noise_multiplier=-1.0), "noise_multiplier .*-1"),
        (dict(noise_multiplier=float("nan")), "nan"),
        (dict(max_grad_norm=0.0), "max_grad_norm, .*0"),
        (dict(expected_batch_size=0), "expected_batch_size .*0"),
    ],
)
def test_bad_arguments_are_refused(arguments, value):
    with refused("out-of-range", match=value):
        gaussian(**arguments)


def global_states():
    """What the Trainer saves of generators with every checkpoint."""
    kind, keys, position, *gauss = np.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), position, gauss)


def test_global_generators_are_neither_used_nor_moved():
    torch.manual_seed(1)
    torch.rand(1)  # so that filling it with any seed, or with its own, shows
    before = global_states()
    for is_safe in (False, True):
        released(gaussian(floating_point_safe=is_safe), steps=3)
    gaussian(seed=0)
    assert global_states() == before


def test_a_mechanism_cannot_be_copied_pickled_or_saved(tmp_path):
    for copied in (copy.deepcopy, pickle.dumps, lambda it: torch.save(it, tmp_path / "mechanism.pt")):
        with pytest.raises(TypeError, match="cannot pickle"):
            copied(gaussian())


class TwoProcesses:
    """`torch.distributed` for one process at a time, which notes what the process would send."""

    def __init__(self, rank, *, processes=2):
        self.rank, self.processes, self.sent, self.under_way = rank, processes, [], []

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.processes

    def all_reduce(self, tensor, async_op=False):
        self.sent.append(tensor.clone())
        assert async_op
        self.under_way.append(tensor)
        return self

    def wait(self):
        """End the reduction that began first, of a sum that nobody has touched meanwhile."""
        tensor = self.under_way.pop(0)
        assert torch.equal(tensor, self.sent[-1 - len(self.under_way)])


def put_between(processes, monkeypatch):
    """Have the mechanism talk to other processes that are not there."""
    monkeypatch.setattr(mechanism_module, "dist", processes)


def put_in_shards(rank, processes, monkeypatch):
    """Have rows of parameters on processes that are not there, and return what this one sends to add them up."""
    sent = []

    def rows_here(whole, *, like):
        rows = -(-len(whole) // processes)
        return whole[rows * rank : rows * (rank + 1)]

    def added_up(own, *, like):
        sent.append(own.clone())
        return rows_here(own, like=like)

    monkeypatch.setattr(mechanism_module, "rows_here", rows_here)
    monkeypatch.setattr(mechanism_module, "added_up", added_up)
    return sent


def of_shards(number, monkeypatch, *, steps=1, **options):
    """Return what each process releases of a parameter in shards, between two whole ones, and what it sends last."""
    found = []
    for rank in range(number):
        put_between(processes := TwoProcesses(rank, processes=number), monkeypatch)
        in_shards = put_in_shards(rank, number, monkeypatch)
        mechanism = gaussian(**options)
        for step in range(steps):
            sums = {"a": torch.ones(5).double(), "w": torch.ones(7, 3).double(), "b": torch.ones(4).double()}
            private = mechanism.privatize(sums, step=step, shards={"w": Mock(spec=DTensor)})
        assert not processes.under_way
        found.append((private, {"a": processes.sent[-2], "w": in_shards[-1], "b": processes.sent[-1]}))
    return found


@pytest.mark.parametrize(
    ("number", "options"),
    [(2, {"floating_point_safe": True}), (5, {"shape": NoiseShape.banded(3)})],  # of five the last has none of seven rows
    ids=str,
)
def test_reproducible_noise_is_the_same_in_shards(number, options, monkeypatch):
    steps = 1 if "shape" not in options else 4
    one = gaussian(seed=0, **options)
    for step in range(steps):
        sums = {"a": torch.ones(5).double(), "w": torch.ones(7, 3).double(), "b": torch.ones(4).double()}
        expected = one.privatize(sums, step=step)
    found = of_shards(number, monkeypatch, steps=steps, seed=0, **options)
    in_full = torch.cat([private["w"] for private, _ in found])
    torch.testing.assert_close(in_full, expected["w"], rtol=0, atol=1e-15)
    for name in ("a", "w", "b"):  # of which each has the noise of some coordinates, and sends all
        sent = torch.stack([of_process[name] for _, of_process in found])
        torch.testing.assert_close((sent - 1).sum(dim=0) / B, expected[name] - 1 / B, rtol=0, atol=1e-15)
        assert ((sent != 1).sum(dim=0) == 1).all()


def test_a_process_remembers_the_shaped_noise_of_its_coordinates_alone(monkeypatch):
    for rank, numel in enumerate((3, 2)):
        put_between(TwoProcesses(rank), monkeypatch)
        mechanism = gaussian(shape=NoiseShape.parse("banded:bands=3"))
        for step in range(3):
            mechanism.privatize({"w": torch.zeros(5)}, step=step)
        assert [past.shape for past in mechanism._rows.values()] == [(2, numel)]


def test_whoever_has_a_shard_adds_its_noise(monkeypatch):
    found = []
    for rank, numel in enumerate([3000, 3000, 2999]):
        put_between(processes := TwoProcesses(rank, processes=3), monkeypatch)
        in_shards = put_in_shards(rank, 3, monkeypatch)
        mechanism = gaussian()
        sums = {"w": torch.zeros(8999), "b": torch.zeros(51)}
        private = mechanism.privatize(sums, step=0, shards={"w": Mock(spec=DTensor)})
        (whole,) = processes.sent
        assert whole.nonzero().flatten().tolist() == [*range(17 * rank, 17 * rank + 17)]
        assert in_shards[0].nonzero().flatten().tolist() == [*range(3000 * rank, 3000 * rank + numel)]
        noise = private["w"].double().numpy() / mechanism.noise_std(0)
        low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], numel)
        assert low < np.sum(noise**2) < high
        found.append(noise)
    assert abs(np.corrcoef(found[0], found[1])[0, 1]) < 5.5 / np.sqrt(3000)
    assert len(np.unique(np.concatenate(found))) > 8990  # no process has drawn what another one has
