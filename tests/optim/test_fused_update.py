"""A step in one kernel is the plain step. Without a GPU it is interpreted."""

import functools

import pytest
import torch

from doppler_hf import triton_support
from doppler_hf.filters import PAPER_FILTERS, butterworth
from doppler_hf.optim import DopplerOptimizer, fused_update
from doppler_hf.optim.update import ParameterTensors, StepConstants, padded_coefficients, update
from tests.support.interpreter import repair_casts
from tests.support.optimizers import normal
from tests.support.pairwise import pairwise
from tests.support.tolerances import of_optimizer_steps

BASES = ["sgd", "adam", "adam_bc"]
FILTERS = {name: PAPER_FILTERS[name] for name in ("none", "momentum", "second-order")} | {"order 4": butterworth(4, 0.2)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BESIDE = 7.0  # what lies before and after a tensor


@pytest.fixture(autouse=True)
def in_kernel(monkeypatch):
    """The way of a GPU, with few numbers in a program: small tensors are several, each of some 20 ms to interpret."""
    monkeypatch.setattr(triton_support, "are_usable", lambda device: True)
    monkeypatch.setattr(fused_update, "BLOCK", 16)
    repair_casts(monkeypatch)


@pytest.fixture
def launches(monkeypatch):
    """What each launch is compiled for."""
    kernel, found = fused_update._update, []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *table, **options: found.append(options) or kernel[grid](*table, **options)

    monkeypatch.setattr(fused_update, "_update", Recorder())
    return found


def within(numbers, before):
    """The numbers in the middle of a memory, which 16 bytes divide the beginning of."""
    memory = torch.full((before + numbers.numel() + 8,), BESIDE, dtype=numbers.dtype)
    memory[before:][: numbers.numel()] = numbers
    return memory, memory[before:][: numbers.numel()]


def tensors_of(size, *, before, order, has_v, dtype, seed):
    full = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = [normal(size, seed=seed, dtype=dtype), normal(size, seed=seed + 1, dtype=dtype)]
    numbers += [normal(size, seed=seed + 2 + index, dtype=full) for index in range(order)]
    if has_v:
        numbers.append(normal(size, seed=seed + 9, dtype=full).square())
        numbers[-1][3:4] = torch.nan
    memories, (weight, grad, *states) = zip(*(within(each, before) for each in numbers), strict=True)
    v = states.pop() if has_v else None
    return memories, ParameterTensors(weight, grad, states, v)


def in_float64(tensors):
    weight, grad, *states = (each.double() for each in tensors.of_shape)
    v = None if tensors.exp_avg_sq is None else states.pop()
    return ParameterTensors(weight, grad, states, v)


@pytest.mark.parametrize(("name", "base", "dtype"), pairwise(FILTERS, BASES, DTYPES), ids=str)
def test_a_step_of_many_tensors_is_the_plain_step_of_each(name, base, dtype):
    """Of no number, of one, of whole programs and of one number more, at addresses that are fit for vectors and not."""
    coefficients, order = padded_coefficients(FILTERS[name]), FILTERS[name].order
    if name == "order 4":  # as f6's and others', shorter than a
        coefficients = (coefficients[0][:3], coefficients[1])
    made = [(0, 8), (1, 8), (32, 8), (33, 1)]
    pairs = [
        tensors_of(size, before=before, order=order, has_v=base != "sgd", dtype=dtype, seed=20 * index)
        for index, (size, before) in enumerate(made)
    ]
    constants = [
        StepConstants(
            coefficients,
            beta2=0.9,
            step_size=0.1 + 0.1 * index,
            decay=0.97**index,
            noise_var=0.3 * (base == "adam_bc") / (1 + index),
            floor=0.01 * (1 + index),
        )
        for index in range(len(made))
    ]
    expected = [in_float64(tensors) for _, tensors in pairs]
    grads = [tensors.grad.clone() for _, tensors in pairs]
    left = fused_update.fused_update([(tensors, each) for (_, tensors), each in zip(pairs, constants, strict=True)])
    assert left == []
    for (memories, tensors), exact, grad, (size, before), each in zip(pairs, expected, grads, made, constants, strict=True):
        update([(exact, each)])
        assert torch.equal(tensors.grad, grad)
        for memory in memories:
            assert (memory[:before] == BESIDE).all()
            assert (memory[before + size :] == BESIDE).all()
        for one, other in zip(tensors.of_shape, exact.of_shape, strict=True):
            # Some ten roundings, which v - noise_var amplifies by v/floor; and one to the dtype, to the nearest.
            full = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
            atol = 2**8 * full * max(1.0, other.nan_to_num().abs().max()) if size else 0.0
            rtol = torch.finfo(one.dtype).eps / 2
            torch.testing.assert_close(one.double(), other, rtol=rtol, atol=float(atol), equal_nan=True)


def test_decay_and_step_of_half_precision_are_rounded_once_together():
    """As `update` rounds them: alone, either would be lost."""
    weight, grad = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    constants = StepConstants(((1.0,), (1.0,)), step_size=0.0015, decay=0.9985)
    assert fused_update.fused_update([(ParameterTensors(weight, grad, []), constants)]) == []
    assert torch.equal(weight, torch.full_like(weight, 0.99609375))


def test_what_one_launch_would_get_wrong_is_left():
    """Programs of a launch run at once: of two that read the same weight, one loses what the other has written."""
    memory, constants = normal(40), StepConstants(((1.0,), (1.0,)), step_size=0.1)
    places = [(10, 20), (0, 10), (10, 20), (12, 13), (19, 22), (21, 22), (22, 40)]
    weights = [memory[start:end] for start, end in places]
    steps = [(ParameterTensors(weight, torch.ones(weight.shape).double(), []), constants) for weight in weights]
    strided, grads = (torch.zeros(3, 6).T, torch.zeros(6, 3)), (torch.ones(6, 3), torch.ones(3, 6).T)
    steps += [(ParameterTensors(weight, grad, []), constants) for weight, grad in zip(strided, grads, strict=True)]
    left = {id(step) for step in fused_update.fused_update(steps)}
    assert [index for index, step in enumerate(steps) if id(step) in left] == [2, 3, 4, 5, 7, 8]


def trajectory(params, *, steps=3, **options):
    """The weights after some steps, whose rates and noise change, and the state; one parameter has no first gradient."""
    matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim < 2]
    groups = [{"params": others}, {"params": matrices, "lr": 0.02, "weight_decay": 0.0, **options.pop("galore", {})}]
    common = {"low_pass_filter": PAPER_FILTERS["second-order"], "base": "adam_bc", "noise_std": 0.5, "weight_decay": 0.1}
    optimizer = DopplerOptimizer(groups, 0.1, **common | options)
    for t in range(steps):
        optimizer.noise_std = 0.5 + 0.2 * t
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + t)
        for index, p in enumerate(params):
            p.grad = None if (t, index) == (0, 1) else normal(*p.shape, seed=10 * t + index).to(p)
        optimizer.step()
    return [p.detach() for p in params], optimizer.state_dict()


def parameters():
    tied = torch.nn.Parameter(normal(3, 5, seed=4))
    return [
        *(torch.nn.Parameter(normal(*shape, seed=index)) for index, shape in enumerate([(6, 9), (4,), (), (6, 9)])),
        # As PEFT ties adapters: the same numbers, a part of them, and transposed. Of each the step counts, in any order.
        *(tied, torch.nn.Parameter(tied.data), torch.nn.Parameter(tied.data[1:]), torch.nn.Parameter(tied.data.T)),
    ]


@pytest.mark.parametrize(
    "options", [{}, {"base": "sgd"}, {"galore": {"rank": 2, "update_proj_gap": 2}}], ids=["groups", "sgd", "GaLore"]
)
def test_an_optimizer_with_groups_of_their_own_steps_as_without_the_kernel(options, launches, monkeypatch):
    weights, state = trajectory(parameters(), **options)
    assert all(weight._version >= 2 for weight in weights)  # autograd would tell a backward pass of weights that changed
    # Rates and noise, which are new at every step, need no new program.
    assert len(launches) == 3
    assert len({tuple(options.items()) for options in launches}) == 1
    monkeypatch.setattr(triton_support, "are_usable", lambda device: False)
    expected, expected_state = trajectory(parameters(), **options)
    assert len(launches) == 3
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(weights, expected)
    close(state["state"], expected_state["state"])
    assert state["param_groups"] == expected_state["param_groups"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_on_a_gpu_it_is_the_step_of_a_cpu(dtype, monkeypatch):
    monkeypatch.undo()
    numbers = [normal(*shape, seed=index, dtype=dtype) for index, shape in enumerate([(300, 40), (5000,), (), (7, 3)])]
    here, there = (trajectory([torch.nn.Parameter(each.to(to)) for each in numbers])[0] for to in ("cpu", "cuda"))
    atol = of_optimizer_steps(3, largest=10.0, dtypes=[dtype])
    torch.testing.assert_close([each.cpu() for each in there], here, rtol=0, atol=atol)
