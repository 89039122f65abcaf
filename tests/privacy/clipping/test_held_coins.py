"""What torch draws is at its mean, and what cannot be is told."""

import math

import pytest
import torch
from torch.nn import functional as F

from doppler_hf.privacy.clipping.held_coins import HeldCoins

X = torch.linspace(-1.0, 1.0, 12).view(4, 3)


def attended(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None])


HELD = {
    "dropout": (lambda: F.dropout(X, 0.3), X),
    "dropout of channels": (lambda: F.dropout2d(X[None, :, None], 0.3), X[None, :, None]),
    "fused dropout": (lambda: torch.native_dropout(X, 0.5, True)[0], 2 * X),
    "bernoulli": (lambda: torch.bernoulli(torch.tensor([0.2, 0.7])), torch.tensor([0.0, 1.0])),
    "uniform": (lambda: torch.empty(2).uniform_(-1, 2), torch.full((2,), 0.5)),
    "rand": (lambda: torch.rand(2), torch.full((2,), 0.5)),
    "rand_like": (lambda: torch.rand_like(X), torch.full((4, 3), 0.5)),
    "randn": (lambda: torch.randn(2), torch.zeros(2)),
    "normal": (lambda: torch.empty(2).normal_(3, 1), torch.full((2,), 3.0)),
    "exponential": (lambda: torch.empty(2).exponential_(0.5), torch.full((2,), 2.0)),
    "attention": (lambda: attended(X), attended(X)),
}


@pytest.mark.parametrize("name", HELD)
def test_numbers_are_held_at_their_mean(name):
    draw, expected = HELD[name]
    with HeldCoins() as held:
        torch.testing.assert_close(draw(), expected)
    assert held.are_all_held


OFF = {
    "uniform": torch.full((2,), 1.25),
    "rand": torch.full((2,), 0.75),
    "rand_like": 0.5 + 0.25 * torch.tensor([1.0, math.cos(1.0), math.cos(2.0)]).expand(4, 3),
    "randn": torch.ones(2),
    "normal": torch.full((2,), 4.0),
    "exponential": torch.full((2,), 4.0),
}


@pytest.mark.parametrize("name", HELD)
def test_numbers_are_held_off_their_mean_and_coins_at_it(name):
    draw, expected = HELD[name]
    with HeldCoins(off_mean=True) as held:
        torch.testing.assert_close(draw(), OFF.get(name, expected))
    assert held.are_all_held


def test_the_gradient_is_that_without_dropout():
    x = X.clone().requires_grad_()
    with HeldCoins():
        F.dropout(x, 0.3).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * X)


@pytest.mark.parametrize(
    "draw", [lambda: torch.randperm(8), lambda: torch.randint(0, 9, (8,)), lambda: torch.multinomial(X.exp(), 1)]
)
def test_an_order_and_a_choice_are_left_and_told(draw):
    with HeldCoins() as held:
        draw()
    assert not held.are_all_held


def test_what_rows_share_can_be_left():
    with HeldCoins(rows=5):
        assert torch.equal(torch.rand(5, 2), torch.full((5, 2), 0.5))
        assert not torch.equal(torch.rand(7), torch.full((7,), 0.5))
