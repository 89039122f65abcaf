"""Networks that nobody chose: both engines against Opacus's own hooks, in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn

from doppler_hf.privacy import ClippedGradients
from tests.support.per_example import (
    CLIPPINGS,
    GRANULARITIES,
    NORM_RULES,
    TOLERANCE,
    assert_same_sums,
    clip_and_sum,
    norms_of,
)

VOCABULARY = 7


def sizes(most):
    return st.integers(1, most)


@st.composite
def token_layers(draw):
    """Layers on (batch, length, features), and the shape of one example; features is None for tokens."""
    features = draw(sizes(6))
    length = draw(sizes(7))
    first = draw(st.sampled_from(["vectors", "tokens", "tokens with padding"]))
    layers = []
    if first != "vectors":
        padding_idx = draw(st.integers(0, VOCABULARY - 1)) if first == "tokens with padding" else None
        layers.append(nn.Embedding(VOCABULARY, features, padding_idx=padding_idx))
    shape = (length, features) if first == "vectors" else (length,)
    for kind in draw(st.lists(st.sampled_from(["linear", "layer norm", "tanh"]), max_size=4)):
        if kind == "linear":
            wider = draw(sizes(6))
            layers.append(nn.Linear(features, wider, bias=draw(st.booleans())))
            features = wider
        elif kind == "layer norm":
            layers.append(nn.LayerNorm(features, eps=draw(st.sampled_from([1e-5, 0.1]))))
        else:
            layers.append(nn.Tanh())
    return [*layers, nn.Linear(features, draw(sizes(4)))], shape


@st.composite
def image_layers(draw):
    """Layers on (batch, channels, height, width), and the shape of one example."""
    channels, height, width = draw(sizes(4)), draw(st.integers(4, 8)), draw(st.integers(4, 8))
    shape, layers = (channels, height, width), []
    for kind in ["convolution", *draw(st.lists(st.sampled_from(["convolution", "group norm", "tanh"]), max_size=3))]:
        groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
        if kind == "convolution":
            wider = groups * draw(sizes(3))
            layers.append(
                nn.Conv2d(
                    channels,
                    wider,
                    kernel_size=(draw(sizes(3)), draw(sizes(3))),
                    stride=(draw(sizes(2)), draw(sizes(2))),
                    padding=draw(st.integers(1, 2)),  # with it, no image is smaller than the kernel
                    groups=groups,
                    bias=draw(st.booleans()),
                )
            )
            channels = wider
        else:
            layers.append(nn.GroupNorm(groups, channels, eps=0.1) if kind == "group norm" else nn.Tanh())
    return [*layers, nn.Flatten(), nn.LazyLinear(draw(sizes(4)))], shape


def losses_of(net, inputs, weights):
    output = net(inputs).flatten(1)
    return (output * weights[:, :1] + output.square() / 2).sum(dim=1)


def gradients_by_opacus(net, inputs, weights):
    """Per-sample gradients by Opacus's own module, which trains the padding row that torch does not."""
    hooked = GradSampleModule(copy.deepcopy(net), loss_reduction="sum")
    losses_of(hooked, inputs, weights).sum().backward()
    samples = {
        name: parameter.grad_sample for name, parameter in hooked._module.named_parameters() if parameter.requires_grad
    }
    if isinstance(net[0], nn.Embedding) and net[0].padding_idx is not None and "0.weight" in samples:
        samples["0.weight"][:, net[0].padding_idx] = 0.0
    return [{name: sample[index] for name, sample in samples.items()} for index in range(len(inputs))]


# Opacus's hook on the first layer of a network, whose input needs no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    layers_and_shape=st.one_of(token_layers(), image_layers()),
    batch=sizes(6),
    clip_norm=st.sampled_from([1e-3, 0.3, 1.0, 10.0, 1e3]),
    clipping=st.sampled_from(CLIPPINGS),
    granularity=st.sampled_from(GRANULARITIES),
    norm_rule=st.sampled_from(NORM_RULES),
    frozen=st.sets(st.integers(0, 5), max_size=2),
    seed=st.integers(0, 2**16),
)
def test_random_networks(layers_and_shape, batch, clip_norm, clipping, granularity, norm_rule, frozen, seed):
    layers, shape = layers_and_shape
    torch.manual_seed(seed)
    net = nn.Sequential(*layers).double().train()
    inputs = torch.randn(batch, *shape).double()
    if isinstance(net[0], nn.Embedding):
        inputs = torch.randint(0, VOCABULARY, (batch, *shape))
    net(inputs)  # a lazy layer learns its size
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    for index in frozen & set(range(len(net) - 1)):
        net[index].requires_grad_(False)
    weights = torch.randn(batch, 1).double()
    gradients = gradients_by_opacus(net, inputs, weights)
    options = dict(max_grad_norm=clip_norm, clipping=clipping, granularity=granularity)
    for engine in (dict(engine="book_keeping", norm_rule=norm_rule), dict(engine="opacus")):
        with ClippedGradients(net, **engine, **options) as clipped:
            norms = clipped.backward(losses_of(net, inputs, weights))
            torch.testing.assert_close(norms, norms_of(gradients), **TOLERANCE)
            assert_same_sums(clipped.sums, clip_and_sum(gradients, **options))
