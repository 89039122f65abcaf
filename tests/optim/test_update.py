"""A step: in slices or packs it is the step of the whole, and half precision is rounded once."""

import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import update as module
from doppler_hf.optim.update import ParameterTensors, StepConstants, packs, padded_coefficients, slices, update
from tests.support.optimizers import normal

NUMBERS = {"beta2": 0.9, "step_size": 0.1, "decay": 0.97, "noise_var": 0.05, "floor": 0.01}


@pytest.mark.parametrize("has_moment", [True, False])
def test_slices_make_the_step_of_the_whole(has_moment, monkeypatch):
    coefficients = padded_coefficients(PAPER_FILTERS["second-order"])

    def stepped(order=torch.Tensor.contiguous):
        weight, grad, *states = (order(normal(5, 50, seed=seed)) for seed in range(4))
        v = order(normal(5, 50, seed=4).square()) if has_moment else None
        parts = list(slices(ParameterTensors(weight, grad, states, v)))
        for part in parts:
            update([(part, StepConstants(coefficients, **NUMBERS))])
        return len(parts), [weight, *states, *([v] if has_moment else [])]

    number, whole = stepped()
    # As CPU_SLICE, a multiple of what any processor's registers hold: a number meets the same instructions in a slice as in
    # the whole, whose last few are done one by one.
    monkeypatch.setattr(module, "CPU_SLICE", 64)
    assert (number, stepped()[0], stepped(lambda tensor: tensor.T.contiguous().T)[0]) == (1, 4, 1)
    assert all(torch.equal(one, other) for one, other in zip(whole, stepped()[1], strict=True))
    assert not torch.equal(whole[0], normal(5, 50))


def test_decay_and_step_of_half_precision_are_rounded_once_together():
    # Alone, either would be lost: the next number below 1 is 0.0039 away.
    weight, grad = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    coefficients = padded_coefficients(PAPER_FILTERS["none"])
    update([(ParameterTensors(weight, grad, []), StepConstants(coefficients, step_size=0.0015, decay=0.9985))])
    assert torch.equal(weight, torch.full_like(weight, 0.99609375))


@pytest.mark.parametrize("name", ["none", "second-order"])
def test_a_pack_makes_the_steps_of_its_tensors(name, monkeypatch):
    coefficients = padded_coefficients(PAPER_FILTERS[name])
    constants = [StepConstants(coefficients, **NUMBERS | {"decay": decay}) for decay in (0.97, 1.0)]

    def steps():
        # As many numbers as a register holds, so that a number meets the same instructions wherever it is.
        made = []
        for place, size in enumerate((64, 320, 64, 128, 640, 64)):
            weight, grad, *states, v = (normal(size, seed=10 * place + i) for i in range(3 + len(coefficients[1])))
            weight = weight.bfloat16() if place == 3 else weight
            made.append(
                (ParameterTensors(weight, grad, states[: len(coefficients[1]) - 1], v.square()), constants[place % 2])
            )
        return made

    together, alone = steps(), steps()
    monkeypatch.setattr(module, "CPU_SLICE", 320)
    assert [len(pack) for pack, _ in packs(together)] == [1, 2, 1, 1, 2]
    update(together)
    for step in alone:
        update([step])
    for (one, _), (other, _) in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.of_shape, other.of_shape, strict=True))
    assert not torch.equal(together[0][0].weight, steps()[0][0].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_one_storage_are_updated_one_after_the_other(dtype):
    constants = [
        StepConstants(padded_coefficients(PAPER_FILTERS["none"]), step_size=0.5, decay=decay) for decay in (0.5, 1.0)
    ]

    def steps():
        numbers = normal(8, 8).to(dtype)
        views = (numbers, numbers.T, numbers)
        return numbers, [
            (ParameterTensors(view, normal(8, 8, seed=seed), []), constants[seed == 2]) for seed, view in enumerate(views)
        ]

    (found, together), (expected, alone) = steps(), steps()
    update(together)
    for step in alone:
        update([step])
    assert torch.equal(found, expected)
    assert not torch.equal(found, steps()[0])
