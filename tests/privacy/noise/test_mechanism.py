"""The private gradient is the mean of the clipped sum plus noise of σC/B, once, on the expected batch size."""

import copy
import math
import os
import pickle
import random

import numpy as np
import pytest
import scipy.stats
import torch

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import GaussianMechanism, bits
from doppler_hf.privacy.bits import RekeyedBits, SecretBits
from doppler_hf.privacy.noise import mechanism as mechanism_module
from doppler_hf.privacy.noise import subspace_noise
from doppler_hf.shards import Place

SIGMA, C, B, D = 1.3, 0.7, 50, 100_000


def released(mechanism, steps=1):
    return [mechanism.privatize({"w": torch.zeros(D)}, step=step)["w"].double().numpy() for step in range(steps)]


def test_noise_has_standard_deviation_sigma_c_over_b():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    (noise,) = released(mechanism)
    assert mechanism.noise_std(0) == pytest.approx(SIGMA * C / B)
    # Σz² of d standard normals is χ² with d degrees of freedom; two-sided at 1e-6 per run.
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], D)
    assert low < np.sum((noise / mechanism.noise_std(0)) ** 2) < high
    assert abs(noise.mean()) < 5 * mechanism.noise_std(0) / np.sqrt(D)  # 6e-7


def test_noise_is_not_correlated_between_steps():
    first, second, third = released(
        GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B), steps=3
    )
    for left, right in ((first, second), (second, third), (first, third)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5.5 / np.sqrt(D)  # 4e-8 each


def test_mean_is_over_the_expected_batch_size():
    mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=B)
    sums = {"w": torch.full((2, 3), 10.0), "b": torch.ones(3)}
    gradient = mechanism.privatize(sums, step=0)
    torch.testing.assert_close(gradient["w"], torch.full((2, 3), 10.0 / B))
    torch.testing.assert_close(gradient["b"], torch.full((3,), 1.0 / B))


def test_sums_become_the_gradient_in_their_own_memory():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    sums = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    gradient = mechanism.privatize(sums, step=0)
    assert all(gradient[name] is total for name, total in sums.items())  # no second copy of a large model's gradient


@pytest.mark.parametrize("seed", [None, 0])
def test_parameters_of_a_step_never_share_their_noise(seed):
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B, seed=seed)
    noise = mechanism.privatize({"a": torch.zeros(9), "b": torch.zeros(9)}, step=0)
    assert not torch.any(noise["a"] == noise["b"])


def test_an_empty_draw_is_released_as_pure_noise():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    assert np.all(released(mechanism)[0] != 0.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
@pytest.mark.parametrize("draw_ahead", [False, True])
def test_sums_of_other_than_real_numbers_are_refused(dtype, draw_ahead):
    sums = {"a": torch.zeros(3), "b": torch.zeros(3, dtype=dtype)}
    with (
        GaussianMechanism(
            noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1, draw_ahead=draw_ahead
        ) as mechanism,
        pytest.raises(ValueError, match=f"floating-point numbers, got 'b' of type {dtype}"),
    ):
        mechanism.privatize(sums, step=0)
    assert not any(total.any() for total in sums.values())


def test_same_step_twice_gets_fresh_noise():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    first, second = (mechanism.privatize({"w": torch.zeros(9)}, step=0)["w"] for _ in range(2))
    assert not torch.any(first == second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(noise_multiplier=-1.0), "noise_multiplier must be a finite number ≥ 0, got -1"),
        (dict(noise_multiplier=float("nan")), "got nan"),
        (dict(max_grad_norm=0.0), "max_grad_norm must be a finite number > 0, got 0"),
        (dict(expected_batch_size=0), "expected_batch_size must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GaussianMechanism(**(dict(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1) | arguments))


@pytest.mark.parametrize("generator", ["csprng", "philox"])
@pytest.mark.parametrize("safe", [False, True])
def test_every_way_to_draw_has_the_same_distribution(generator, safe):
    mechanism = gaussian(generator=generator, floating_point_safe=safe)
    noise = np.concatenate(released(mechanism, steps=2)) / mechanism.noise_std(0)
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-6  # Kolmogorov–Smirnov at 1e-6
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], len(noise))  # two-sided at 1e-6
    assert low < np.sum(noise**2) < high


def noted_fills(stream, monkeypatch):
    """How many words are drawn from a stream at a time."""
    drawn, fill = [], stream.fill
    monkeypatch.setattr(stream, "fill", lambda words, *, step: drawn.append(len(words)) or fill(words, step=step))
    return drawn


@pytest.mark.parametrize(("safe", "times"), [(False, 1), (True, 4)])
def test_floating_point_safe_noise_takes_four_times_the_words(safe, times, monkeypatch):
    mechanism = gaussian(floating_point_safe=safe)
    drawn = noted_fills(mechanism._stream, monkeypatch)
    mechanism.privatize({"w": torch.zeros(3, 4)}, step=0)
    assert drawn == [12] * times


@pytest.mark.parametrize(("generator", "kind"), [("csprng", SecretBits), ("philox", RekeyedBits)])
def test_the_generator_is_the_one_that_is_asked_for(generator, kind):
    assert type(gaussian(generator=generator)._stream) is kind
    with gaussian(generator=generator, draw_ahead=True) as mechanism:
        assert type(mechanism._ahead._make_stream()) is kind


def test_an_unknown_generator_is_refused():
    with pytest.raises(ValueError, match="must be one of csprng, philox, got 'mt19937'"):
        gaussian(generator="mt19937")


# --- what is secret -------------------------------------------------------------------------------------------------


def global_states():
    """What the Trainer saves of generators with every checkpoint."""
    kind, keys, position, *gauss = np.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), position, gauss)


@pytest.mark.parametrize("generator", ["csprng", "philox"])
@pytest.mark.parametrize("draw_ahead", [False, True])
def test_global_generators_are_neither_used_nor_moved(generator, draw_ahead):
    before = global_states()
    with gaussian(generator=generator, draw_ahead=draw_ahead) as mechanism:
        released(mechanism, steps=3)
        gaussian(generator=generator, seed=0)
    assert global_states() == before


@pytest.mark.parametrize("arguments", [dict(), dict(generator="philox"), dict(draw_ahead=True), dict(seed=0)], ids=str)
def test_a_mechanism_cannot_be_copied_pickled_or_saved(arguments, tmp_path):
    with gaussian(**arguments) as mechanism:
        released(mechanism)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda it: torch.save(it, tmp_path / "mechanism.pt")):
            with pytest.raises(TypeError, match="secret noise and cannot be pickled or copied"):
                copied(mechanism)


def reachable(thing, seen):
    """Everything that can be reached by attributes, items and elements."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    inside = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
    if isinstance(thing, dict):
        inside += [*thing, *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        inside += [*thing]
    for part in inside:
        reachable(part, seen)


@pytest.mark.parametrize("generator", ["csprng", "philox"])
@pytest.mark.parametrize("draw_ahead", [False, True])
def test_no_key_can_be_read_off_the_mechanism(generator, draw_ahead, monkeypatch):
    keys, urandom = [], os.urandom
    monkeypatch.setattr(bits.os, "urandom", lambda size: keys.append(urandom(size)) or keys[-1])
    with gaussian(generator=generator, draw_ahead=draw_ahead) as mechanism:
        released(mechanism, steps=2)
        seen = {}
        reachable(vars(mechanism), seen)
    keys = [key for key in keys if len(key) in (16, 32)]
    assert keys
    for thing in seen.values():
        text = bytes(thing) if isinstance(thing, (bytes, bytearray, memoryview, np.ndarray)) else repr(thing).encode()
        assert not any(key in text or str(int.from_bytes(key, "little")).encode() in text for key in keys)
        assert not isinstance(thing, (np.random.Philox, np.random.Generator, torch.Generator))


# --- in a subspace --------------------------------------------------------------------------------------------------

SHORT, LONG, RANK = 8, 20_000, 4
WIDE, TALL = (SHORT, LONG), (LONG, SHORT)


def gaussian(**overrides):
    return GaussianMechanism(**(dict(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B) | overrides))


def orthonormal(short=SHORT, rank=RANK, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(short, rank, generator=generator, dtype=torch.float64))[0].to(dtype)


def coordinates(gradient, basis):
    """What the optimizer reads, shape (rank, long) in float64: Pᵀ·G, or (G·P)ᵀ for more rows than columns."""
    gradient = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
    return (basis.double().T @ gradient.double()).numpy()


@pytest.mark.parametrize("way", ["subspace", "whole"])
@pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
def test_noise_in_a_subspace_is_distributed_as_the_whole_noise_projected(shape, way):
    """Both ways are held against 𝒩(0, (σC/B)²·I) in the subspace: the same distribution, whatever the way."""
    mechanism, basis = gaussian(), orthonormal()
    subspaces = {"w": basis} if way == "subspace" else {}
    gradient = mechanism.privatize({"w": torch.zeros(shape)}, step=0, subspaces=subspaces)["w"]
    noise = coordinates(gradient, basis) / mechanism.noise_std(0)
    # Σz² is χ², over all coordinates and over each of the subspace's axes: two-sided at 1e-6, 5 times.
    for values in (noise, *noise):
        low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], values.size)
        assert low < np.sum(values**2) < high
    # No axis is correlated with another, nor with its neighbour along the long side: 4e-8 each, 10 times.
    pairs = [(noise[i], noise[j]) for i in range(RANK) for j in range(i)] + [(row[:-1], row[1:]) for row in noise]
    assert all(abs(np.corrcoef(left, right)[0, 1]) < 5.5 / np.sqrt(len(left)) for left, right in pairs)
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-6  # Kolmogorov–Smirnov at 1e-6


def test_noise_in_a_subspace_is_not_correlated_between_steps():
    mechanism, basis = gaussian(), orthonormal()
    first, second, again = (
        coordinates(mechanism.privatize({"w": torch.zeros(WIDE)}, step=step, subspaces={"w": basis})["w"], basis).ravel()
        for step in (0, 1, 1)
    )
    for left, right in ((first, second), (second, again), (first, again)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5.5 / np.sqrt(RANK * LONG)  # 4e-8 each


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6), (1, 5)], ids=str)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_the_gradient_lies_in_the_subspace_and_in_the_sums_memory(shape, dtype, atol):
    total = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    basis = orthonormal(min(shape), min(3, *shape), dtype=dtype)
    projector = (basis.double() @ basis.double().T).to(dtype)
    expected = (projector @ total if shape[0] <= shape[1] else total @ projector) / B
    without, within = total.clone(), total.clone()
    sums = {"w": without, "b": torch.ones(3)}
    gradient = gaussian(noise_multiplier=0.0).privatize(sums, step=0, subspaces={"w": basis})
    assert gradient["w"] is without
    torch.testing.assert_close(without, expected, atol=atol, rtol=0.0)
    torch.testing.assert_close(gradient["b"], torch.full((3,), 1.0 / B))  # the others as ever
    noisy = gaussian().privatize({"w": within}, step=0, subspaces={"w": basis})["w"]
    again = projector @ noisy if shape[0] <= shape[1] else noisy @ projector
    torch.testing.assert_close(again, noisy, atol=atol, rtol=0.0)
    assert not torch.allclose(noisy, expected, atol=1e-3)  # there is noise in it


@pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
def test_a_subspace_draws_noise_for_its_own_coordinates_only(shape, monkeypatch):
    mechanism = gaussian()
    drawn = noted_fills(mechanism._stream, monkeypatch)
    sums = {"other": torch.zeros(3, 4), "w": torch.zeros(shape)}
    mechanism.privatize(sums, step=0, subspaces={"w": orthonormal()})
    assert drawn == [12, RANK * LONG]


def stretched(factor, dtype=torch.float64):
    """A P whose first column is `factor` too long, and ‖PᵀP − I‖_F."""
    basis = orthonormal(dtype=dtype)
    basis[:, 0] *= factor
    return basis, factor**2 - 1


@pytest.mark.parametrize("factor", [1 + 5e-5, 1 + 4e-4, 1 - 5e-5], ids=str)
@pytest.mark.parametrize("shape", [(SHORT, 100), (100, SHORT)], ids=["wide", "tall"])
def test_a_subspace_that_is_not_quite_orthonormal_gets_more_noise(shape, factor):
    """As much as P can lengthen one example's gradient: the same seed has the same normals, so the ratio is exact."""

    def noise(basis):
        sums = {"w": torch.zeros(shape, dtype=torch.float64)}
        gradient = gaussian(seed=0).privatize(sums, step=0, subspaces={"w": basis})["w"]
        return np.linalg.pinv(basis.numpy()) @ (gradient if shape[0] <= shape[1] else gradient.T).numpy()

    basis, error = stretched(factor)
    exact, more = noise(orthonormal(dtype=torch.float64)), noise(basis)
    np.testing.assert_allclose(more, exact * math.sqrt(1 + abs(error)), rtol=1e-9, atol=0)
    longest = torch.linalg.matrix_norm(basis, ord=2).item()
    assert np.sum(more**2) >= longest**2 * np.sum(exact**2) * (1 - 1e-12)


def test_orthonormality_is_measured_on_the_matrix_that_multiplies():
    """A float64 P is rounded to the sum's float32 first: that is the one whose columns may be too long."""
    basis = orthonormal(dtype=torch.float64)
    rounded = subspace_noise.bases_of({"w": basis}, {"w": torch.zeros(WIDE)})["w"]
    assert rounded.dtype == torch.float32
    error = torch.linalg.matrix_norm(rounded.double().T @ rounded.double() - torch.eye(RANK, dtype=torch.float64))
    (stretch,) = subspace_noise.stretches_of({"w": rounded}, distributed=False).values()
    assert stretch == pytest.approx(math.sqrt(1 + error), abs=1e-15)
    assert stretch > 1 + 1e-9


NOT_A_SUBSPACE = [
    (lambda: {"w": 2 * orthonormal()}, r"The subspace of 'w' is not orthonormal: ‖PᵀP − I‖_F is 6, more than 0.001"),
    (lambda: {"w": stretched(1.001, torch.float32)[0]}, "is 0.002, more than"),
    (lambda: {"w": torch.full((SHORT, 1), math.nan)}, "is inf, more than"),
    (lambda: {"w": torch.full((SHORT, 1), math.inf)}, "is inf, more than"),
    (lambda: {"w": torch.zeros(SHORT, 1)}, "is 1, more than"),
    (lambda: {"w": orthonormal()[:, [0, 0]]}, "is 1.41, more than"),
    (lambda: {"w": orthonormal(9)}, r"The subspace of 'w', of shape \(8, 9\), has shape \(9, 4\)"),
    (lambda: {"w": orthonormal().T}, r"has shape \(4, 8\)"),
    (lambda: {"w": torch.eye(8, 9)}, r"has shape \(8, 9\)"),
    (lambda: {"w": torch.zeros(SHORT, 0)}, r"has shape \(8, 0\)"),
    (lambda: {"w": orthonormal()[:, 0]}, r"has shape \(8,\)"),
    (lambda: {"a": torch.eye(3)}, r"The subspace of 'a', of shape \(3,\), .*Only matrices have one"),
    (lambda: {"s": torch.eye(1)}, r"The subspace of 's', of shape \(\), "),
    (lambda: {"w": orthonormal(), "v": orthonormal()}, "subspaces has 'v', of which there is no clipped sum"),
]


@pytest.mark.parametrize(("subspaces", "message"), NOT_A_SUBSPACE, ids=[message for _, message in NOT_A_SUBSPACE])
def test_what_is_no_subspace_is_refused_before_anything_is_written(subspaces, message, monkeypatch):
    sums = {"a": torch.randn(3), "s": torch.randn(()), "w": torch.randn(SHORT, 9)}
    before = {name: total.clone() for name, total in sums.items()}
    mechanism = gaussian()
    monkeypatch.setattr(mechanism._stream, "fill", lambda *args, **kwargs: pytest.fail("noise was drawn"))
    with pytest.raises(ValueError, match=message):
        mechanism.privatize(sums, step=0, subspaces=subspaces())
    assert all(torch.equal(sums[name], before[name]) for name in sums)


def test_products_with_a_subspace_are_in_full_precision_whatever_the_user_allows(monkeypatch):
    seen = []
    total, basis = torch.randn(6, 50), orthonormal(6, 3)
    expected = (basis.double() @ basis.double().T @ total.double() / B).float()
    matmul, mm = torch.Tensor.__matmul__, torch.mm

    def noted(product):
        def call(*args, **kwargs):
            seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
            return product(*args, **kwargs)

        return call

    monkeypatch.setattr(torch.Tensor, "__matmul__", noted(matmul))
    monkeypatch.setattr(torch, "mm", noted(mm))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            gradient = gaussian(noise_multiplier=0.0).privatize({"w": total}, step=0, subspaces={"w": basis})["w"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen[-2:] == [("highest", False)] * 2
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-5)


class TwoProcesses:
    """`torch.distributed` for one process at a time, which notes what the process would send."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, rank, worst_error=0.0, *, processes=2):
        self.rank, self.worst_error, self.processes, self.sent = rank, worst_error, processes, []
        self.under_way = []

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.processes

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, async_op=False):
        if op == torch.distributed.ReduceOp.MAX:
            tensor.clamp_(min=self.worst_error)
            return None
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
    for module in (mechanism_module, subspace_noise):
        monkeypatch.setattr(module, "dist", processes)


def test_processes_send_projected_sums_and_each_adds_the_noise_of_its_coordinates(monkeypatch):
    basis, found = orthonormal(), []
    for rank in range(2):
        put_between(processes := TwoProcesses(rank), monkeypatch)
        total = torch.randn(WIDE, generator=torch.Generator().manual_seed(rank))
        gaussian().privatize({"w": total.clone()}, step=0, subspaces={"w": basis})
        (sent,) = processes.sent
        assert sent.shape == (RANK, LONG)
        assert not processes.under_way
        own, others = (part.flatten() for part in (sent - basis.T @ total).chunk(2)[:: 1 - 2 * rank])
        rounding = SHORT * torch.finfo(torch.float32).eps * total.norm(dim=0).max().item()  # of a product over that side
        torch.testing.assert_close(others, torch.zeros_like(others), atol=rounding, rtol=0)
        found.append(own.double().numpy() / (SIGMA * C))
        low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], own.numel())  # two-sided at 1e-6
        assert low < np.sum(found[-1] ** 2) < high
    assert abs(np.corrcoef(found)[0, 1]) < 5 / np.sqrt(found[0].size)


# Of seven rows of three two processes have four and three, and five processes two each, one, and none.
SHARDED = {2: [(0, 12), (12, 9)], 5: [(0, 6), (6, 6), (12, 6), (18, 3), (21, 0)]}


def of_shards(parts, monkeypatch, *, steps=1, **options):
    """Return what each process releases of a parameter in shards, between two whole ones, and what it sends."""
    found = []
    for rank, (begin, numel) in enumerate(parts):
        put_between(processes := TwoProcesses(rank, processes=len(parts)), monkeypatch)
        mechanism = gaussian(**options)
        for step in range(steps):
            sums = {"a": torch.ones(5).double(), "w": torch.full((numel,), 2.0).double(), "b": torch.ones(4).double()}
            private = mechanism.privatize(sums, step=step, places={"w": Place(begin, 21)})
        assert not processes.under_way
        found.append((private, processes.sent))
    return found


@pytest.mark.parametrize(
    "options", [{}, {"floating_point_safe": True}, {"shape": NoiseShape.parse("banded:bands=3")}], ids=str
)
@pytest.mark.parametrize("parts", SHARDED.values(), ids=SHARDED)
def test_reproducible_noise_is_the_same_in_shards(parts, options, monkeypatch):
    steps = 1 if "shape" not in options else 4
    one = gaussian(seed=0, **options)
    for step in range(steps):
        sums = {"a": torch.ones(5).double(), "w": torch.full((7, 3), 2.0).double(), "b": torch.ones(4).double()}
        expected = one.privatize(sums, step=step)
    found = of_shards(parts, monkeypatch, steps=steps, seed=0, **options)
    in_full = torch.cat([private["w"] for private, _ in found])
    torch.testing.assert_close(in_full, expected["w"].flatten(), rtol=0, atol=1e-15)
    for place, name in enumerate(("a", "b")):  # of which each has the noise of some coordinates, and sends all
        sent = torch.stack([processes[len(processes) - 2 + place] for _, processes in found])
        torch.testing.assert_close((sent - 1).sum(dim=0) / B, expected[name] - 1 / B, rtol=0, atol=1e-15)
        assert ((sent != 1).sum(dim=0) == 1).all()


def test_a_process_remembers_the_shaped_noise_of_its_coordinates_alone(monkeypatch):
    for rank, numel in enumerate((3, 2)):
        put_between(TwoProcesses(rank), monkeypatch)
        mechanism = gaussian(shape=NoiseShape.parse("banded:bands=3"))
        for step in range(3):
            mechanism.privatize({"w": torch.zeros(5)}, step=step)
        assert [past.shape for past in mechanism._shaped._past["w"]] == [(numel,)] * 2


@pytest.mark.parametrize("draw_ahead", [False, True])
def test_whoever_has_a_shard_adds_its_noise_and_sends_none_of_it(draw_ahead, monkeypatch):
    parts = [(0, 4000), (4000, 4000), (8000, 999)]
    found = []
    for rank, (begin, numel) in enumerate(parts):
        put_between(processes := TwoProcesses(rank, processes=3), monkeypatch)
        with gaussian(draw_ahead=draw_ahead) as mechanism:
            sums = {"w": torch.zeros(numel), "b": torch.zeros(51)}
            private = mechanism.privatize(sums, step=0, places={"w": Place(begin, 8999)})
        (whole,) = processes.sent
        assert whole.nonzero().flatten().tolist() == [*range(17 * rank, 17 * rank + 17)]
        noise = private["w"].double().numpy() / mechanism.noise_std(0)
        assert np.count_nonzero(noise) == numel
        low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], numel)
        assert low < np.sum(noise**2) < high
        found.append(noise)
    assert abs(np.corrcoef(found[0], found[1])[0, 1]) < 5.5 / np.sqrt(4000)
    assert len(np.unique(np.concatenate(found))) > 8990  # no process has drawn what another one has


def test_a_shard_has_no_subspace():
    with pytest.raises(AssertionError, match="no subspace"):
        gaussian().privatize({"w": torch.zeros(WIDE)}, step=0, subspaces={"w": orthonormal()}, places={"w": Place(0, 9)})


def test_noise_of_a_process_is_enough_for_the_worst_subspace_of_any(monkeypatch):
    def noise(worst_error):
        processes = TwoProcesses(0, worst_error)
        put_between(processes, monkeypatch)
        sums = {"w": torch.zeros(SHORT, 10, dtype=torch.float64)}
        gaussian(seed=0).privatize(sums, step=0, subspaces={"w": orthonormal(dtype=torch.float64)})
        return processes.sent[0]

    torch.testing.assert_close(noise(9e-4), noise(0.0) * math.sqrt(1 + 9e-4), rtol=1e-12, atol=0.0)
    with pytest.raises(ValueError, match=r"is 0\.002, more than"):  # on every process, or the others would wait for ever
        noise(2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
def test_subspaces_on_a_gpu(shape):
    mechanism, basis = gaussian(), orthonormal(dtype=torch.float64)
    gradient = mechanism.privatize({"w": torch.zeros(shape, device="cuda")}, step=0, subspaces={"w": basis})["w"]
    assert gradient.is_cuda
    noise = coordinates(gradient.cpu(), basis) / mechanism.noise_std(0)
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], noise.size)
    assert low < np.sum(noise**2) < high
