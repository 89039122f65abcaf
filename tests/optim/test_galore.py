"""GaLore: bases hold what they should, states follow them, white noise stays white, the rest of a model is as without."""

import math

import numpy as np
import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim.galore import add_lifted, find_basis, rotated
from tests.support.optimizers import doppler_optimizer, normal, parameters
from tests.support.refusals import refused

BASES = ["sgd", "adam", "adam_bc"]
SHAPES = [(5, 9), (9, 5), (6, 6)]
SECOND_ORDER = PAPER_FILTERS["second-order"]


def orthonormal(rows, columns, seed=0):
    return torch.from_numpy(np.linalg.qr(normal(rows, columns, seed=seed).numpy())[0])


def galore_projection(matrix, rank):
    """What the first implementation projects onto: right singular vectors of tall and square matrices, left ones of wide."""
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    if matrix.shape[0] >= matrix.shape[1]:
        return (matrix @ right[:rank].T) @ right[:rank]
    return left[:, :rank] @ (left[:, :rank].T @ matrix)


def lifted(matrix, basis):
    wide = matrix.shape[0] <= matrix.shape[1]
    return basis @ (basis.T @ matrix) if wide else (matrix @ basis) @ basis.T


def step(optimizer, params, seed, change=lambda p, grad: grad):
    for index, p in enumerate(params):
        p.grad = change(p, normal(*p.shape, seed=1000 * index + seed + 50).to(p.dtype))
    optimizer.step()


def optimizer_of(params, **options):
    return doppler_optimizer(
        params, **{"lr": 0.05, "low_pass_filter": SECOND_ORDER, "rank": 2, "update_proj_gap": 3} | options
    )


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bases_are_orthonormal(shape, dtype, tolerance):
    matrices = [normal(*shape), normal(shape[0], 1) @ normal(1, shape[1]), torch.zeros(shape, dtype=torch.float64)]
    for rank in range(1, min(shape) + 1):
        for matrix in matrices:
            basis = None
            for _ in range(2):  # the second one starts warm
                basis = find_basis(matrix.to(dtype), rank, previous=basis)
                assert basis.shape == (min(shape), rank)
                assert_close(basis.T @ basis, torch.eye(rank, dtype=dtype), tolerance)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_basis_projects_as_galores_and_as_well_as_can_be(shape, rank):
    """Of a side that random columns span as a whole; eigenvalues, of squares, have half the digits."""
    matrix = normal(*shape)
    approximation = lifted(matrix, find_basis(matrix, rank)).numpy()
    np.testing.assert_allclose(approximation, galore_projection(matrix.numpy(), rank), atol=1e-9, rtol=1e-9)
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    best = left[:, :rank] * values[:rank] @ right[:rank]
    np.testing.assert_allclose(approximation, best, atol=1e-9, rtol=1e-9)


def test_a_new_basis_is_one_step_of_subspace_iteration():
    matrix, previous = normal(9, 14), orthonormal(9, 3)
    expected = np.linalg.qr(matrix.numpy() @ matrix.numpy().T @ previous.numpy())[0]
    basis = find_basis(matrix, 3, previous=previous).numpy()
    np.testing.assert_allclose(basis @ basis.T, expected @ expected.T, atol=1e-12, rtol=1e-12)


def test_a_lifted_update_of_half_precision_is_rounded_once():
    matrix, low_rank, basis = normal(9, 5, dtype=torch.bfloat16), normal(9, 2, seed=1).float(), orthonormal(5, 2).float()
    exact = 0.9 * matrix.double() - 0.3 * low_rank.double() @ basis.double().T
    add_lifted(matrix, low_rank, basis, scale=-0.3, decay=0.9)
    assert matrix.dtype == torch.bfloat16
    torch.testing.assert_close(matrix.double(), exact, atol=1e-5, rtol=2.0**-8 * 1.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [True, False])
def test_a_rotated_second_moment_is_never_negative_and_stays_isotropic(wide, dtype):
    shape = (4, 6) if wide else (6, 4)
    for seed in range(20):
        old, new = orthonormal(9, 4, seed=seed).float(), orthonormal(9, 4, seed=seed + 1).float()
        one_direction = torch.zeros(shape, dtype=dtype)
        (one_direction if wide else one_direction.T)[0] = 100.0
        # A basis that stays: shares add up to 1 but for rounding, to either side.
        for v, basis in (((normal(*shape, seed=seed) ** 4).to(dtype), new), (one_direction, old)):
            assert (rotated([], v, old=old, new=basis, wide=wide)[1] >= 0).all()
        v = one_direction
        same = torch.full(shape, 0.375, dtype=dtype)
        states, still = rotated([v], same, old=old, new=new, wide=wide)
        assert (states[0].dtype, still.dtype) == (dtype, dtype)
        torch.testing.assert_close(still, same, atol=0, rtol=1e-6)
    assert rotated([], None, old=old, new=new, wide=wide) == ([], None)


def test_adam_bc_subtracts_the_variance_that_projected_noise_has(monkeypatch):
    shape = (512, 32)
    bases = iter(range(100))
    monkeypatch.setattr(
        "doppler_hf.optim.galore.find_basis",
        lambda matrix, rank, **_: orthonormal(min(shape), rank, seed=next(bases)).float(),
    )
    p, noise_std, beta2, gap = torch.nn.Parameter(torch.zeros(shape)), 0.3, 0.9999, 40
    constants = {"base": "adam_bc", "noise_std": noise_std, "beta2": beta2}
    optimizer = optimizer_of([p], rank=8, update_proj_gap=gap, **constants)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5 * gap):
        p.grad = noise_std * torch.randn(shape, generator=generator)
        optimizer.step()
    state = optimizer.state[p]
    steps = 5 * gap
    assert state["step"] == steps
    # A mean of `steps` squares in each of 8·512 coordinates; 5 standard errors are a false alarm once in 10⁶ times.
    ratio = state["exp_avg_sq"].double().mean().item() / (1 - beta2**steps) / noise_std**2
    np.testing.assert_allclose(ratio, 1.0, atol=5 * math.sqrt(2 / (8 * 512 * steps)), rtol=0)


@pytest.mark.parametrize("base", BASES)
def test_what_has_no_side_above_the_rank_is_updated_as_without(base):
    shapes = [(2, 9), (9, 2), (1, 1), (7,), (4, 5, 6), (4, 5, 3, 3), ()]
    ours, theirs = parameters((5, 9), *shapes), parameters((5, 9), *shapes)
    with_rank, without = optimizer_of(ours, base=base), optimizer_of(theirs, base=base, rank=None)
    for t in range(5):
        step(with_rank, ours, t)
        step(without, theirs, t)
    assert "basis" in with_rank.state[ours[0]]
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert with_rank.state[one].keys() == without.state[other].keys()
        assert torch.equal(one, other)


def test_groups_have_their_own_rank_gap_and_scale():
    options = [
        {"rank": 1, "update_proj_gap": 2, "scale": 2.0, "lr": 0.01},
        {"rank": 3, "weight_decay": 0.1},
        {"rank": None},
        {"rank": 2, "update_proj_gap": 5},
    ]
    shapes = [(5, 9), (9, 5), (6, 6), (4, 7)]
    together, alone = parameters(*shapes), parameters(*shapes)
    optimizers = [optimizer_of([p], base="adam", **own) for p, own in zip(alone, options, strict=True)]
    optimizer = optimizer_of([{"params": [p]} | own for p, own in zip(together[:2], options[:2], strict=True)], base="adam")
    for p, own in zip(together[2:], options[2:], strict=True):
        optimizer.add_param_group({"params": [p]} | own)
    for t in range(7):
        step(optimizer, together, t)
        for index, p in enumerate(alone):
            p.grad = normal(*p.shape, seed=1000 * index + t + 50)
            optimizers[index].step()
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        ({"rank": 0}, "out-of-range", r" rank .*0"),
        ({"update_proj_gap": 0}, "out-of-range", r" update_proj_gap .*0"),
        ({"scale": 0.0}, "out-of-range", r" scale .*0\.0"),
        ({"scale": math.inf}, "out-of-range", r" scale .*inf"),
        ({"rank": 5}, "rank-too-large", "5"),
    ],
    ids=str,
)
def test_group_options_out_of_range_are_refused(options, code, value):
    with refused(code, match=value):
        optimizer_of(parameters((5, 9), (20,), (20, 20, 20)), **options)
    with refused(code, match=value):
        optimizer_of([{"params": parameters((5, 9))} | options])
    optimizer = optimizer_of(parameters((5, 9)))
    with refused(code, match=value):
        optimizer.add_param_group({"params": parameters((5, 9), (20,))} | options)
    assert len(optimizer.param_groups) == 1
