"""Each way of using a layer or a parameter in the book-keeping engine: several times, tied, in place, outside its module.

A use is either right, by the loop over single examples, or refused with the name of what is to blame.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.nets import BATCH, Held, Net, check, draw, on, ready, tokens
from tests.support.per_example import (
    NORM_RULES,
    assert_equals_loop,
    assert_equals_loop_or_is_refused,
    assert_same_sums,
    book_keeping,
)


def tied(first, second):
    second.weight = first.weight
    return dict(first=first, second=second)


def norms_on_both_sides(net, x):
    return net.norm(net.linear(net.norm(x)))


# Uses of one parameter that a per-sample gradient must add up before its norm is taken.
SEVERAL_USES = {
    "linear twice in a row": (Net(lambda n, x: n.one(n.one(x).tanh()), one=nn.Linear(3, 3)), [draw(BATCH, 6, 3)]),
    "linear on two lengths": (
        Net(lambda n, x, y: torch.cat([n.one(x), n.one(y)], dim=1).tanh(), one=nn.Linear(3, 4)),
        [draw(BATCH, 6, 3), draw(BATCH, 2, 3, seed=2)],
    ),
    "linear on a vector and on tokens": (
        Net(lambda n, x, y: n.one(x) + n.one(y)[:, None].tanh(), one=nn.Linear(3, 4)),
        [draw(BATCH, 6, 3), draw(BATCH, 3, seed=2)],
    ),
    "linear whose first result is not used": (
        Net(lambda n, x: (n.one(x).relu(), n.one(x).tanh())[1], one=nn.Linear(3, 4)),
        [draw(BATCH, 6, 3)],
    ),
    "norm twice": (Net(norms_on_both_sides, norm=nn.LayerNorm(3), linear=nn.Linear(3, 3)), [draw(BATCH, 6, 3)]),
    "convolution twice": (
        Net(lambda n, x: n.one(n.one(x).tanh()), one=nn.Conv2d(4, 4, 3, padding=1)),
        [draw(BATCH, 4, 5, 5)],
    ),
    "rows looked up twice": (
        Net(lambda n, i, j: n.head(n.table(i).sum(dim=1) * n.table(j)), table=nn.Embedding(7, 3), head=nn.Linear(3, 4)),
        [tokens(BATCH, 6), tokens(BATCH)],
    ),
    "rows looked up twice, with padding": (
        Net(
            lambda n, i, j: n.head(torch.cat([n.table(i), n.table(j)], dim=1).tanh()),
            table=nn.Embedding(7, 3, padding_idx=1),
            head=nn.Linear(3, 4),
        ),
        [tokens(BATCH, 6), tokens(BATCH, 2)],
    ),
    "two linears tied": (
        Net(lambda n, x: n.second(n.first(x).tanh()), **tied(nn.Linear(3, 3), nn.Linear(3, 3))),
        [draw(BATCH, 6, 3)],
    ),
    "two tables tied": (
        Net(lambda n, i: n.first(i) * n.second(i.flip(1)), **tied(nn.Embedding(7, 3), nn.Embedding(7, 3))),
        [tokens(BATCH, 6)],
    ),
    "two tables tied, one with padding": (
        Net(lambda n, i: n.first(i) * n.second(i.flip(1)), **tied(nn.Embedding(7, 3, padding_idx=1), nn.Embedding(7, 3))),
        [tokens(BATCH, 6)],
    ),
    "table and head tied": (
        Net(lambda n, i: n.second(n.first(i).tanh()), **tied(nn.Embedding(7, 3), nn.Linear(3, 7))),
        [tokens(BATCH, 6)],
    ),
    "head of another length, and the table with padding": (
        Net(lambda n, i: n.second(n.first(i).mean(dim=1)), **tied(nn.Embedding(7, 3, padding_idx=1), nn.Linear(3, 7))),
        [tokens(BATCH, 6)],
    ),
    "table, head and head again": (
        Net(
            lambda n, i: n.second(n.third(n.second(n.first(i))).tanh()),
            **tied(nn.Embedding(7, 3), nn.Linear(3, 7)),
            third=nn.Linear(7, 3),
        ),
        [tokens(BATCH, 6)],
    ),
    "two norms tied": (
        Net(lambda n, x: n.second(n.mid(n.first(x))), **tied(nn.LayerNorm(3), nn.LayerNorm(3)), mid=nn.Linear(3, 3)),
        [draw(BATCH, 6, 3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("name", SEVERAL_USES)
def test_several_uses_of_one_parameter(name, norm_rule):
    net, inputs = SEVERAL_USES[name]
    check(net, *inputs, norm_rule=norm_rule)


# Nothing that the engine keeps may be changed by what the model does to its tensors, nor the other way round.
IN_PLACE = {
    "output": lambda n, x: n.last(n.first(x).relu_()),
    "output, twice": lambda n, x: n.last(n.first(x).mul_(2.0).add_(1.0)),
    "residual": lambda n, x: n.last(n.first(x).add_(n.other(x))),
    "masked": lambda n, x: n.last(n.first(x).masked_fill_(x[..., :1] > 0, 0.0)),
    "two readers": lambda n, x: n.last((hidden := n.first(x)) + n.middle(hidden)),
    "a slice": lambda n, x: n.last(torch.cat([n.first(x)[..., :2], n.other(x)[..., 2:]], dim=-1)),
    "detached": lambda n, x: n.last(n.first(x)) + n.last(n.middle(n.first(x).detach())) * n.last(n.other(x)).detach(),
    "transposed": lambda n, x: n.last(n.middle(n.first(x).transpose(1, 2).contiguous().transpose(1, 2))),
    "strided": lambda n, x: n.last(n.first(x)[:, ::2]),
    "expanded": lambda n, x: n.last(n.first(x)[:, :1].expand(-1, 3, -1)),
}


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("name", IN_PLACE)
def test_changes_in_place_and_views(name, norm_rule):
    parts = dict(first=nn.Linear(3, 4), other=nn.Linear(3, 4), middle=nn.Linear(4, 4), last=nn.Linear(4, 2))
    check(Net(IN_PLACE[name], **parts), draw(BATCH, 6, 3), norm_rule=norm_rule)


# --- outside of a module, or without one row for each example ------------------------------------------------------------


X, IDS = draw(BATCH, 6, 3), tokens(BATCH, 6)
# The net's forward, its only layer or parameter, which is to be named, and the net's input.
DOUBTFUL = {
    "by keyword": (lambda n, x: n.subject(input=x), nn.Linear(3, 4), X),
    "rows flattened": (lambda n, x: n.subject(x.flatten(0, 1)).unflatten(0, (-1, 6)), nn.Linear(3, 4), X),
    "tokens first": (lambda n, x: n.subject(x.transpose(0, 1)).transpose(0, 1), nn.Linear(3, 4), X),
    "pairs": (lambda n, x: sum(n.subject(torch.cat([x, x.flip(1)])).chunk(2)), nn.Linear(3, 4), X),
    "rows for the batch": (lambda n, x: x + n.subject(torch.arange(6)), nn.Embedding(7, 3), X),
    "row for the batch": (lambda n, x: x + n.subject(torch.arange(6)[None]), nn.Embedding(7, 3), X),
    "row, taken out": (lambda n, x: x + n.subject(torch.arange(6)[None])[0], nn.Embedding(7, 3), X),
    "row, squeezed": (lambda n, x: x + n.subject(torch.arange(6)[None]).squeeze(0), nn.Embedding(7, 3), X),
    "row, averaged": (lambda n, x: x + n.subject(torch.arange(6)[None]).mean(dim=0), nn.Embedding(7, 3), X),
    "row, repeated": (lambda n, x: x + n.subject(torch.arange(6)[None]).repeat(len(x), 1, 1), nn.Embedding(7, 3), X),
    "row, swapped": (lambda n, x: x + n.subject(torch.arange(6)[None]).permute(1, 0, 2)[:, 0], nn.Embedding(7, 3), X),
    "grid for the batch": (lambda n, x: x @ n.subject(torch.arange(9).view(3, 3) % 7).sum(-1), nn.Embedding(7, 3), X),
    "constant tokens": (lambda n, x: x * n.subject(torch.ones(1, 6, 3).double()), nn.Linear(3, 3), X),
    "constant vector": (lambda n, x: x * n.subject(torch.ones(3).double()), nn.Linear(3, 3), X),
    "functional": (lambda n, x: F.linear(x, n.subject.weight), nn.Linear(3, 4), X),
    "functional and not": (lambda n, x: F.linear(n.subject(x), n.subject.weight), nn.Linear(3, 3), X),
    "functional tying": (lambda n, i: F.linear(n.subject(i), n.subject.weight), nn.Embedding(7, 3), IDS),
    "functional bias": (lambda n, x: n.subject(x) + n.subject.bias, nn.Linear(3, 4), X),
    "penalty": (lambda n, x: n.subject(x) + n.subject.weight.square().sum(), nn.Linear(3, 4), X),
    "in a list": (lambda n, x: x * n.subject[0], nn.ParameterList([nn.Parameter(torch.ones(3))]), X),
}


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize(
    ("name", "size"),
    # 3 is also the number of features, 6 that of tokens. With as many tokens as examples, and the tokens first, there is
    # nothing to tell them apart by.
    [(name, size) for name in DOUBTFUL for size in (5, 3, 6) if (name, size) != ("tokens first", 6)],
)
def test_a_doubtful_use_is_right_or_refused(name, norm_rule, size):
    run, subject, inputs = DOUBTFUL[name]
    inputs = inputs.repeat(2, *(1 for _ in inputs.shape[1:]))[:size]
    net = ready(Net(run, subject=subject))
    assert_equals_loop_or_is_refused(net, on(net, inputs), size, naming="subject", norm_rule=norm_rule)


RARE = -9.0


def give_rare_rows_to_their_own_layer(net, x):
    rare = (x == RARE).all(dim=2)
    h = net.common(x)
    return h.index_put((rare,), h[rare] + net.rare(x[rare])).sum(dim=1)


@pytest.mark.parametrize("of", [0, 2, 5])
def test_rows_of_a_layer_are_not_taken_for_examples_if_they_are_as_many(of):
    """As those of an expert of rare tokens, all of which are one example's."""
    net = ready(Net(give_rare_rows_to_their_own_layer, common=nn.Linear(3, 4), rare=nn.Linear(3, 4)))
    batch = 6
    inputs = draw(batch, 6, 3)
    inputs[of] = RARE
    examined = torch.arange(batch) == of
    with book_keeping(net) as clipped:
        assert clipped.coupled(net(inputs).sum(dim=1), examined=examined) == ["rare.weight", "rare.bias"]


def test_a_forward_that_somebody_replaced_on_the_module_is_kept():
    """accelerate and others hang their own function on a module, under the name `forward`."""
    net = ready(Net(lambda n, x: n.last(n.first(x)), first=nn.Linear(3, 4), last=nn.Linear(4, 2)))
    original = net.first.forward
    net.first.forward = lambda x: original(x).tanh()
    replaced = net.first.forward
    assert_equals_loop_or_is_refused(net, on(net, draw(BATCH, 6, 3)), BATCH, naming="first")
    assert net.first.forward is replaced


def test_hooks_of_others_are_kept():
    net = ready(Net(lambda n, x: n.last(n.first(x)), first=nn.Linear(3, 4), last=nn.Linear(4, 2)))
    net.first.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    net.first.register_forward_hook(lambda module, args, output: output.tanh() * args[0].sum(dim=-1, keepdim=True))
    assert_equals_loop(net, on(net, draw(BATCH, 6, 3)), BATCH)


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_an_ordinary_backward_pass_in_between_is_not_counted(on_accelerator):
    net, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double(), draw(5, 6, 3)
    losses = lambda: net(x).flatten(1).square().sum(dim=1)  # noqa: E731
    sums = []
    for passes in (0, 1):
        with book_keeping(net, on_accelerator=on_accelerator) as clipped:
            for _ in range(passes):
                losses().sum().backward()
            clipped.backward(losses())
            sums.append(clipped.sums)
    assert_same_sums(*sums)


def test_an_unused_layer_contributes_nothing():
    net = ready(Net(lambda n, x: n.used(x), used=nn.Linear(3, 4), unused=nn.Linear(3, 4)))
    assert_equals_loop(net, on(net, draw(BATCH, 3)), BATCH, granularity="per_layer")


@pytest.mark.parametrize("freeze_base", [False, True])
def test_parameters_in_a_list_or_a_dictionary_are_those_of_the_layer_around_them(freeze_base):
    net = ready(Net(lambda n, x: n.last(n.held(x).tanh()), held=Held(), last=nn.Linear(4, 2)))
    net.held.base.requires_grad_(not freeze_base)
    before = [(name, id(parameter)) for name, parameter in net.named_parameters()]
    assert_equals_loop(net, on(net, draw(BATCH, 6, 3)), BATCH)
    assert [(name, id(parameter)) for name, parameter in net.named_parameters()] == before
