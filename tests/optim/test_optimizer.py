import math

import numpy as np
import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.optimizer import DEFAULT_FLOOR_FRACTION
from tests.support.optimizers import doppler_optimizer, gradients, saved_and_loaded, trajectory
from tests.support.pairwise import pairwise
from tests.support.reference import doppler_trajectory, top_directions
from tests.support.refusals import refused
from tests.support.tiers import further

BASES = ["sgd", "adam", "adam_bc"]


def parameter(values=(1.0, -2.0, 3.0, 0.5, -0.25, 0.0), dtype=torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["none", "first-order-v2", "second-order", "f6"])
def test_equals_algorithm_3(name, base, weight_decay):
    p = parameter()
    constants = {"lr": 0.05, "base": base, "beta2": 0.98, "eps": 0.01, "noise_std": 0.05, "weight_decay": weight_decay}
    floor = {"floor": 1e-4} if base == "adam_bc" else {}
    expected = doppler_trajectory(
        p.detach().numpy().copy(), gradients(), b=PAPER_FILTERS[name].b, a=PAPER_FILTERS[name].a[1:], floor=1e-4, **constants
    )
    optimizer = DopplerOptimizer([p], low_pass_filter=PAPER_FILTERS[name], **constants, **floor)
    np.testing.assert_allclose(trajectory(optimizer, p, gradients()), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [64, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_moves_every_weight_of_half_precision(dtype, size):
    """On a CPU, torch's fused SGD moves only the last few of them (torch 2.13)."""
    p = torch.nn.Parameter(torch.full((size,), 0.01, dtype=dtype))
    p.grad = torch.ones_like(p)
    DopplerOptimizer([p], low_pass_filter=PAPER_FILTERS["none"], lr=0.5, base="sgd").step()
    assert torch.equal(p, torch.full_like(p, float(torch.tensor(0.01, dtype=dtype)) - 0.5))


@pytest.fixture
def reference_basis(monkeypatch):
    """The reference's best basis for ours, which is the best up to chance."""

    def find_basis(matrix, rank, *, previous=None):
        short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        return torch.from_numpy(top_directions(short.numpy(), rank))

    monkeypatch.setattr("doppler_hf.optim.galore.find_basis", find_basis)


GALORE = PAPER_FILTERS, BASES, [(4, 6), (6, 4), (5, 5)], [0.0, 0.3]


@pytest.mark.usefixtures("reference_basis")
@pytest.mark.parametrize(
    ("name", "base", "shape", "weight_decay"), further(pairwise(*GALORE, strength=3), quick=pairwise(*GALORE)), ids=str
)
def test_equals_algorithm_3_with_galore(name, base, shape, weight_decay):
    x = np.random.default_rng(1).standard_normal(shape)
    grads = gradients(25, size=math.prod(shape)).reshape(-1, *shape)
    p = parameter(x)
    constants = {
        **{"lr": 0.05, "base": base, "beta2": 0.98, "eps": 0.01, "noise_std": 0.05, "weight_decay": weight_decay},
        **{"rank": 2, "update_proj_gap": 7, "scale": 0.5},  # three refreshes
    }
    b, a = PAPER_FILTERS[name].b, PAPER_FILTERS[name].a[1:]
    expected = doppler_trajectory(x.copy(), grads, b=b, a=a, floor=1e-4, **constants)
    floor = {"floor": 1e-4} if base == "adam_bc" else {}
    optimizer = doppler_optimizer([p], low_pass_filter=PAPER_FILTERS[name], **constants, **floor)
    np.testing.assert_allclose(trajectory(optimizer, p, grads), expected, rtol=1e-10, atol=1e-10)


def test_momentum_and_adam_without_noise_are_adamw():
    ours, theirs = parameter(), parameter()
    low_pass_filter = PAPER_FILTERS["momentum"]
    optimizer = DopplerOptimizer([ours], 0.01, low_pass_filter=low_pass_filter, base="adam", eps=1e-16, weight_decay=0.1)
    adamw = torch.optim.AdamW([theirs], 0.01, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.1)
    np.testing.assert_allclose(
        trajectory(optimizer, ours, gradients()), trajectory(adamw, theirs, gradients()), rtol=1e-10, atol=1e-10
    )


def test_default_floor_follows_the_noise():
    noisy = DopplerOptimizer([parameter()], 0.1, base="adam_bc", noise_std=0.2, eps=1e-8)
    assert noisy.floor == pytest.approx(DEFAULT_FLOOR_FRACTION * 0.04, rel=1e-12)
    assert DopplerOptimizer([parameter()], 0.1, base="adam_bc", eps=1e-4).floor == pytest.approx(1e-8, rel=1e-12)
    assert DopplerOptimizer([parameter()], 0.1, base="adam_bc", noise_std=0.2, floor=1e-9).floor == 1e-9


def test_the_noise_is_subtracted_with_the_weight_of_its_step():
    p = parameter()
    optimizer, x, v, n = DopplerOptimizer([p], 0.05, base="adam_bc", beta2=0.98), p.detach().numpy().copy(), 0.0, 0.0
    for t, grad in enumerate(gradients(), start=1):
        optimizer.noise_std = noise_std = 0.05 * (1 + t % 3)
        v, n = 0.98 * v + 0.02 * grad**2, 0.98 * n + 0.02 * noise_std**2
        floor = DEFAULT_FLOOR_FRACTION * noise_std**2
        x = x - 0.05 * grad / np.sqrt(np.maximum((v - n) / (1 - 0.98**t), floor))
        np.testing.assert_allclose(trajectory(optimizer, p, [grad])[-1], x, rtol=1e-10, atol=1e-10)


def test_loading_keeps_the_constants_and_takes_the_learning_rate():
    def optimizer_of(**constants):
        return DopplerOptimizer([parameter()], base="adam_bc", **constants)

    saved = optimizer_of(lr=0.1, weight_decay=0.2, noise_std=0.3, beta2=0.9, floor=0.4).state_dict()
    loading = optimizer_of(lr=0.01, noise_std=0.03, beta2=0.99, floor=0.04)
    loading.load_state_dict(saved_and_loaded(saved))
    assert (loading.noise_std, loading.beta2, loading.floor) == (0.03, 0.99, 0.04)
    assert (loading.param_groups[0]["lr"], loading.param_groups[0]["weight_decay"]) == (0.1, 0.2)


def test_a_parameter_without_gradient_is_skipped():
    with_grad, without_grad = parameter(), parameter()
    optimizer = DopplerOptimizer([with_grad, without_grad], 0.1, low_pass_filter=PAPER_FILTERS["f3"], weight_decay=0.5)
    trajectory(optimizer, with_grad, gradients(3))
    assert torch.equal(without_grad, parameter())
    assert without_grad not in optimizer.state
    # Its own first step is corrected as a first step: m̂ is the gradient itself.
    without_grad.grad, with_grad.grad = torch.ones_like(without_grad), None
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    torch.testing.assert_close(without_grad.data, parameter().data - 0.1, rtol=1e-12, atol=1e-12)


def test_options_of_groups_out_of_range_are_refused():
    with refused("out-of-range", match=" lr "):
        DopplerOptimizer([parameter()], 0.5).add_param_group({"params": [parameter()], "lr": -0.1})
    with refused("out-of-range", match=" weight_decay "):
        DopplerOptimizer([{"params": [parameter()], "weight_decay": -0.1}], 0.1)


def test_a_closure_is_refused():
    with refused("closure-given"):
        DopplerOptimizer([parameter()], 0.1).step(lambda: 0.0)


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        ({"lr": -1.0}, "out-of-range", r" lr .*-1.0"),
        ({"weight_decay": math.nan}, "out-of-range", r" weight_decay .*nan"),
        ({"base": "lion"}, "unknown-value", "sgd, adam, adam_bc, muon; .*'lion'"),
        ({"beta2": 1.0}, "out-of-range", r" beta2 .*1.0"),
        ({"eps": 0.0}, "out-of-range", r" eps .*0.0"),
        ({"noise_std": -1.0}, "out-of-range", r" noise_std .*-1.0"),
        ({"base": "adam_bc", "floor": 0.0}, "out-of-range", r" floor .*0.0"),
        ({"base": "sgd", "floor": 0.1}, "no-effect", " floor=0.1"),
    ],
)
def test_bad_arguments_are_refused_with_the_value(arguments, code, value):
    with refused(code, match=value):
        DopplerOptimizer([parameter()], **{"lr": 0.1, **arguments})
