"""The optimizer's state: saved, loaded, copied, added to in between, and of parameters of every form."""

import copy

import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from tests.support.optimizers import assert_same as assert_same_numbers
from tests.support.optimizers import doppler_optimizer, normal, parameters, saved_and_loaded
from tests.support.pairwise import pairwise
from tests.support.refusals import refused
from tests.support.tolerances import of_optimizer_steps

BASES = ["sgd", "adam", "adam_bc"]
FILTERS = ["none", "second-order"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
GALORE = {"rank": 2, "update_proj_gap": 3}
SHAPES = [(5, 7), (7, 5), (6,)]


def clones(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def optimizer_of(params, **options):
    constants = {"lr": 0.05, "low_pass_filter": PAPER_FILTERS["second-order"], "base": "adam_bc", "noise_std": 0.5}
    return doppler_optimizer(params, **constants | {"weight_decay": 0.1, "beta2": 0.98} | options)


def run(optimizer, params, steps):
    """Step with gradients that depend on the number of the step and the place of the parameter alone."""
    for t in steps:
        for index, p in enumerate(params):
            p.grad = normal(*p.shape, seed=1000 + 100 * t + index).to(p.dtype)
        optimizer.step()


def assert_same(params, optimizer, others, other):
    """To the bit."""
    assert_same_numbers([*params, *(optimizer.state[p] for p in params)], [*others, *(other.state[p] for p in others)])


@pytest.mark.parametrize(
    ("dtype", "base", "name", "galore"), pairwise(DTYPES, BASES, FILTERS, [False, True], strength=3), ids=str
)
def test_resuming_is_uninterrupted_to_the_bit(dtype, base, name, galore):
    params = parameters(*SHAPES, dtype=dtype)
    options = {"base": base, "low_pass_filter": PAPER_FILTERS[name], **(GALORE if galore else {})}
    uninterrupted = optimizer_of(params, **options)
    taken = []
    for steps in (range(3), range(3, 4), range(4, 7)):  # right before the second refresh, and right after it
        run(uninterrupted, params, steps)
        taken.append((steps.stop, clones(params), saved_and_loaded(uninterrupted.state_dict())))
    for done, resumed_params, checkpoint in taken[:2]:
        resumed = optimizer_of(resumed_params, **options)
        resumed.load_state_dict(checkpoint)
        run(resumed, resumed_params, range(done, 7))
        assert_same(resumed_params, resumed, params, uninterrupted)


@pytest.mark.parametrize(
    ("change", "code", "mend"),
    [
        ({"rank": 3}, "another-optimizer-setting", r"rank=2 \(in training arguments: optim_args"),
        ({"base": "adam"}, "another-optimizer-setting", "base='adam_bc' .*base_optimizer"),
        ({"low_pass_filter": PAPER_FILTERS["momentum"]}, "another-filter", "low_pass_filter="),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_run_is_refused_before_anything_changes(change, code, mend):
    saving_params, params = parameters(*SHAPES), parameters(*SHAPES)
    saving, loading = optimizer_of(saving_params, **GALORE), optimizer_of(params, **GALORE | change, lr=0.2)
    run(saving, saving_params, range(4))
    run(loading, params, range(5))
    params_before, before = copy.deepcopy((params, loading))
    with refused(code, match=mend):
        loading.load_state_dict(saving.state_dict())
    assert_same(params, loading, params_before, before)
    for group, group_before in zip(loading.param_groups, before.param_groups, strict=True):
        assert {**group, "params": None} == {**group_before, "params": None}


def test_a_checkpoint_of_another_optimizer_is_refused_even_before_its_first_step():
    params = parameters(*SHAPES)
    with refused("foreign-optimizer-state"):
        optimizer_of(params).load_state_dict(torch.optim.AdamW(params).state_dict())


def test_a_group_added_late_begins_anew_and_resumes():
    early, late = parameters(*SHAPES), parameters((4, 8), (3,))
    alone = clones(late)
    optimizer, fresh = optimizer_of(early, **GALORE), optimizer_of(alone, **GALORE | {"rank": 3}, lr=0.2)
    run(optimizer, early, range(4))
    optimizer.add_param_group({"params": late, "lr": 0.2, **GALORE, "rank": 3})
    for t in range(5):
        for p in early:
            p.grad = None
        run(optimizer, late, [t])
        run(fresh, alone, [t])
    assert_same(late, optimizer, alone, fresh)

    early_copies, late_copies = clones(early), clones(late)
    resumed = optimizer_of([{"params": early_copies}, {"params": late_copies, "rank": 3}], **GALORE)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for one, params in ((optimizer, early + late), (resumed, early_copies + late_copies)):
        run(one, params, range(9, 12))
    assert_same(early + late, optimizer, early_copies + late_copies, resumed)


@pytest.mark.parametrize(
    ("dtype", "base", "reordered"), pairwise(DTYPES[1:], BASES, ["both", "parameters", "gradients"]), ids=str
)
def test_parameters_and_gradients_in_another_order_of_memory(dtype, base, reordered):
    def channels_last(tensor):
        return tensor.to(memory_format=torch.channels_last)

    def transposed(tensor):
        return tensor.T.contiguous().T

    shapes, orders = [(2, 3, 4, 5), (6, 9), (9, 6)], [channels_last, transposed, transposed]
    plain = parameters(*shapes, dtype=dtype)
    others = clones(plain)
    if reordered != "gradients":
        others = [torch.nn.Parameter(order(p.detach())) for p, order in zip(plain, orders, strict=True)]
        assert not any(p.is_contiguous() for p in others)
    pair = [optimizer_of([{"params": ps[:2]}, {"params": ps[2:], **GALORE}], base=base) for ps in (plain, others)]
    for t in range(5):
        for index, (p, other, order) in enumerate(zip(plain, others, orders, strict=True)):
            p.grad = normal(*p.shape, seed=10 * t + index).to(dtype)
            other.grad = p.grad.clone() if reordered == "parameters" else order(p.grad)
        for optimizer in pair:
            optimizer.step()
    for p, other in zip(plain, others, strict=True):
        atol = of_optimizer_steps(5, largest=p.abs().max().item(), dtypes=[dtype])
        torch.testing.assert_close(other, p, atol=atol, rtol=0)


def test_a_sparse_gradient_is_refused_before_anything_changes():
    params = [*parameters((5, 7), (6,)), torch.nn.Parameter(normal(4, 3))]
    optimizer = optimizer_of(params, **GALORE)
    run(optimizer, params[:2], range(2))
    others, before = copy.deepcopy((params, optimizer))
    params[2].grad = normal(4, 3).to_sparse()
    with refused("sparse-gradient", match="sparse=False"):
        optimizer.step()
    assert params[2] not in optimizer.state
    assert torch.equal(params[2], others[2])
    assert_same(params[:2], optimizer, others[:2], before)
