"""What a forward pass writes into trained parameters is seen, by whichever way it is written."""

import pytest
import torch
from torch import nn

from doppler_hf.privacy.clipping.writes import Untouched


def written_in_place(weight):
    with torch.no_grad():
        weight.mul_(1.0 + 2**-6)


def behind_autograd(weight):
    weight.data[0] += 0.01


def to_either_side(weight):
    weight.data.view(-1)[:2] = torch.tensor([0.30, -0.30], dtype=weight.dtype)  # as many steps of rounding up as down


def two_zeros(weight):
    weight.data.view(-1)[-2:] = 0.01


def in_other_places(weight):
    with torch.no_grad():
        weight.copy_(weight.flip(0))


def replaced(weight):
    weight.data = weight.data.clone().add_(0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "write",
    [written_in_place, behind_autograd, to_either_side, two_zeros, in_other_places, replaced],
)
def test_a_written_weight_is_named(write, dtype):
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("first", "second")}).to(dtype)
    with torch.no_grad():
        model["second"].weight.view(-1)[:] = torch.tensor([0.29, -0.29, 0.5, -0.7, 0.0, 0.0])
    untouched = Untouched(model)
    untouched.check()
    write(model["second"].weight)
    with pytest.raises(ValueError, match=r"writes the trained parameter 'second\.weight', which would keep statistics"):
        untouched.check()


def test_a_weight_may_begin_within_a_word():
    """As a view into a larger tensor does."""
    model = nn.Linear(3, 3, bias=False)
    model.weight = nn.Parameter(torch.arange(10.0)[1:].view(3, 3))
    untouched = Untouched(model)
    untouched.check()
    model.weight.data[2, 2] += 1.0
    with pytest.raises(ValueError, match="writes the trained parameter 'weight'"):
        untouched.check()


def test_what_is_no_number_is_itself():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    Untouched(model).check()


def test_frozen_weights_are_for_others_to_look_at():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    untouched = Untouched(model)
    model.bias.data += 1.0
    untouched.check()
