"""Small nets for the book-keeping engine, and the check of one against a loop over single examples.

A net returns one row for each example. Its loss is the row's product with fixed random numbers plus half of its square, so
that the gradients of the output depend on the output and differ between examples.
"""

import torch
from torch import nn

from tests.support.per_example import assert_equals_loop

BATCH = 5


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape, upto=7):
    return torch.randint(0, upto, shape, generator=torch.Generator().manual_seed(2))


def ready(net):
    """Return the net in float64, with parameters that are not their initial values."""
    torch.manual_seed(0)
    net = net.double().train()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return net


def on(net, *inputs):
    """Return the function from rows of the inputs to the losses of the net."""

    def losses(index):
        output = net(*(value[index] for value in inputs)).flatten(1)
        return (output * draw(len(inputs[0]), output.shape[1], seed=3)[index] + output.square() / 2).sum(dim=1)

    return losses


def check(net, *inputs, **options):
    ready(net)
    return assert_equals_loop(net, on(net, *inputs), len(inputs[0]), **options)


class Net(nn.Module):
    """A module of the given parts, whose forward is the function `run(parts, *inputs)`."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


class Held(nn.Module):
    """A layer that keeps its parameters in a list and a dictionary, around another layer, as adapters do."""

    def __init__(self, shared=None):
        super().__init__()
        self.base = nn.Linear(3, 4)
        self.low_rank = nn.ParameterList([nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 4))])
        self.scales = nn.ParameterDict({"default": torch.ones(4)}) if shared is None else shared

    def forward(self, x):
        return (self.base(x) + x @ self.low_rank[0] @ self.low_rank[1]) * self.scales["default"]
