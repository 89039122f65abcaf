"""Each fix that a refusal of a layer names, tried: what was refused trains once it was done."""

import pytest
import torch
from opacus.validators import ModuleValidator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from doppler_hf.privacy import ClippedGradients
from tests.support.nets import Held, Net
from tests.support.refusals import refused

BATCH = 4


class Multiplied(nn.Module):
    """A matrix of its own, and dropout, which functorch cannot draw once more."""

    def __init__(self):
        super().__init__()
        self.weight, self.p = nn.Parameter(torch.eye(3)), 0.5

    def forward(self, x):
        return F.dropout(x @ self.weight, self.p, self.training)


def net_of(run, layer):
    """The layer that is refused, and another one."""
    return Net(run, layer=layer, rest=nn.Linear(3, 2))


def freeze(net):
    net.layer.requires_grad_(False)


def train_adapters(net):
    get_peft_model(net, LoraConfig(target_modules=["rest"]))  # within the model that is given


def without_dropout(net):
    net.layer.p = 0.0


def without_max_norm(net):
    net.layer.max_norm = None


def fix(net):
    return ModuleValidator.fix(net)


def set_submodule(net):
    net.set_submodule("layer", nn.GroupNorm(1, net.layer.num_features))


def not_compiled(net):
    net.layer = net.layer._orig_mod


def keep_statistics(net):
    net.layer.eval()
    net.layer.train = lambda mode=True: net.layer


def set_batch_first(net):
    net.layer.self_attn.batch_first = True


def encodes(n, x):
    rows = torch.stack([x, x.tanh()], dim=1 if n.layer.self_attn.batch_first else 0)
    return n.rest(n.layer(rows).sum(dim=1 if n.layer.self_attn.batch_first else 0))


def calls_its_layer(n, x):
    return n.rest(n.layer(x))


def looks_up_one_row(n, x):
    return n.rest(x + n.layer(torch.zeros(1, 1, dtype=torch.long)).view(3))


def looks_up(n, x):
    return n.rest(n.layer((x[:, 0] > 0).long()))


CASES = {
    "a weight that is used outside of its layer": (
        lambda: net_of(lambda n, x: n.rest(x @ n.layer.weight), nn.Linear(3, 3)),
        "no-per-sample-gradient",
        (freeze, train_adapters),
    ),
    "rows that are not examples": (
        lambda: net_of(lambda n, x: n.rest(n.layer(x[:, None].expand(-1, 2, -1).flatten(0, 1))[::2]), nn.Linear(3, 3)),
        "no-per-sample-gradient",
        (freeze, train_adapters),
    ),
    "an encoder whose batch is its second dimension": (
        lambda: net_of(encodes, nn.TransformerEncoderLayer(3, 1, 4)),
        "no-per-sample-gradient",
        (set_batch_first, freeze),
    ),
    "a layer without a rule": (
        lambda: net_of(calls_its_layer, Multiplied()),
        "layer-without-rule",
        (freeze, train_adapters, without_dropout),
    ),
    "a row that is looked up once": (
        lambda: net_of(looks_up_one_row, nn.Embedding(2, 3)),
        "output-repeated",
        (freeze, train_adapters),
    ),
    "parameters of two layers": (
        lambda: Net(
            lambda n, x: n.rest(x) + n.one(x)[:, :2] + n.two(x)[:, :2],
            one=(one := Held()), two=Held(one.scales), rest=nn.Linear(3, 2),
        ),
        "shared-parameters",
        (train_adapters,),
    ),
    "a compiled layer": (
        lambda: net_of(calls_its_layer, torch.compile(nn.Linear(3, 3), backend="aot_eager")),
        "compiled-module",
        (not_compiled, freeze),
    ),
    "batch norm": (
        lambda: net_of(calls_its_layer, nn.BatchNorm1d(3)),
        "layer-mixes-examples",
        (fix, set_submodule, keep_statistics),
    ),
    "max norm": (lambda: net_of(looks_up, nn.Embedding(2, 3, max_norm=1.0)), "embedding-max-norm", (without_max_norm,)),
}  # fmt: skip


def train(net, losses=lambda net, x: net(x).square().sum(dim=1)):
    torch.manual_seed(0)
    with ClippedGradients(net, max_grad_norm=1.0) as clipped:
        assert (clipped.backward(losses(net, torch.randn(BATCH, 3))) > 0).all()
        assert clipped.num_non_finite == 0


@pytest.mark.parametrize(
    ("name", "fix"),
    [(name, fix) for name, (_, _, fixes) in CASES.items() for fix in fixes],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_what_a_refusal_names_fixes_it(name, fix):
    make, code, _ = CASES[name]
    with refused(code):
        train(make())
    net = make()
    train(fix(net) or net)


@pytest.mark.parametrize(
    ("losses", "code"),
    [
        (lambda net, x: net(x)[:2].sum(dim=1), "other-number-of-losses"),
        (lambda net, x: net.rest(net.layer(x)).sum(dim=1), "layer-called-alone"),
    ],
)
def test_a_loss_of_ones_own_is_fixed_as_its_refusal_says(losses, code):
    net = net_of(calls_its_layer, nn.Linear(3, 3))
    with refused(code):
        train(net, losses)
    train(net)


# What torch traces, it also looks at in ways against which it warns.
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.* should not be instantiated:DeprecationWarning",
)
def test_a_compiled_module_that_is_frozen_changes_no_sum(monkeypatch):
    monkeypatch.setattr(torch._functorch.config, "donated_buffer", False)  # the engine goes backward twice at first
    torch.manual_seed(0)
    frozen = Net(lambda n, x: n.layer(x).tanh(), layer=nn.Linear(4, 4)).requires_grad_(False)
    net = nn.Sequential(nn.Linear(3, 4), frozen, nn.Linear(4, 2))
    x = torch.randn(BATCH, 3)

    def sums():
        with ClippedGradients(net, max_grad_norm=1.0) as clipped:
            clipped.backward(net(x).square().sum(dim=1))
            return clipped.sums

    plain = sums()
    frozen.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    compiled = sums()
    assert plain.keys() == compiled.keys()
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-5, atol=1e-6)
