"""What the first pass keeps of its batch is told from what is the same of every batch, and put back."""

import collections

import numpy as np
import pytest
import torch

from doppler_hf.privacy.clipping.first_pass import FirstPass

HERE, OTHERS = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 5.0, 6.0])
MEAN = None


class Slots:
    __slots__ = ("mean",)


class Loss:
    """A loss that may read what it keeps, which is kept in one of several places."""

    of_class = None

    def __init__(self, place):
        self.place, self.mean, self.is_set, self.buffer = place, None, False, torch.zeros(3)
        self.array, self.items, self.means, self.slots = np.zeros(3), [], {}, Slots()
        self.queue, self.table, self.log = collections.deque(maxlen=2), None, []
        self.made, self.one = set(), torch.zeros(1)
        self.wide = self.one.expand(3)
        kept = None

        def in_closure(x):
            nonlocal kept
            kept = x.mean() if kept is None else kept
            return kept

        self.in_closure = in_closure

    def __call__(self, x):
        return getattr(self, self.place)(x)

    def attribute(self, x):
        self.mean = x.mean() if self.mean is None else self.mean
        return x / self.mean

    def number(self, x):
        self.mean = float(x.mean()) if self.mean is None else self.mean
        return x / self.mean

    def new_attribute(self, x):
        if not hasattr(self, "late"):
            self.late = (0, x.mean())
        return x / self.late[1]

    def in_place_by_flag(self, x):
        if not self.is_set:
            self.is_set = True
            self.buffer.fill_(x.mean())
        return x / self.buffer

    def in_array(self, x):
        if not self.array.any():
            self.array[:] = float(x.mean())
        return x / torch.from_numpy(self.array)

    def in_list(self, x):
        if not self.items:
            self.items.append(x.mean())
        return x / self.items[0]

    def in_queue(self, x):
        if not self.queue:
            self.queue.append(float(x.mean()))
        return x / self.queue[0]

    def in_mapping(self, x):
        return x / self.means.setdefault("mean", x.mean())

    def in_slot(self, x):
        if not hasattr(self.slots, "mean"):
            self.slots.mean = x.mean()
        return x / self.slots.mean

    def in_new_object(self, x):
        self.mean = {"mean": x.mean()} if self.mean is None else self.mean
        return x / self.mean["mean"]

    def closure(self, x):
        return x / self.in_closure(x)

    def variable(self, x):
        global MEAN
        MEAN = x.mean() if MEAN is None else MEAN
        return x / MEAN

    def class_attribute(self, x):
        Loss.of_class = x.mean() if Loss.of_class is None else Loss.of_class
        return x / Loss.of_class

    def truth(self, x):
        self.mean = bool(x[0] > 2.0) if self.mean is None else self.mean
        return x * 3.0 if self.mean else x

    def truths(self, x):
        self.mean = x > 2.0 if self.mean is None else self.mean
        return x * self.mean

    # Of these nothing is kept of the content that a loss reads.

    def table_beside_a_set(self, x):
        if len(x) not in self.made:
            self.means[len(x)] = torch.arange(1.0, len(x) + 1)
            self.made.add(len(x))
        return x / self.means[len(x)]

    def counted_in_a_view(self, x):
        self.buffer.zero_()
        self.one += 1
        return x + 0.0 * self.wide

    def positions(self, x):
        self.table = {"positions": torch.arange(1.0, len(x) + 1)} if self.table is None else self.table
        return x / self.table["positions"]

    def noted(self, x):
        self.log.append(x.mean())
        self.mean = x.mean()
        return x * 2.0


READ = [
    "attribute", "number", "new_attribute", "in_place_by_flag", "in_array", "in_list", "in_queue", "in_mapping", "in_slot",
    "in_new_object", "closure", "variable", "class_attribute",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(Loss, "of_class", None)
    monkeypatch.setitem(globals(), "MEAN", None)


def is_read(loss):
    return FirstPass(loss).is_read(lambda: loss(HERE), lambda: loss(OTHERS), tolerance=1e-3)


@pytest.mark.parametrize("place", READ)
def test_what_is_kept_of_the_first_batch_and_read_is_found_and_put_back(place):
    loss = Loss(place)
    assert is_read(loss)
    # As if there had been no pass: what comes next is the first one.
    torch.testing.assert_close(loss(OTHERS), (OTHERS / OTHERS.mean()).to(loss(OTHERS)))


@pytest.mark.parametrize("place", ["truth", "truths"])
def test_what_is_kept_as_a_truth_is_found(place):
    loss = Loss(place)
    assert is_read(loss)
    assert loss.mean is None


@pytest.mark.parametrize("place", ["positions", "noted", "table_beside_a_set", "counted_in_a_view"])
def test_what_is_the_same_of_every_batch_or_not_read_is_none(place):
    loss = Loss(place)
    assert not is_read(loss)
    assert loss.table is None
    assert (loss.made, loss.means, loss.one.item()) == (set(), {}, 0.0)
    assert loss(HERE).shape == HERE.shape
    loss = Loss(place)
    assert loss.mean is None
    assert loss.log == []
