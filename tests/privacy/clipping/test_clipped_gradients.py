"""Factors of norms, a lack of memory, and arguments that are refused; sums are in the other files."""

import math

import pytest
import torch
from torch import nn

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping.clipped_gradients import clip_factors
from tests.support.nets import Net
from tests.support.refusals import refused


def test_factors_at_zero_and_at_the_bound():
    norms = torch.tensor([0.0, 1.0, 2.0, 4.0])
    torch.testing.assert_close(
        clip_factors(norms, max_grad_norm=2.0, clipping="vanilla"), torch.tensor([1.0, 1.0, 1.0, 0.5])
    )
    torch.testing.assert_close(
        clip_factors(norms, max_grad_norm=2.0, clipping="automatic"), torch.tensor([200.0, 2.0, 1.0, 0.5])
    )


def test_weights_are_cut_to_those_between_zero_and_one():
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    with ClippedGradients(model) as clipped:
        clipped.backward(model(x)[:, 0], weights=torch.tensor([1.0, 0.0, 0.0, 0.5, 1.0]))
        expected = {name: total.clone() for name, total in clipped.sums.items()}
        clipped.reset()
        clipped.backward(model(x)[:, 0], weights=torch.tensor([7.0, -1.0, math.nan, 0.5, math.inf]))
        torch.testing.assert_close(clipped.sums, expected, rtol=0, atol=0)


@pytest.mark.parametrize("clipping", ["vanilla", "automatic"])
def test_norms_are_raised_by_a_thousandth_before_they_are_clipped(clipping):
    model, x = nn.Linear(3, 1, bias=False), torch.tensor([[3.0, 0.0, 4.0]])
    with ClippedGradients(model, clipping=clipping) as clipped:
        clipped.backward(model(x)[:, 0])
        assert clipped.sums["weight"].norm().item() == pytest.approx(1 - 2**13 * 2**-23, rel=1e-5)


@pytest.mark.parametrize(("small", "share"), [(1e-3, 0.1), (1e-5, 1e-3), (0.1, 1.0)])
def test_a_layer_whose_gradient_is_below_the_smallest_norm_contributes_less_than_its_part(small, share):
    """With one norm over all layers, the layer has the part of the whole that its gradient has."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x):
            return (self.first(x) + small * self.second(x))[:, 0]

    model, found = Two(), {}
    for granularity in ("per_layer", "flat"):
        with ClippedGradients(model, max_grad_norm=1.0, clipping="automatic", granularity=granularity) as clipped:
            clipped.backward(model(torch.tensor([[1.0, 0.0]])))
            found[granularity] = {name: float(total.norm()) for name, total in clipped.sums.items()}
    part = 1 / math.sqrt(2)
    assert found["per_layer"]["first.weight"] == pytest.approx(part, rel=2e-3)
    assert found["per_layer"]["second.weight"] == pytest.approx(part * share, rel=2e-3)
    whole = math.hypot(1.0, small)
    assert [*found["flat"].values()] == pytest.approx([1.0 / whole, small / whole], rel=2e-3)


@pytest.mark.parametrize("of_zero", [1.0, 1e9, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("granularity", ["flat", "per_layer"])
def test_an_example_of_weight_zero_adds_nothing(of_zero, granularity):
    """As with the passes of a process that has fewer micro-batches than others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))

    def losses(*rows):
        return model(torch.tensor(rows)).sum(dim=(1, 2))

    def found(clipped):
        return {**clipped.sums, "non-finite": clipped.num_non_finite}

    with ClippedGradients(model, granularity=granularity) as clipped:
        clipped.backward(losses([0, 1], [2, 3]))
        expected = {name: total.clone() for name, total in found(clipped).items()}
        clipped.backward(of_zero * losses([1, 4]), weights=torch.zeros(1))
        torch.testing.assert_close(found(clipped), expected, rtol=0, atol=0)
        clipped.backward(of_zero * losses([1, 4]), weights=torch.ones(1))
        changed = {name: total for name, total in found(clipped).items() if not torch.equal(total, expected[name])}
        assert changed.keys() >= ({"0.weight"} if of_zero <= 1e9 else {"non-finite"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_count_has_one_dtype_with_examples_and_without(dtype):
    """Processes add it up, and one may have an empty draw."""
    model = nn.Linear(3, 1).to(dtype)
    with ClippedGradients(model) as clipped:
        of_none = clipped.num_non_finite.dtype
        clipped.backward(model(torch.randn(4, 3, dtype=dtype))[:, 0])
        assert clipped.num_non_finite.dtype == of_none


class Hungry(nn.Module):
    """Scales its input by a matrix of its own, and may find no memory: a layer for functorch."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls_left = nn.Parameter(torch.eye(3)), math.inf

    def forward(self, x):
        if self.calls_left <= 0:
            raise torch.OutOfMemoryError
        self.calls_left -= 1
        return x @ self.weight


def test_a_layer_without_memory_is_not_taken_for_one_without_a_rule():
    model, x = nn.Sequential(Hungry(), nn.Linear(3, 1)), torch.randn(4, 3)
    with ClippedGradients(model) as clipped:
        clipped.backward(model(x)[:, 0])
        losses = model(x)[:, 0]
        model[0].calls_left = 0
        with pytest.raises(torch.OutOfMemoryError):
            clipped.backward(losses)


def test_a_repeated_output_is_not_blamed_for_a_lack_of_memory():
    parts = dict(prompt=nn.Embedding(2, 3), layer=nn.Linear(3, 1), hungry=Hungry().requires_grad_(False))
    model = Net(lambda n, x: n.layer(n.hungry(x + n.prompt(torch.arange(2)[None]))).sum(dim=(1, 2)), **parts)
    x = torch.randn(4, 2, 3)
    with ClippedGradients(model) as clipped:
        clipped.backward(model(x))
        model.hungry.calls_left = 0
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
        model.hungry.calls_left = math.inf
        clipped.backward(model(x))


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (dict(max_grad_norm=0.0), "out-of-range", "1e-12"),
        (dict(clipping="soft"), "unknown-value", "automatic, vanilla; .*'soft'"),
        (dict(granularity="layer"), "unknown-value", "flat, per_layer; .*'layer'"),
        (dict(engine="ghost"), "unknown-value", "book_keeping, opacus; .*'ghost'"),
        (dict(norm_rule="fast"), "unknown-value", " norm_rule .*'fast'"),
        (dict(engine="opacus", norm_rule="ghost"), "no-effect", "norm_rule='ghost'"),
    ],
)
def test_bad_arguments_are_refused(arguments, code, value):
    with refused(code, match=value):
        ClippedGradients(nn.Linear(1, 1), **arguments)


def test_a_frozen_model_is_refused():
    with refused("nothing-trained"):
        ClippedGradients(nn.Linear(1, 1).requires_grad_(False))


def test_backward_outside_the_context_is_refused():
    with refused("backward-outside"):
        ClippedGradients(nn.Linear(1, 1)).backward(torch.zeros(1))
