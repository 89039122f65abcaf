"""`grad_sample_engine="opacus"`: Opacus's samplers in the place of our rules, and all else as ever."""

import pytest
import torch
from opacus.grad_sample import GradSampleHooks
from torch import nn

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping.opacus_layers import opacus_rules
from doppler_hf.privacy.clipping.torch_layers import RULES
from tests.support.layers import LAYERS
from tests.support.nets import BATCH, Net, draw, on, ready, tokens
from tests.support.per_example import assert_same_sums, clip_and_sum, gradients_of_each, median_norm, norms_of
from tests.support.tiers import further


def assert_equals_loop(net, losses, batch=BATCH, *, views=1, **options):
    gradients = gradients_of_each(net, losses, batch)
    with ClippedGradients(net, engine="opacus", max_grad_norm=median_norm(gradients), **options) as clipped:
        norms = clipped.backward(losses(slice(None)))
        torch.testing.assert_close(norms, norms_of(gradients), rtol=1e-10, atol=1e-10)
        assert_same_sums(clipped.sums, clip_and_sum(gradients, max_grad_norm=median_norm(gradients), **options))
        return clipped.fallbacks


QUICK = ["linear on tokens", "layer norm without bias", "groups", "channels last in memory", "embedding with padding"]


@pytest.mark.parametrize("granularity", ["flat", "per_layer"])
@pytest.mark.parametrize("name", further([*LAYERS], quick=QUICK))
def test_a_kind_of_layer(name, granularity):
    net, inputs = LAYERS[name]
    assert_equals_loop(ready(net), on(net, inputs), granularity=granularity)


def test_every_rule_of_torchs_layers_has_a_sampler_in_its_place():
    assert opacus_rules().keys() == RULES.keys()


@pytest.fixture
def asked(monkeypatch):
    """The kinds of layers whose sampler was asked."""
    found = []
    for kind, sampler in GradSampleHooks.GRAD_SAMPLERS.items():

        def spy(layer, inputs, gradients, sampler=sampler):
            found.append(type(layer))
            assert all(each.dtype == torch.float32 for each in (*inputs, gradients) if each.is_floating_point())
            return sampler(layer, inputs, gradients)

        monkeypatch.setitem(GradSampleHooks.GRAD_SAMPLERS, kind, spy)
    return found


@pytest.mark.parametrize("autocast", [False, True])
def test_samplers_are_asked_and_half_precision_is_float32_for_them(asked, autocast):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(7, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(6, 4, 3), nn.GroupNorm(2, 4)
    )
    kinds = {type(layer) for layer in net}
    with ClippedGradients(net, engine="opacus") as clipped, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        clipped.backward(net(tokens(BATCH, 6)).float().square().sum(dim=(1, 2)))
        assert clipped.fallbacks == {}
        assert all(total.any() and total.dtype == torch.float32 for total in clipped.sums.values())
    assert set(asked) == kinds
    assert len(asked) == len(kinds)


def test_no_sampler_is_asked_by_the_engine_of_our_own(asked):
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    with ClippedGradients(net) as clipped:
        clipped.backward(net(torch.randn(BATCH, 3)).sum(1))
    assert asked == []


def test_positions_that_all_examples_share_are_looked_up_for_each():
    parts = dict(words=nn.Embedding(7, 4), places=nn.Embedding(6, 4), head=nn.Linear(4, 2))
    net = ready(Net(lambda n, ids: n.head((n.words(ids) + n.places(torch.arange(6)[None])).tanh()), **parts))
    assert_equals_loop(net, on(net, tokens(BATCH, 6)))


def test_frozen_parameters_get_nothing_and_inputs_that_need_no_gradient_do_not_stop_it():
    net = ready(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    net[0].bias.requires_grad_(False)
    net[2].weight.requires_grad_(False)
    assert_equals_loop(net, on(net, draw(BATCH, 3)))


def test_a_layer_that_works_in_place_on_the_output_changes_nothing():
    net = ready(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True)))
    assert_equals_loop(net, on(net, draw(BATCH, 3)))


def test_layers_without_a_sampler_are_computed_as_ever():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.own

    net = ready(nn.Sequential(nn.Linear(3, 4), Shift(), nn.GRU(4, 2, batch_first=True)))
    net = Net(lambda n, x: n.layers(x)[0], layers=net)
    assert [*assert_equals_loop(net, on(net, draw(BATCH, 6, 3)))] == ["layers.1"]
