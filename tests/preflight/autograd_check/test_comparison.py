"""The check before the first step: it passes what is right, and stops what is wrong by name."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from doppler_hf.privacy.clipping.gradients import Dense, Lookup, Notes, Product, Squares
from tests.support.models import MODELS, batch_for, build, losses_of
from tests.support.nets import Net
from tests.support.per_example import compare_with_autograd
from tests.support.refusals import refused
from tests.support.tiers import further


def check(model, *, losses=None, engine="book_keeping", **options):
    inputs, labels = batch_for(model, torch.float32, batch=2)

    def losses_of_row(row):
        row = dict(row)
        labels = row.pop("labels")
        return losses_of(model, row, labels)

    together = inputs | {"labels": labels}
    alone = [row(together, index) for index in range(2)]
    compare_with_autograd(model, losses or losses_of_row, alone=alone, together=together, engine=engine, **options)


def row(inputs, index):
    return {name: value[index : index + 1] for name, value in inputs.items()}


def state_of(model):
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return weights, [module.training for module in model.modules()], [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", further([*MODELS], quick=[*MODELS][::3]))
def test_what_is_right_passes_and_is_left_as_it_was(name):
    model = build(name, torch.float32)
    weights, training, gradients = state_of(model)
    check(model)
    after = state_of(model)
    assert all(torch.equal(after[0][key], weights[key]) for key in weights)
    assert after[1:] == (training, gradients)
    assert not any("forward" in vars(module) for module in model.modules())


def planted(monkeypatch, change, *, form=Product, of=lambda parameter: parameter.ndim == 2):
    """Let the engine note something else for some parameters."""
    noted = Notes.note

    def note(self, parameter, gradient):
        noted(self, parameter, change(gradient) if of(parameter) and isinstance(gradient, form) else gradient)

    monkeypatch.setattr(Notes, "note", note)


@pytest.mark.parametrize(
    ("norm_rule", "form", "change"),
    [
        ("ghost", Product, lambda g: Product(g.left, g.right * 1.01)),
        ("ghost", Product, lambda g: Product(g.left.flip(1), g.right)),
        ("direct", Dense, lambda g: Dense(g.values * 0.99)),
    ],
    ids=["too large", "tokens mixed up", "too small"],
)
def test_a_wrong_rule_is_found_by_name(monkeypatch, norm_rule, form, change):
    planted(monkeypatch, change, form=form)
    with refused("wrong-gradients", match="'.*weight'"):
        check(build("roberta", torch.float32), norm_rule=norm_rule)


def test_a_rule_that_gives_gradients_to_the_wrong_example_is_found(monkeypatch):
    planted(monkeypatch, lambda g: Product(g.left.flip(0), g.right.flip(0)))
    with refused("wrong-gradients"):
        check(build("roberta", torch.float32), norm_rule="ghost")


def test_adapters_that_begin_at_zero_are_checked_all_the_same(monkeypatch):
    model = build("roberta-lora", torch.float32)
    matrices = {parameter for name, parameter in model.named_parameters() if "lora_A" in name}
    planted(monkeypatch, lambda g: Dense(g.values * 1.5), form=Dense, of=matrices.__contains__)
    with torch.no_grad():  # as PEFT has it: no gradient gets to A
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    with refused("wrong-gradients", match="lora_A"):
        check(model, norm_rule="direct")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("engine", ["book_keeping", "opacus"])
def test_an_example_without_a_finite_gradient_is_left_out(engine, index, bad):
    model, x = nn.Linear(3, 2), torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    x[index] *= bad
    together, alone = {"x": x}, [{"x": x[:1]}, {"x": x[1:]}]

    def losses(inputs):
        return model(inputs["x"]).square().sum(dim=1)

    compare_with_autograd(model, losses, alone=alone, together=together, engine=engine)
    with refused("depends-on-others"):  # that of the other one
        compare_with_autograd(
            model, lambda inputs: losses(inputs) * len(inputs["x"]), alone=alone, together=together, engine=engine
        )


def test_a_loss_that_looks_at_the_batch_is_found():
    model = build("roberta", torch.float32)

    def losses(row):
        logits = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits
        return F.cross_entropy(logits - logits.mean(dim=0), row["labels"], reduction="none")

    with refused("depends-on-others", match="the loss depends"):
        check(model, losses=losses)


class OfOneDirection(nn.Module):
    """Has for each example a gradient of norm 1 in a direction of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.weight(x).squeeze(1)


@pytest.mark.parametrize("norm_rule", ["ghost", "direct"])
def test_gradients_of_equal_norm_that_change_places_are_found_although_norms_and_sum_are_right(monkeypatch, norm_rule):
    model, x = OfOneDirection(), torch.eye(2)
    options = dict(alone=[{"x": x[:1]}, {"x": x[1:]}], together={"x": x}, norm_rule=norm_rule)
    losses = lambda inputs: model(inputs["x"])  # noqa: E731
    compare_with_autograd(model, losses, **options)
    flipped = (
        (lambda g: Product(g.left.flip(0), g.right.flip(0))) if norm_rule == "ghost" else lambda g: Dense(g.values.flip(0))
    )
    planted(monkeypatch, flipped, form=Product if norm_rule == "ghost" else Dense)
    with refused("wrong-gradients", match="'weight.weight'"):
        compare_with_autograd(model, losses, **options)


class Looked(nn.Module):
    """Looks up rows of a table by an index, and not by `nn.Embedding`."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return self.table[(x[..., 0] > 2).long()]


# With 700 equal contributions to each weight, of which a sum in bfloat16 keeps 256.
LONG = {
    "layer norm": lambda: nn.LayerNorm(8),
    "embedding": lambda: Net(lambda n, x: n.table((x[..., 0] > 2).long()), table=nn.Embedding(4, 8)),
    "group norm": lambda: Net(lambda n, x: n.norm(x.mT).mT, norm=nn.GroupNorm(2, 8)),
}


def long_rows(layer, dtype, **options):
    """Compare on rows of 700 places, to each of which the layer's weights contribute alike."""
    torch.manual_seed(0)
    model = Net(lambda n, x: n.head(n.layer(x)), layer=layer(), head=nn.Linear(8, 2).requires_grad_(False)).to(dtype)
    x = torch.rand(2, 700, 8).to(dtype)
    losses = lambda inputs: model(inputs["x"]).float()[..., 0].mean(dim=1)  # noqa: E731
    compare_with_autograd(model, losses, alone=[{"x": x[:1]}, {"x": x[1:]}], together={"x": x}, tolerance=0.1, **options)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("engine", ["book_keeping", "opacus"])
@pytest.mark.parametrize("kind", LONG)
def test_long_rows_in_bfloat16_pass_where_autograd_itself_stops_adding(kind, engine):
    long_rows(LONG[kind], torch.bfloat16, engine=engine)


def test_a_layer_whose_engine_adds_in_bfloat16_is_refused_with_a_mend_that_works():
    """Such a layer has no rule, so that its gradients are torch's own."""
    with refused("wrong-gradients", match="'layer.table'.* dtype=torch.float32"):
        long_rows(Looked, torch.bfloat16)
    long_rows(Looked, torch.float32)


@pytest.mark.parametrize("kind", ["layer norm", "embedding"])
def test_a_wrong_rule_is_found_in_long_rows_of_bfloat16_too(monkeypatch, kind):
    form = Lookup if kind == "embedding" else Dense
    planted(monkeypatch, lambda g: dataclasses.replace(g, values=g.values * 1.5), form=form, of=lambda parameter: True)
    with refused("wrong-gradients", match=r"'layer\.\S+'"):
        long_rows(LONG[kind], torch.bfloat16)


def test_a_norm_that_is_too_small_is_found_although_the_sum_is_right(monkeypatch):
    right = Squares.norms
    monkeypatch.setattr(Squares, "norms", lambda self: {group: found / 2 for group, found in right(self).items()})
    with refused("wrong-gradients") as refusal:
        check(build("roberta", torch.float32))
    assert not any(digit in str(refusal.value) for digit in "0123456789")  # the norm of an example is private


def test_what_is_at_fault_is_named_behind_a_layer_without_tensors():
    parts = dict(
        share=Net(lambda n, x: 0.5), mixing=Net(lambda n, x, share: x - share * x.mean(dim=0)), last=nn.Linear(3, 1)
    )
    model = Net(lambda n, x: n.last(n.mixing(x, n.share(x))), **parts)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    together, alone = {"x": x}, [{"x": x[:1]}, {"x": x[1:]}]
    with refused("depends-on-others", match=r"'mixing' \(Net\)"):
        compare_with_autograd(model, lambda rows: model(rows["x"]).square().sum(dim=1), alone=alone, together=together)
