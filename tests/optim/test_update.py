"""One tensor's step: in slices it is the whole one, and half precision is rounded once."""

import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim import update as module
from doppler_hf.optim.update import ParameterTensors, StepConstants, padded_coefficients, slices, update
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
            update(part, StepConstants(coefficients, **NUMBERS))
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
    update(ParameterTensors(weight, grad, []), StepConstants(coefficients, step_size=0.0015, decay=0.9985))
    assert torch.equal(weight, torch.full_like(weight, 0.99609375))
