"""Muon: updates keep their singular vectors and their size, and singular values become about equal."""

import numpy as np
import pytest
import torch

from doppler_hf.optim.muon import orthogonalized
from tests.support.optimizers import doppler_optimizer, normal, parameters
from tests.support.refusals import refused


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 3, 2, 2)], ids=str)
def test_singular_values_become_about_equal_and_directions_and_size_stay(shape):
    d = normal(*shape).float()
    (found,) = orthogonalized([d])
    assert found.shape == d.shape
    torch.testing.assert_close(found.norm(), d.norm())
    u, s, vt = np.linalg.svd(d.flatten(1).numpy(), full_matrices=False)
    around = u.T @ found.flatten(1).numpy() @ vt.T  # diagonal, up to rounding in bfloat16
    values = np.diag(around) / (d.norm().item() / len(s) ** 0.5)
    assert s.max() / s.min() > 2.5
    assert 0.55 < values.min() < values.max() < 1.45
    assert np.abs(around - np.diag(np.diag(around))).max() < 0.05 * values.max() * d.norm().item() / len(s) ** 0.5


def test_an_update_of_zeros_stays_zero_and_others_are_as_if_alone():
    d = [torch.zeros(3, 4), normal(4, 3).float()]
    found = orthogonalized(d)
    assert torch.equal(found[0], d[0])
    assert torch.equal(found[1], orthogonalized(d[1:])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_that_of_adam_bc_orthogonalized_and_vectors_are_as_without(dtype):
    shapes = [(6, 9), (7,)]
    options = dict(lr=0.5, base="adam_bc", noise_std=0.3, weight_decay=0.1)
    plain, with_muon = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    before = plain[0].detach().clone().float()
    optimizers = doppler_optimizer(plain, **options), doppler_optimizer(with_muon, orthogonal=True, **options)
    for optimizer, params in zip(optimizers, (plain, with_muon), strict=True):
        for index, p in enumerate(params):
            p.grad = normal(*p.shape, seed=index).to(dtype)
        optimizer.step()
    assert torch.equal(plain[1], with_muon[1])
    decayed = (1 - 0.5 * 0.1) * before
    (expected,) = orthogonalized([plain[0].detach().float() - decayed])
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(with_muon[0].detach().float() - decayed, expected, atol=tolerance, rtol=0.05)
    state = optimizers[1].state[with_muon[0]]
    assert torch.equal(state["exp_avg_sq"], optimizers[0].state[plain[0]]["exp_avg_sq"])


def test_what_does_not_fit_is_refused():
    optimizer = doppler_optimizer(parameters((3, 4)), lr=0.1, orthogonal=True)
    with refused("projected-and-orthogonal"):
        doppler_optimizer(parameters((3, 4)), lr=0.1, rank=2, orthogonal=True)
    with refused("another-optimizer-setting", match="orthogonal=False"):
        optimizer.load_state_dict(doppler_optimizer(parameters((3, 4)), lr=0.1).state_dict())


def test_parts_of_matrices_are_refused(monkeypatch):
    monkeypatch.setattr("doppler_hf.optim.optimizer.DTensor", torch.nn.Parameter)
    with refused("orthogonal-shards", match="base_optimizer='muon'"):
        doppler_optimizer(parameters((3, 4)), lr=0.1, orthogonal=True)


def test_muon_is_one_name_for_adam_bc_with_orthogonalized_matrices_and_reads_checkpoints_that_had_two():
    options = dict(lr=0.5, noise_std=0.3, weight_decay=0.1)
    written, named = parameters((6, 9), (7,)), parameters((6, 9), (7,))
    of_0_3 = doppler_optimizer(written, base="adam_bc", orthogonal=True, **options)
    muon = doppler_optimizer(named, base="muon", **options)
    assert muon.param_groups[0]["orthogonal"]
    for _ in range(2):
        for optimizer, params in ((of_0_3, written), (muon, named)):
            for index, p in enumerate(params):
                p.grad = normal(*p.shape, seed=index)
            optimizer.step()
        assert all(map(torch.equal, written, named))
        muon.load_state_dict(of_0_3.state_dict())  # and goes on alike
    with refused("another-optimizer-setting", match="orthogonal=True"):
        doppler_optimizer(parameters((6, 9), (7,)), base="adam_bc", **options).load_state_dict(muon.state_dict())
    with refused("another-optimizer-setting", match="base='muon'"):
        doppler_optimizer(parameters((6, 9), (7,)), base="adam", orthogonal=True, lr=0.5).load_state_dict(muon.state_dict())


def test_a_group_of_embeddings_is_left_out():
    table, matrix = parameters((6, 9), (6, 9))
    plain_table, _ = parameters((6, 9), (6, 9))
    muon = doppler_optimizer([{"params": [table], "orthogonal": False}, {"params": [matrix]}], lr=0.5, base="muon")
    adam = doppler_optimizer([plain_table], lr=0.5, base="adam_bc")
    for p in (table, plain_table, matrix):
        p.grad = normal(6, 9)
    muon.step()
    adam.step()
    assert torch.equal(table, plain_table)
    assert not torch.allclose(matrix, table)
