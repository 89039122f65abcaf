"""Each kind of layer, and each way of using one, in the book-keeping engine against a loop over single examples."""

import pytest
import torch
from opacus.layers import DPGRU
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping.torch_layers import _patches
from tests.support.layers import IMAGE, LAYERS
from tests.support.nets import BATCH, Net, check, draw, on, ready, tokens
from tests.support.per_example import (
    NORM_RULES,
    TOLERANCE,
    assert_equals_loop,
    assert_equals_loop_or_is_refused,
    assert_same_sums,
    book_keeping,
    clip_and_sum,
    compare_with_autograd,
    gradients_of_each,
    norms_of,
)
from tests.support.refusals import refused

# --- kinds of layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("kernel_size", "stride", "padding", "dilation"),
    [
        ((1, 1), (1, 1), (0, 0), (1, 1)),
        ((3, 2), (1, 1), (1, 0), (1, 1)),
        ((2, 3), (2, 3), (1, 2), (1, 1)),
        ((3, 2), (1, 2), (2, 3), (2, 4)),
        ((2, 2), (5, 3), (0, 0), (3, 2)),
    ],
)
def test_patches_are_those_of_unfold(kernel_size, stride, padding, dilation, memory_format):
    inputs = draw(BATCH, 3, 9, 11).contiguous(memory_format=memory_format)
    found = _patches(inputs, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
    assert torch.equal(found, F.unfold(inputs, kernel_size, dilation, padding, stride))


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_kind_of_layer(name, norm_rule):
    net, inputs = LAYERS[name]
    check(net, inputs, norm_rule=norm_rule)


# No promise to support these; but a wrong gradient would be worse than none.
OTHERS = {
    "circular padding": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    "reflected padding": (nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"), draw(BATCH, 4, 9)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), IMAGE),
    "bag": (nn.EmbeddingBag(7, 3, mode="mean"), tokens(BATCH, 6)),
    "scaled by frequency": (nn.Embedding(7, 3, scale_grad_by_freq=True), tokens(BATCH, 6)),
    "sparse": (nn.Embedding(7, 3, sparse=True), tokens(BATCH, 6)),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), draw(BATCH, 3)),
    "pruned": (prune.l1_unstructured(nn.Linear(3, 4), "weight", amount=2), draw(BATCH, 3)),
    "pruned bias": (prune.l1_unstructured(nn.Linear(3, 4), "bias", amount=2), draw(BATCH, 3)),
    "parametrized bias": (parametrize.register_parametrization(nn.Linear(3, 4), "bias", nn.Tanh()), draw(BATCH, 3)),
    "recurrence of Opacus": (Net(lambda n, x: n.subject(x)[0], subject=DPGRU(4, 3, batch_first=True)), draw(BATCH, 6, 4)),
    "pruned convolution": (prune.l1_unstructured(nn.Conv2d(4, 6, 3), "weight", amount=9), IMAGE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_layer_is_right_or_refused(name):
    layer, inputs = OTHERS[name]
    net = layer if isinstance(layer, Net) else Net(lambda n, x: n.subject(x), subject=layer)
    assert_equals_loop_or_is_refused(ready(net), on(net, inputs), BATCH, naming="subject")


# --- layers without a rule of their own ----------------------------------------------------------------------------------


def own(run, *shape, **parts):
    """A layer with a weight of its own, which no other layer has."""
    return Net(run, weight=nn.Parameter(torch.zeros(*shape)), **parts)


def exponential(features=4):
    return own(lambda n, x: x * n.weight.exp(), features)


class Mixture(nn.Module):
    """Tensors by keyword, one of which needs a gradient, and an argument that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x, *, other, power=1):
        return x * self.weight.sigmoid() ** power + other * (1 - self.weight.sigmoid())


def mixed(net, x):
    hidden = net.first(x)
    return net.own(hidden, other=hidden.tanh(), power=2)


def behind(layer, run=lambda n, x: n.own(n.first(x))):
    return Net(run, first=nn.Linear(3, 4), own=layer)


def of_two_results():
    return own(lambda n, x: (x @ n.weight, (x @ n.weight.T).tanh()), 4, 4)


def tokens_then_mean(n, x):
    return n.own(n.first(x).mean(dim=1)) + n.own(n.first(x)).sum(dim=1)


def mean_then_tokens(n, x):
    return n.own(n.own(n.first(x).mean(dim=1))[:, None] + n.first(x))


OWN = {
    "exponential": behind(exponential()),
    "at the input": Net(lambda n, x: n.last(n.own(x)), own=exponential(3), last=nn.Linear(3, 4)),
    "twice": behind(exponential(), lambda n, x: n.own(n.own(n.first(x)).tanh())),
    "keywords": behind(Mixture(), mixed),
    "two results": behind(of_two_results(), lambda n, x: torch.cat(n.own(n.first(x)), dim=-1)),
    "one of two results": behind(of_two_results(), lambda n, x: n.own(n.first(x))[1]),
    # As many layers of transformers return it, and those that compress a long past of a short one.
    "a result and nothing": behind(own(lambda n, x: (x @ n.weight.T, None), 4, 4), lambda n, x: n.own(n.first(x))[0]),
    "a result and an empty one": behind(
        own(lambda n, x: (x * n.weight.exp(), x[..., :0]), 4), lambda n, x: n.own(n.first(x))[0]
    ),
    "tokens, then their mean": behind(exponential(), tokens_then_mean),
    "the mean, then tokens": behind(exponential(), mean_then_tokens),
    "buffer": behind(own(lambda n, x: (x + n.shift) * n.weight, 4, shift=nn.Buffer(torch.ones(4)))),
    "activation": behind(nn.PReLU()),
}


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("name", OWN)
def test_a_layer_without_a_rule_is_right_and_named(name, norm_rule):
    fallbacks = check(OWN[name], draw(BATCH, 6, 3), norm_rule=norm_rule)
    assert "own" in fallbacks
    assert all(isinstance(text, str) for text in fallbacks.values())
    assert not {"first", "last"} & fallbacks.keys()


class Positions(nn.Embedding):
    """Of shape (length, dimension), as Blenderbot's."""

    def forward(self, length):
        return super().forward(torch.arange(length))


class PositionsOfIds(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 2)


class PositionsBesideIds(nn.Embedding):
    """Of shape (1, length, dimension), as those of BART's decoder, which has both."""

    def forward(self, ids, positions):
        return super().forward(positions[None] + 2)


@pytest.mark.parametrize(
    "net",
    [
        Net(lambda n, x: n.first(x) + n.own(x.shape[1]), first=nn.Linear(3, 4), own=Positions(9, 4)),
        Net(lambda n, x: n.first(x) + n.own(torch.arange(x.shape[1])), first=nn.Linear(3, 4), own=PositionsOfIds(9, 4)),
    ],
    ids=["of a length", "of indices"],
)
def test_positions_without_a_batch_are_right_in_every_batch(net):
    """The second batch has as many examples as positions, which must not be taken for them; the third has one position."""
    ready(net)
    batches = [on(net, draw(*shape)) for shape in ((BATCH, 6, 3), (6, 6, 3), (6, 1, 3), (1, 1, 3))]
    expected = [
        norms_of(gradients_of_each(net, losses, size)) for losses, size in zip(batches, (BATCH, 6, 6, 1), strict=True)
    ]
    with ClippedGradients(net, max_grad_norm=1.0) as clipped:
        for losses, norms in zip(batches, expected, strict=True):
            torch.testing.assert_close(clipped.backward(losses(slice(None))), norms, **TOLERANCE)


@pytest.mark.parametrize("sizes", [(6, 5, 6), (5, 6), (1, 6)])
def test_positions_beside_the_batch_are_right_if_the_first_batch_is_as_large_as_their_number(sizes):
    run = lambda n, x: n.first(x) + n.own(x[..., 0].long(), torch.arange(x.shape[1]))  # noqa: E731
    net = ready(Net(run, first=nn.Linear(3, 4), own=PositionsBesideIds(9, 4)))
    losses = [on(net, draw(size, 6, 3)) for size in sizes]
    expected = [norms_of(gradients_of_each(net, each, size)) for each, size in zip(losses, sizes, strict=True)]
    with ClippedGradients(net, max_grad_norm=1.0) as clipped:
        for each, norms in zip(losses, expected, strict=True):
            torch.testing.assert_close(clipped.backward(each(slice(None))), norms, **TOLERANCE)


def test_a_layer_with_a_result_for_each_row_is_refused_by_name():
    layer = own(lambda n, x: [row * n.weight.exp() for row in x], 4)
    net = ready(behind(layer, lambda n, x: torch.stack(n.own(n.first(x)))))
    with refused("layer-without-rule", match=r"'own' \(Net\)"):
        assert_equals_loop(net, on(net, draw(BATCH, 6, 3)), BATCH)


@pytest.mark.parametrize("batch", [5, 6])  # 6 is the number of tokens, too
@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 1, 3), (6, 3), ()])
@pytest.mark.parametrize("inside", [False, True])
def test_a_bare_parameter_beside_children_is_right_or_refused(inside, shape, batch):
    net = Net(lambda n, x: x + n.scale * n.linear(x), linear=nn.Linear(3, 3), scale=nn.Parameter(torch.ones(shape)))
    if inside:
        net = nn.Sequential(nn.Linear(3, 3), net, nn.Tanh())
    assert_equals_loop_or_is_refused(ready(net), on(net, draw(batch, 6, 3)), batch, naming="scale")


@pytest.mark.parametrize("batch", [2, 5, 6])
@pytest.mark.parametrize("weight", [1.0, 1e-4])  # of the parameter in the result
@pytest.mark.parametrize(
    "use",
    [lambda p: p[0], lambda p: p.squeeze(0), lambda p: p.mean(dim=0), lambda p: p.sum(dim=(0, 1)), lambda p: p[:, :1]],
    ids=["first", "squeezed", "mean", "sum", "slice"],
)
def test_a_bare_parameter_that_is_taken_apart_is_right_or_refused(use, weight, batch):
    run = lambda n, x: n.linear(x) + weight * use(n.scale) * x  # noqa: E731
    net = ready(Net(run, linear=nn.Linear(3, 3), scale=nn.Parameter(torch.ones(1, 6, 3))))
    assert_equals_loop_or_is_refused(net, on(net, draw(batch, 6, 3)), batch, naming="scale", granularity="per_layer")


@pytest.mark.parametrize("lengths", [(6, 1), (1, 6), (6, 4, 1), (4, 6)])
@pytest.mark.parametrize(
    ("run", "shape"),
    [(lambda n, x: torch.tanh(x + n.weight[: x.shape[1]]), (6, 3)), (lambda n, x: x * n.weight, (3,))],
    ids=["positions, as many as tokens", "scale"],
)
@pytest.mark.parametrize("batch", [2, 5, 8])
def test_a_layer_that_is_called_with_other_lengths_than_at_first_is_right(run, shape, lengths, batch):
    """A slice of its parameter may be of the batch of copies: of one token it was the copy of the first example."""
    net = ready(Net(lambda n, x: n.own(n.first(x)), first=nn.Linear(3, 3), own=own(run, *shape)))
    losses = [on(net, draw(batch, length, 3)) for length in lengths]
    expected = [clip_and_sum(gradients_of_each(net, each, batch), max_grad_norm=0.1) for each in losses]
    with book_keeping(net, max_grad_norm=0.1) as clipped:
        for each, sums in zip(losses, expected):
            clipped.reset()
            clipped.backward(each(slice(0, batch)))
            assert_same_sums(clipped.sums, sums)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_layer_is_not_taken_for_elementwise_because_its_effect_is_small(batch):
    # A row of a table, by its index: nothing that acts elementwise, though it may look so.
    check(behind(own(lambda n, x: x + 1e-4 * n.weight[0] * x.square(), 2, 4)), draw(batch, 3))


def test_a_tensor_that_the_batch_shares_is_refused():
    net = ready(Net(lambda n, x: n.own(n.first(x), other=draw(6, 4, seed=7)), first=nn.Linear(3, 4), own=Mixture()))
    assert_equals_loop_or_is_refused(net, on(net, draw(5, 6, 3)), 5, naming="own")
    x = draw(6, 6, 3)  # as many examples as it has rows
    options = dict(alone=[{"x": row[None]} for row in x], together={"x": x})
    with refused("wrong-gradients", match="'own.*'"):
        compare_with_autograd(net, lambda inputs: net(inputs["x"]).flatten(1).sum(dim=1), **options)


class Table(nn.Module):
    """Called without a batch, with a layer within it, whose weight it may name as its own."""

    def __init__(self, *, is_named):
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.ones(1, 4)), nn.Linear(4, 4, bias=False)
        if is_named:
            self.weight = self.inner.weight

    def forward(self):
        return self.table @ self.inner.weight.T


@pytest.mark.parametrize("is_named", [False, True])
def test_a_layer_within_one_that_is_called_without_a_batch_is_refused(is_named):
    net = Net(lambda n, x: n.out(x + n.positions()), positions=Table(is_named=is_named), out=nn.Linear(4, 3))
    inputs = draw(BATCH, 4)
    with refused("no-per-sample-gradient", match=r"positions\.(table|inner)"):
        check(net, inputs)
