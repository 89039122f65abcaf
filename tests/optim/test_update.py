"""One tensor's step, with its constants as floats or as tensors, and in half precision."""

import pytest
import torch

from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.optim.low_pass import FixedFilter, padded_coefficients
from doppler_hf.optim.one_pass import ParameterTensors, StepConstants
from doppler_hf.optim.update import update
from tests.support.optimizers import normal

B, A = padded_coefficients(PAPER_FILTERS["second-order"])
NUMBERS = {"beta2": 0.9, "step_size": 0.1, "decay": 0.97, "noise_var": 0.05, "floor": 0.01}


def unfiltered(grad, tensors, coefficients):
    return grad


@pytest.mark.parametrize("has_moment", [True, False])
def test_constants_as_tensors_make_the_same_step(has_moment):
    def stepped(constants):
        weight, states = normal(50), [normal(50, seed=1), normal(50, seed=2)]
        moment = normal(50, seed=3).square() if has_moment else None
        update(ParameterTensors(weight, normal(50, seed=4), states, moment), constants)
        return [weight, *states, *([moment] if has_moment else [])]

    constants = StepConstants(FixedFilter.advance, (B, A), **NUMBERS)
    as_floats = stepped(constants)
    for one, other in zip(as_floats, stepped(constants.with_tensors(torch.float64, torch.device("cpu"))), strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)
    assert not torch.equal(as_floats[0], normal(50))


def test_decay_and_step_of_half_precision_are_rounded_once_together():
    # Alone, either would be lost: the next number below 1 is 0.0039 away.
    weight, grad = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    update(ParameterTensors(weight, grad, []), StepConstants(unfiltered, step_size=0.0015, decay=0.9985))
    assert torch.equal(weight, torch.full_like(weight, 0.99609375))
