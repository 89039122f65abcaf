"""Numbers that rows share are told from those of each row by how many are drawn, whatever comes out."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from doppler_hf.privacy import shared_coins
from doppler_hf.privacy.generators import filled_generators
from doppler_hf.privacy.shared_coins import drawn_in_forward, is_shared_in_collation, numbers_drawn
from tests.support.tiers import further


class Layers(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Linear(3, 3), draw
        self.inner.register_forward_hook(lambda module, inputs, output: self.draw(output))

    def forward(self, rows):
        return self.inner(torch.ones(rows, 3))


def over_rows(x):
    return [F.dropout(row, 0.1) for row in x]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.1),
        lambda x: torch.rand(len(x), 1, 1),
        lambda x: x.new_empty(4, len(x)).uniform_(),
        lambda x: F.dropout2d(x[:, None, None], 0.1),
        over_rows,
        lambda x: None,
    ],
)
def test_numbers_of_each_row_are_no_shared_ones(draw):
    model = Layers(draw)
    assert drawn_in_forward(model, model).shared == []


@pytest.mark.parametrize(
    ("draw", "place"),
    [
        (lambda x: torch.rand([]), "in the layer 'inner' (Linear)"),
        (lambda x: F.dropout(torch.ones(1, 3), 0.1), "in the layer 'inner' (Linear)"),
        (lambda x: F.dropout(torch.ones(11), 0.1), "in the layer 'inner' (Linear)"),
        (lambda x: torch.randperm(len(x)), "in the layer 'inner' (Linear)"),
        (lambda x: np.random.rand(), "from NumPy"),
        (lambda x: random.random(), "from Python's random"),
    ],
)
def test_shared_numbers_are_named_by_their_place(draw, place):
    model = Layers(draw)
    assert drawn_in_forward(model, model).shared == [place]


def test_a_number_that_the_loss_draws_is_in_no_layer():
    model = Layers(lambda x: None)
    assert drawn_in_forward(model, lambda rows: (model(rows), torch.rand(()))).shared == ["in the loss"]


def spans(rows):
    """Masks as for whole words: the number of words drawn is random, and another for each row."""
    for _ in range(rows):
        for _ in range(random.randint(1, 2)):
            random.random()
        if np.random.rand() < 0.3:
            np.random.randint(0, 5, size=3)


OF_EACH_ROW = {
    "nothing": lambda rows: None,
    "bernoulli": lambda rows: torch.bernoulli(torch.full((rows, 9), 0.15)),
    "spans": spans,
    "normal": lambda rows: np.random.normal(size=rows),
    "uniform": lambda rows: [random.uniform(0, 1) for _ in range(rows)],
    "torch, now and then": lambda rows: [torch.rand(2) for _ in range(rows) if torch.rand(()) < 0.1],
}
OF_ALL_ROWS = {
    "torch": lambda rows: torch.rand(()),
    "NumPy": lambda rows: np.random.rand(),
    "Python": lambda rows: random.random(),
    "a choice": lambda rows: random.choice([1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("name", OF_EACH_ROW)
def test_a_batch_whose_rows_have_numbers_of_their_own(name, all_trials):
    assert not is_shared_in_collation(OF_EACH_ROW[name])


# Where rows draw of the same generator, and not always as many, the one number is within what they vary by: so many trials
# bring it nine standard errors off, where four refuse.
NOISY = {
    ("NumPy", "normal"): 1200,
    ("NumPy", "spans"): 1800,
    ("Python", "spans"): 800,
    ("a choice", "spans"): 2200,
    ("torch", "torch, now and then"): 800,
}


@pytest.mark.parametrize(("of_all", "of_row"), further(sorted({*itertools.product(OF_ALL_ROWS, OF_EACH_ROW)} - {*NOISY})))
def test_a_number_for_all_rows_is_seen_beside_those_of_each(of_all, of_row):
    assert is_shared_in_collation(lambda rows: (OF_ALL_ROWS[of_all](rows), OF_EACH_ROW[of_row](rows)))


@pytest.mark.parametrize(("of_all", "of_row"), further([*NOISY], quick=[("Python", "spans")]))
def test_a_number_for_all_rows_is_seen_where_each_row_draws_another_number_of_times(of_all, of_row, monkeypatch):
    monkeypatch.setattr(shared_coins, "_TRIALS", NOISY[of_all, of_row])
    monkeypatch.setattr(shared_coins, "_SECONDS", math.inf)
    assert is_shared_in_collation(lambda rows: (OF_ALL_ROWS[of_all](rows), OF_EACH_ROW[of_row](rows)))


@pytest.mark.parametrize("count", [0, 1, 623, 624, 625, 2000])
def test_words_are_counted_across_twists(count):
    with filled_generators(None):
        assert numbers_drawn(lambda: (torch.rand(count), [np.random.rand() for _ in range(count)])) == (count, 2 * count, 0)
        assert numbers_drawn(lambda: [random.getrandbits(32) for _ in range(count)]) == (0, 0, count)
