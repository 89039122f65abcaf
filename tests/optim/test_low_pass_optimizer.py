import copy

import numpy as np
import pytest
import scipy.signal
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, butterworth
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.low_pass_optimizer import LowPassOptimizer
from tests.support.optimizers import assert_resumes_to_the_bit, assert_same, trajectory
from tests.support.optimizers import gradients as flat_gradients

STEPS = 30
SHAPE = (3, 2)  # Muon takes matrices only

BASES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, weight_decay=0.3, momentum=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.05, foreach=True),
    "muon": lambda params: torch.optim.Muon(params, lr=0.05, weight_decay=0.3),
}


def gradients(steps: int = STEPS, seed: int = 0) -> np.ndarray:
    return flat_gradients(steps, seed=seed).reshape(-1, *SHAPE)


def filtered(grads: np.ndarray, low_pass_filter: LowPassFilter) -> np.ndarray:
    """m̂ by SciPy: the response to the gradients over the response to ones."""
    b, a = low_pass_filter.b, low_pass_filter.a
    step_response = scipy.signal.lfilter(b, a, np.ones(len(grads)))
    return scipy.signal.lfilter(b, a, grads, axis=0) / step_response.reshape(-1, *(1 for _ in grads.shape[1:]))


def parameter(values=((1.0, -2.0), (3.0, 0.5), (-0.25, 0.0)), dtype=torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


class Recorder(torch.optim.Optimizer):
    """Notes the gradients that it is given, destroys them, and fails when told to."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})
        self.seen, self.fails = [], False

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([None if p.grad is None else p.grad.clone() for p in params])
        for p in params:
            if p.grad is not None:
                p.grad.fill_(torch.nan)
                p.grad = None
        if self.fails:
            raise RuntimeError("the base fails")


@pytest.mark.parametrize(
    "low_pass_filter",
    [
        *(PAPER_FILTERS[name] for name in ("none", "first-order-v2", "f6")),
        butterworth(4, 0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", BASES)
def test_equals_the_base_on_gradients_filtered_by_scipy(name, low_pass_filter):
    ours, theirs = parameter(), parameter()
    optimizer = LowPassOptimizer(BASES[name]([ours]), low_pass_filter)
    expected = trajectory(BASES[name]([theirs]), theirs, filtered(gradients(), low_pass_filter))
    np.testing.assert_allclose(trajectory(optimizer, ours, gradients()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["none", "f6"])
def test_the_gradient_is_the_very_tensor_and_untouched_afterwards(name, fails):
    p, idle = parameter(), parameter()
    base = Recorder([p, idle])
    optimizer = LowPassOptimizer(base, PAPER_FILTERS[name])
    grad = p.grad = torch.tensor(gradients()[0])
    base.fails = fails
    for _ in range(2):
        if fails:
            with pytest.raises(RuntimeError, match="the base fails"):
                optimizer.step()
        else:
            optimizer.step()
        assert p.grad is grad
        assert torch.equal(grad, torch.tensor(gradients()[0]))
        assert idle.grad is None


def test_a_parameter_without_gradient_is_skipped_and_has_its_own_first_step():
    early, late = parameter(), parameter()
    base = Recorder([early, late])
    optimizer = LowPassOptimizer(base, PAPER_FILTERS["f6"])
    grads = gradients()
    for step, grad in enumerate(grads):
        early.grad = torch.tensor(grad)
        late.grad = torch.tensor(grad) if step >= 7 else None
        optimizer.step()
    seen_early, seen_late = zip(*base.seen, strict=True)
    assert seen_late[:7] == (None,) * 7
    np.testing.assert_allclose(torch.stack(seen_early), filtered(grads, PAPER_FILTERS["f6"]), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(torch.stack(seen_late[7:]), filtered(grads[7:], PAPER_FILTERS["f6"]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_is_filtered_in_float32_and_rounded_for_the_base(dtype, state_dtype):
    p = parameter(dtype=dtype)
    base = Recorder([p])
    optimizer = LowPassOptimizer(base, PAPER_FILTERS["f6"])
    grads = torch.tensor(gradients(400)).to(dtype)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    assert {tensor.dtype for tensor in optimizer.filter_state[p]["filter_states"]} == {state_dtype}
    assert {seen.dtype for (seen,) in base.seen} == {dtype}
    # Within one rounding to dtype of the float64 filter: in half precision throughout it would be far off by now.
    expected = filtered(grads.double().numpy(), PAPER_FILTERS["f6"])
    seen = torch.stack([seen.double() for (seen,) in base.seen])
    np.testing.assert_allclose(seen, expected, rtol=1.01 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BASES)
def test_resuming_is_uninterrupted_to_the_bit(name, dtype):
    def optimizer_of(p):
        return LowPassOptimizer(BASES[name]([p]), PAPER_FILTERS["second-order"])

    assert_resumes_to_the_bit(optimizer_of, parameter(dtype=dtype), gradients())


def test_a_checkpoint_of_another_order_is_refused_before_anything_changes():
    p = parameter()
    saving = LowPassOptimizer(BASES["adamw"]([p]), PAPER_FILTERS["f6"])
    trajectory(saving, p, gradients(2))
    loading = LowPassOptimizer(torch.optim.AdamW([p], 0.7), PAPER_FILTERS["f1"])
    trajectory(loading, p, gradients(3))
    before = copy.deepcopy(loading.state_dict())
    with pytest.raises(ValueError, match="order 2, this optimizer's f1 is of order 1"):
        loading.load_state_dict(saving.state_dict())
    assert_same(loading.state_dict(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accelerate_wraps_it_at_any_time(dtype):
    p, twin_p = parameter(dtype=dtype), parameter(dtype=dtype)
    optimizer, twin = (LowPassOptimizer(BASES["adamw"]([q]), PAPER_FILTERS["f6"]) for q in (p, twin_p))
    expected = trajectory(twin, twin_p, gradients())
    # The process has one: a trainer of an earlier test may have left it within an accumulation, where no step is taken.
    GradientState._reset_state()
    prepared = Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert isinstance(prepared, AcceleratedOptimizer)
    first = trajectory(prepared, p, gradients()[:10])
    again = AcceleratedOptimizer(optimizer)
    assert_same(again.state_dict(), optimizer.state_dict())
    np.testing.assert_array_equal(np.concatenate([first, trajectory(again, p, gradients()[10:])]), expected)
    again.zero_grad()
    assert p.grad is None
    assert again.param_groups is optimizer.base.param_groups


def test_a_closure_is_refused():
    p = parameter()
    optimizer = LowPassOptimizer(Recorder([p]), PAPER_FILTERS["f3"])
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="closure must be None"):
        optimizer.step(lambda: 0.0)
    assert not optimizer.base.seen
    assert not optimizer.filter_state


@pytest.mark.parametrize("name", ["none", "f3"])
def test_a_sparse_gradient_is_refused_before_anything_changes(name):
    p, embedding = parameter(), torch.nn.Embedding(4, 2, sparse=True)
    p.grad = torch.ones_like(p)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = LowPassOptimizer(Recorder([p, embedding.weight]), PAPER_FILTERS[name])
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()
    assert not optimizer.base.seen
    assert not optimizer.filter_state


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda p: "adam", r"base must be a torch\.optim\.Optimizer, got 'adam'\. Build"),
        (
            lambda p: LowPassOptimizer(torch.optim.SGD([p], 0.1), PAPER_FILTERS["f3"]),
            "base must be an optimizer without a filter, got a LowPassOptimizer with f3",
        ),
        (
            lambda p: DopplerOptimizer([p], 0.1),
            "base must be an optimizer without a filter, got a DopplerOptimizer with none",
        ),
    ],
)
def test_a_bad_base_is_refused_with_the_mend(base, message):
    with pytest.raises(ValueError, match=message):
        LowPassOptimizer(base(parameter()), PAPER_FILTERS["f6"])
