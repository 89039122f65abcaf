import copy
import math

import numpy as np
import pytest
import scipy.signal
import torch

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, butterworth, noise_gain, step_response
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.galore import BASIS_CHANGES, PROJECTOR_SOURCES
from doppler_hf.optim.low_pass import bias_correction, low_pass, padded_coefficients
from doppler_hf.optim.optimizer import DEFAULT_FLOOR_FRACTION
from tests.support.optimizers import assert_resumes_to_the_bit, assert_same, gradients, saved_and_loaded, trajectory
from tests.support.pairwise import pairwise
from tests.support.reference import doppler_trajectory, top_directions

BASES = ["sgd", "adam", "adam_bc"]
STEPS = 40


def parameter(values=(1.0, -2.0, 3.0, 0.5, -0.25, 0.0), dtype=torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", PAPER_FILTERS)
def test_equals_algorithm_3(name, base, weight_decay):
    p = parameter()
    constants = {"lr": 0.05, "base": base, "beta2": 0.98, "eps": 0.01, "noise_std": 0.05, "weight_decay": weight_decay}
    floor = {"floor": 1e-4} if base == "adam_bc" else {}
    expected = doppler_trajectory(
        p.detach().numpy().copy(),
        gradients(),
        b=PAPER_FILTERS[name].b,
        a=PAPER_FILTERS[name].a[1:],
        floor=1e-4,
        **constants,
    )
    optimizer = DopplerOptimizer([p], low_pass_filter=PAPER_FILTERS[name], **constants, **floor)
    np.testing.assert_allclose(trajectory(optimizer, p, gradients()), expected, rtol=1e-10, atol=1e-10)


@pytest.fixture
def reference_basis(monkeypatch):
    """The reference's singular vectors for ours, whose signs are LAPACK's affair; `keep` depends on them."""

    def find_basis(matrix, rank, *, projector, previous=None):
        short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        return torch.from_numpy(top_directions(short.numpy(), rank))

    monkeypatch.setattr("doppler_hf.optim.galore.find_basis", find_basis)


@pytest.mark.usefixtures("reference_basis")
@pytest.mark.parametrize(
    ("name", "base", "basis_change", "projector_source", "shape", "weight_decay"),
    pairwise(
        PAPER_FILTERS, BASES, BASIS_CHANGES, PROJECTOR_SOURCES, [(4, 6), (6, 4), (5, 5)], [0.0, 0.3],
        strength=3,  # what a change of basis does depends on the base and on the source together
    ),
    ids=str,
)  # fmt: skip
def test_equals_algorithm_3_with_galore(name, base, basis_change, projector_source, shape, weight_decay):
    x = np.random.default_rng(1).standard_normal(shape)
    grads = gradients(25, size=math.prod(shape)).reshape(-1, *shape)
    p = parameter(x)
    constants = {
        **{"lr": 0.05, "base": base, "beta2": 0.98, "eps": 0.01, "noise_std": 0.05, "weight_decay": weight_decay},
        **{"rank": 2, "update_proj_gap": 7, "scale": 0.5},  # three refreshes
        **{"basis_change": basis_change, "projector_source": projector_source},
    }
    b, a = PAPER_FILTERS[name].b, PAPER_FILTERS[name].a[1:]
    expected = doppler_trajectory(x.copy(), grads, b=b, a=a, floor=1e-4, **constants)
    floor = {"floor": 1e-4} if base == "adam_bc" else {}
    optimizer = DopplerOptimizer([p], low_pass_filter=PAPER_FILTERS[name], **constants, **floor)
    np.testing.assert_allclose(trajectory(optimizer, p, grads), expected, rtol=1e-10, atol=1e-10)


def test_momentum_and_adam_without_noise_are_adamw():
    ours, theirs = parameter(), parameter()
    low_pass_filter = PAPER_FILTERS["momentum"]
    optimizer = DopplerOptimizer([ours], 0.01, low_pass_filter=low_pass_filter, base="adam", eps=1e-16, weight_decay=0.1)
    adamw = torch.optim.AdamW([theirs], 0.01, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.1)
    np.testing.assert_allclose(
        trajectory(optimizer, ours, gradients()), trajectory(adamw, theirs, gradients()), rtol=1e-10, atol=1e-10
    )


def test_no_filter_is_sgd():
    ours, theirs = parameter(), parameter()
    optimizer, sgd = DopplerOptimizer([ours], 0.1), torch.optim.SGD([theirs], 0.1)
    np.testing.assert_allclose(
        trajectory(optimizer, ours, gradients()), trajectory(sgd, theirs, gradients()), rtol=1e-14, atol=1e-14
    )


def test_adam_bc_without_noise_is_adam():
    one, other = parameter(), parameter()
    adam, adam_bc = (DopplerOptimizer([p], 0.1, base=base) for p, base in ((one, "adam"), (other, "adam_bc")))
    np.testing.assert_allclose(
        trajectory(adam, one, gradients()), trajectory(adam_bc, other, gradients()), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    "low_pass_filter",
    [*PAPER_FILTERS.values(), butterworth(4, 0.2), LowPassFilter(b=(0.1, 0.2, 0.3, 0.4))],
    ids=str,
)
def test_filter_stage_equals_scipy(low_pass_filter):
    b, a = padded_coefficients(low_pass_filter)
    states, bias_states = [torch.zeros(6, dtype=torch.float64) for _ in a[1:]], [0.0] * low_pass_filter.order
    filtered = [low_pass(torch.tensor(grad), states, b=b, a=a).numpy() for grad in gradients()]
    expected = scipy.signal.lfilter(low_pass_filter.b, low_pass_filter.a, gradients(), axis=0)
    np.testing.assert_allclose(filtered, expected, rtol=1e-12, atol=1e-12)
    corrections = [bias_correction(bias_states, b=b, a=a) for _ in range(STEPS)]
    np.testing.assert_allclose(corrections, step_response(low_pass_filter, STEPS), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["momentum", "second-order", "f6"])
def test_white_noise_is_reduced_by_the_noise_gain(name):
    p, noise_std = torch.nn.Parameter(torch.zeros(50_000)), 0.3
    optimizer = DopplerOptimizer([p], 1.0, low_pass_filter=PAPER_FILTERS[name])
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        before = p.detach().clone()
        p.grad = noise_std * torch.randn(p.shape, generator=generator)
        optimizer.step()
    # The relative standard error of a variance over 50,000 coordinates is 0.6 %.
    variance = (p.detach() - before).var().item()
    np.testing.assert_allclose(variance, noise_gain(PAPER_FILTERS[name]) * noise_std**2, rtol=0.03, atol=0)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", PAPER_FILTERS)
def test_state_holds_as_many_tensors_as_the_order(name, base):
    p = parameter()
    optimizer = DopplerOptimizer([p], 0.1, low_pass_filter=PAPER_FILTERS[name], base=base)
    trajectory(optimizer, p, gradients(3))
    state = optimizer.state[p]
    assert len(state["filter_states"]) == len(state["bias_states"]) == PAPER_FILTERS[name].order
    assert ("exp_avg_sq" in state) == (base != "sgd")


def test_the_gradient_and_its_buffer_are_left_alone():
    p = parameter()
    p.grad = torch.ones_like(p)
    DopplerOptimizer([p], 0.1).step()
    assert torch.equal(p.grad, torch.ones_like(p))


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BASES)
def test_resuming_is_uninterrupted_to_the_bit(base, dtype):
    def optimizer_of(p):
        return DopplerOptimizer([p], 0.05, low_pass_filter=PAPER_FILTERS["second-order"], base=base, noise_std=0.05)

    assert_resumes_to_the_bit(optimizer_of, parameter(dtype=dtype), gradients())


def test_loading_does_not_share_memory_with_the_checkpoint():
    one, other = parameter(), parameter()
    saving, loading = (DopplerOptimizer([p], 0.1, low_pass_filter=PAPER_FILTERS["f5"]) for p in (one, other))
    trajectory(saving, one, gradients(5))
    checkpoint = saving.state_dict()
    before = copy.deepcopy(checkpoint)
    loading.load_state_dict(checkpoint)
    trajectory(loading, other, gradients(5))
    assert_same(checkpoint["state"][0], before["state"][0])


def test_state_of_several_groups_is_matched_to_its_parameters():
    def optimizer_of(ps):
        groups = [{"params": ps[:1], "lr": 0.3}, {"params": ps[1:], "weight_decay": 0.5}]
        return DopplerOptimizer(groups, 0.1, low_pass_filter=PAPER_FILTERS["f3"])

    ps = [parameter(dtype=torch.bfloat16), parameter((1.0, 2.0)), parameter((3.0,), dtype=torch.float32)]
    saving = optimizer_of(ps)
    for p in (ps[0], ps[2]):  # the middle one has no state
        p.grad = torch.ones_like(p)
    saving.step()
    loading = optimizer_of(ps)
    loading.load_state_dict(saved_and_loaded(saving.state_dict()))
    assert ps[1] not in loading.state
    for p in (ps[0], ps[2]):
        assert_same(loading.state[p], saving.state[p])


def test_loading_its_own_state_right_after_construction_changes_nothing():
    p = parameter()
    optimizer = DopplerOptimizer([p], 0.05, low_pass_filter=PAPER_FILTERS["f6"], base="adam_bc", noise_std=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    twin_p = parameter()
    twin = DopplerOptimizer([twin_p], 0.05, low_pass_filter=PAPER_FILTERS["f6"], base="adam_bc", noise_std=0.1)
    np.testing.assert_array_equal(trajectory(optimizer, p, gradients(10)), trajectory(twin, twin_p, gradients(10)))


def test_loading_keeps_the_constants_and_takes_the_learning_rate():
    def optimizer_of(**constants):
        return DopplerOptimizer([parameter()], base="adam_bc", **constants)

    saved = optimizer_of(lr=0.1, weight_decay=0.2, noise_std=0.3, beta2=0.9, floor=0.4).state_dict()
    loading = optimizer_of(lr=0.01, noise_std=0.03, beta2=0.99, floor=0.04)
    loading.load_state_dict(saved_and_loaded(saved))
    assert (loading.noise_std, loading.beta2, loading.floor) == (0.03, 0.99, 0.04)
    assert (loading.param_groups[0]["lr"], loading.param_groups[0]["weight_decay"]) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (
            {"low_pass_filter": PAPER_FILTERS["f1"], "base": "adam"},
            "filter of order 2, this optimizer's f1 is of order 1",
        ),
        ({"low_pass_filter": PAPER_FILTERS["f6"], "base": "sgd"}, "of base 'adam', this optimizer of 'sgd'"),
        ({"low_pass_filter": PAPER_FILTERS["f6"], "base": "adam_bc"}, "of base 'adam', this optimizer of 'adam_bc'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(constants, message):
    p = parameter()
    saving = DopplerOptimizer([p], 0.1, low_pass_filter=PAPER_FILTERS["f6"], base="adam")
    trajectory(saving, p, gradients(2))
    loading = DopplerOptimizer([p], 0.1, **constants)
    with pytest.raises(ValueError, match=message):
        loading.load_state_dict(saving.state_dict())
    assert not loading.state


def test_a_checkpoint_of_another_optimizer_is_refused():
    p = parameter()
    adamw = torch.optim.AdamW([p], 0.1)
    trajectory(adamw, p, gradients(2))
    with pytest.raises(ValueError, match="not written by DopplerOptimizer"):
        DopplerOptimizer([p], 0.1).load_state_dict(adamw.state_dict())


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_parameters_have_float32_state(dtype, state_dtype):
    p = parameter(dtype=dtype)
    optimizer = DopplerOptimizer([p], 0.1, low_pass_filter=PAPER_FILTERS["f6"], base="adam_bc", noise_std=0.1)
    trajectory(optimizer, p, gradients(3))
    state = optimizer.state[p]
    assert p.dtype == dtype
    assert {tensor.dtype for tensor in (*state["filter_states"], state["exp_avg_sq"])} == {state_dtype}


def test_half_precision_parameters_move_as_their_float32_twins():
    half = parameter(dtype=torch.bfloat16)
    twin = torch.nn.Parameter(half.detach().float())
    optimizers = [
        DopplerOptimizer([p], 0.1, low_pass_filter=PAPER_FILTERS["f6"], base="adam", weight_decay=0.1) for p in (half, twin)
    ]
    grads = torch.tensor(gradients()).bfloat16()
    for grad in grads:
        half.grad, twin.grad = grad.clone(), grad.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(half, twin.bfloat16())
        twin.data.copy_(half)


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


def test_works_with_a_learning_rate_scheduler():
    p = parameter([0.0])
    optimizer = DopplerOptimizer([p], 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
    assert p.item() == -(1 + 0.5 + 0.25)


def test_added_groups_have_their_own_options():
    one, other = parameter([1.0]), parameter([1.0])
    optimizer = DopplerOptimizer([one], 0.5)
    optimizer.add_param_group({"params": [other], "lr": 0.25, "weight_decay": 1.0})
    for p in (one, other):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (one.item(), other.item()) == (0.5, 0.5)
    with pytest.raises(ValueError, match=r"lr must be a finite number ≥ 0, got -0\.1"):
        optimizer.add_param_group({"params": [parameter()], "lr": -0.1})
    with pytest.raises(ValueError, match=r"weight_decay must be a finite number ≥ 0, got -0\.1"):
        DopplerOptimizer([{"params": [parameter()], "weight_decay": -0.1}], 0.1)


def test_a_closure_is_refused():
    with pytest.raises(ValueError, match="closure must be None"):
        DopplerOptimizer([parameter()], 0.1).step(lambda: 0.0)


def test_a_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        DopplerOptimizer(embedding.parameters(), 0.1).step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number ≥ 0, got -1.0"),
        ({"lr": math.nan}, "lr must be a finite number ≥ 0, got nan"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number ≥ 0, got -1.0"),
        ({"base": "lion"}, "base must be one of sgd, adam, adam_bc, got 'lion'"),
        ({"beta2": 1.0}, r"beta2 must lie in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, r"beta2 must lie in \[0, 1\), got -0.1"),
        ({"eps": 0.0}, "eps must be a finite number > 0, got 0.0"),
        ({"noise_std": -1.0}, "noise_std must be a finite number ≥ 0, got -1.0"),
        ({"base": "adam_bc", "floor": 0.0}, "floor must be a finite number > 0, got 0.0"),
        ({"base": "adam", "floor": 0.1}, "floor must be None for base 'adam', which has none, got 0.1"),
        ({"base": "sgd", "floor": 0.1}, "floor must be None for base 'sgd', which has none, got 0.1"),
    ],
)
def test_bad_arguments_are_refused_with_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        DopplerOptimizer([parameter()], **{"lr": 0.1, **arguments})


def test_the_noise_that_is_taken_away_is_weighted_as_the_gradients_are():
    # A gradient of exactly the noise's size in each step leaves nothing but the floor, however the noise changes.
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = DopplerOptimizer([weight], lr=1.0, base="adam_bc", beta2=0.9, floor=1e-12, noise_std=1.0)
    for std in (1.0, 3.0, 0.5, 2.0, 0.0, 1.0):
        before = weight.detach().clone()
        optimizer.noise_std, weight.grad = std, torch.full((3,), std, dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close(before - weight.detach(), torch.full_like(before, std / 1e-6), rtol=1e-9, atol=0)
    state = optimizer.state_dict()["state"][0]
    assert state["noise_power"] == pytest.approx(float(state["exp_avg_sq"][0]), rel=1e-14)
