"""`nn.RNN`, `nn.LSTM` and `nn.GRU`, against a loop over single examples and against torch's own forward."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.nets import Net, check, draw, on, ready
from tests.support.per_example import (
    NORM_RULES,
    assert_equals_loop,
    assert_equals_loop_or_is_refused,
    assert_refused,
    book_keeping,
)

BATCH, TIME = 5, 6
EXACT = dict(atol=1e-10, rtol=1e-10)
X, LENGTHS = draw(BATCH, TIME, 3), torch.tensor([4, 6, 1, 2, 6])


def flat(output, state):
    """All that a layer returns, with the batch first."""
    states = state if isinstance(state, tuple) else (state,)
    return torch.cat([output.flatten(1), *(each.transpose(0, 1).flatten(1) for each in states)], dim=1)


def plain(net, x):
    hidden = net.first(x)
    output, state = net.layer(hidden if net.layer.batch_first else hidden.transpose(0, 1))
    return flat(output if net.layer.batch_first else output.transpose(0, 1), state)


def started(net, x):
    start = net.start(x[:, 0]).unflatten(1, (2, -1)).transpose(0, 1)
    starts = (start, start.tanh()) if isinstance(net.layer, nn.LSTM) else start
    return flat(*net.layer(input=net.first(x), hx=starts))


def packed(net, x, lengths):
    rows = pack_padded_sequence(net.first(x), lengths, batch_first=True, enforce_sorted=False)
    output, state = net.layer(rows)
    return flat(pad_packed_sequence(output, batch_first=True, total_length=TIME)[0], state)


def net_of(layer, run=plain):
    return Net(run, first=nn.Linear(3, 4), layer=layer, start=nn.Linear(3, 2 * 5))


KINDS = [nn.RNN, nn.LSTM, nn.GRU]
LAYERS = {
    "plain": (dict(batch_first=True), plain),
    "time first": (dict(), plain),
    "without bias": (dict(batch_first=True, bias=False), plain),
    "two layers in two directions": (dict(num_layers=2, bidirectional=True), plain),
    "a given state": (dict(batch_first=True, bidirectional=True), started),
    "packed": (dict(batch_first=True, num_layers=2, bidirectional=True), packed),
}


def assert_is_torchs(net, *inputs):
    own = ready(net)(*inputs)
    with book_keeping(net):
        torch.testing.assert_close(net(*inputs), own, **EXACT)
    assert not assert_equals_loop(net, on(net, *inputs), BATCH, tolerance=EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_recurrence_is_that_of_torch_and_its_gradients_are_those_of_each_example(name, kind):
    options, run = LAYERS[name]
    assert_is_torchs(net_of(kind(4, 5, **options), run), *((X, LENGTHS) if run is packed else (X,)))


def test_the_smaller_kinds():
    assert_is_torchs(net_of(nn.LSTM(4, 5, proj_size=2, batch_first=True)), X)
    assert_is_torchs(net_of(nn.RNN(4, 5, nonlinearity="relu", batch_first=True)), X)


@pytest.mark.parametrize("norm_rule", NORM_RULES)
def test_each_way_to_the_norm(norm_rule):
    check(net_of(nn.GRU(4, 5, batch_first=True)), X, norm_rule=norm_rule, tolerance=EXACT)


def test_packed_rows_keep_their_order():
    """Sorted by the caller or by torch: code that works on the packed data finds its rows where they were."""
    for lengths, is_sorted in ((LENGTHS, False), (LENGTHS.sort(descending=True).values, True)):
        rows = pack_padded_sequence(X, lengths, batch_first=True, enforce_sorted=is_sorted)
        net = ready(Net(lambda n, x, rows=rows: n.layer(rows)[0].data, layer=nn.GRU(3, 5, batch_first=True)))
        own = net(X)
        with book_keeping(net):
            torch.testing.assert_close(net(X), own, **EXACT)


@pytest.mark.parametrize("batch", [1, 2, TIME])  # as many as there are layers, or steps
def test_the_batch_is_read_from_batch_first(batch):
    check(net_of(nn.GRU(4, 5, num_layers=2)), draw(batch, TIME, 3), tolerance=EXACT)


def test_dropout_between_layers_is_drawn_in_training_alone():
    net = ready(net_of(nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True)))
    with book_keeping(net):
        torch.manual_seed(3)
        own = net(X)
        assert not torch.equal(own, net(X))
        torch.manual_seed(3)
        assert torch.equal(own, net(X))
        assert torch.equal(net.eval()(X), net(X))


def test_a_part_of_it_is_trained():
    net = ready(net_of(nn.GRU(4, 5, batch_first=True)))
    net.layer.requires_grad_(False).weight_hh_l0.requires_grad_(True)
    assert_equals_loop(net, on(net, X), BATCH, tolerance=EXACT)


def test_an_input_without_a_batch_is_refused():
    net = ready(Net(lambda n, x: n.layer(x)[0], layer=nn.GRU(3, 5, batch_first=True)))
    assert_refused(
        "no-per-sample-gradient", net, on(net, draw(BATCH, 3)), BATCH, match=r"layer\.weight_hh_l0.* 2 dimensions"
    )


def test_a_weight_that_is_computed_is_right_or_refused():
    net = ready(net_of(nn.GRU(4, 5, batch_first=True)))
    prune.l1_unstructured(net.layer, "weight_hh_l0", amount=1)
    assert_equals_loop_or_is_refused(net, on(net, X), BATCH, naming="layer")
