"""One example contributes at most C to the clipped sum where rounding is hard on it, and padding changes no contribution."""

import contextlib
import math

import pytest
import torch
from torch import nn
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.support.models import batch_for, build, losses_of, rows
from tests.support.pairwise import pairwise
from tests.support.per_example import CLIPPINGS, GRANULARITIES, NORM_RULES, book_keeping, norm_of
from tests.support.processors import OneAfterAnother
from tests.support.tiers import further, thorough

pytestmark = pytest.mark.usefixtures("unchecked_arrays")

MODELS = ["roberta", "gpt2-lm", "t5-lm", "resnet", "bit", "vit-dora"]
C, SLACK = 0.1, 1e-6  # a few roundings of float32, of relative size 6e-8 each


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def contribution(model, losses, **options):
    """Return the clipped sum of the losses, in float64."""
    with book_keeping(model, **options) as clipped:
        clipped.backward(losses())
        return torch.cat([total.double().flatten() for total in clipped.sums.values()])


@pytest.mark.parametrize(
    ("name", "scale", "norm_rule", "clipping", "granularity", "autocast"),
    pairwise(MODELS, [1e-3, 1e4], NORM_RULES, CLIPPINGS, GRANULARITIES, [True, False]),
)
def test_one_example_of_a_model_contributes_at_most_c(name, scale, norm_rule, clipping, granularity, autocast):
    model = build(name, torch.float32)

    def losses():
        found = losses_of(model, *batch_for(model, torch.float32)).float()
        return scale * found.where(torch.arange(len(found)) == 1, 0.0)

    options = dict(clipping=clipping, granularity=granularity, norm_rule=norm_rule)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # of the backward pass, too
        assert 0.0 < contribution(model, losses, max_grad_norm=C, **options).norm() <= C * (1 + SLACK)


@pytest.mark.parametrize(
    ("name", "bad", "norm_rule", "clipping"), pairwise(MODELS, [math.nan, math.inf], NORM_RULES, CLIPPINGS)
)
def test_examples_without_a_finite_gradient_contribute_nothing(name, bad, norm_rule, clipping):
    model, factors = build(name), torch.tensor([1.0, 1.0, bad, 1.0, bad, 1.0])
    inputs, labels = batch_for(model)
    options, others = dict(max_grad_norm=C, norm_rule=norm_rule, clipping=clipping), factors.isfinite()
    found = contribution(model, lambda: losses_of(model, inputs, labels) * factors, **options)
    torch.testing.assert_close(
        found, contribution(model, lambda: losses_of(model, *rows(inputs, labels, others)), **options)
    )


@pytest.mark.parametrize("scales", [(1e18, 1e-23), (1e-35, 1e37), (1e22, 1.0), (1e-20, 1e-2), (1e38, 1e30)])
@pytest.mark.parametrize("norm_rule", NORM_RULES)
def test_factors_beyond_the_range_of_float32_stay_within_c_and_reach_no_neighbour(scales, norm_rule):
    layer, (of_inputs, of_weights) = nn.Linear(4, 5, bias=False), torch.tensor([scales, (1.0, 1.0)]).T[:, :, None, None]
    nn.init.zeros_(layer.weight)  # in the forward pass nothing may overflow
    inputs, weights = normal(2, 6, 4) * of_inputs, normal(2, 6, 5, seed=2) * of_weights

    def of(*counted):
        kept = weights.where(torch.tensor(counted)[:, None, None], 0.0)
        return contribution(layer, lambda: (layer(inputs) * kept).sum(dim=(1, 2)), max_grad_norm=1e-6, norm_rule=norm_rule)

    of_one = of(True, False)  # where a square leaves the range of float32 the example counts for nothing
    assert of_one.any() == (scales[0] * scales[1] < 2.0**64 and (norm_rule == "direct" or max(scales) < 2.0**64))
    assert of_one.norm() <= 1e-6 * (1 + SLACK)
    torch.testing.assert_close(of(True, True), of_one + of(False, True), atol=1e-12, rtol=1e-6)


def test_a_text_contributes_c_whatever_the_vocabulary():
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(50_257, 128), nn.LayerNorm(128), nn.Linear(128, 50_257)), torch.arange(129)[None]
    model[2].weight = model[0].weight
    losses = lambda: nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])[None]  # noqa: E731
    assert 1 - 2e-3 <= contribution(model, losses, max_grad_norm=1e-3).norm() / 1e-3 <= 1 + SLACK


def twice(layer, inputs, weights, kappa):
    """Each token twice, with opposite gradients of the output but for 1/κ of their size."""
    return layer, inputs.repeat(1, 2, *(1 for _ in inputs.shape[2:])), torch.cat([weights, weights / kappa - weights], dim=1)


HARD = {  # a layer, inputs of one example, and the gradients of its outputs
    "long": (nn.Linear(128, 96, bias=False), normal(1, 500, 128), normal(1, 500, 96, seed=2)),
    "identical tokens": (nn.Linear(64, 64), torch.full((1, 256, 64), 1 / 3), torch.full((1, 256, 64), 0.7)),
    "embedding": (nn.Embedding(4, 64), torch.arange(64)[None] % 4, normal(1, 64, 64, seed=2)),
    "norm": (nn.LayerNorm(12), normal(1, 16, 12), normal(1, 16, 12, seed=2)),
    "copies": (LlamaRMSNorm(12), normal(1, 16, 12), normal(1, 16, 12, seed=2)),
}


def exact_norm(layer, inputs, weights):
    loss = (layer.double()(inputs.double() if inputs.is_floating_point() else inputs) * weights.double()).sum()
    norm = norm_of(torch.autograd.grad(loss, list(layer.parameters())))
    layer.float()
    return norm


@pytest.mark.parametrize("small", [3e-5, 1e-4, 2.4e-4])
@pytest.mark.parametrize("width", [768, 4_096, 16_384, 50_257])
def test_no_large_number_that_cancels_hides_many_small_ones(width, small):
    layer, inputs, weights = nn.Linear(4, width, bias=False), torch.ones(1, 8, 4), torch.full((1, 8, width), small)
    weights[..., 0] = torch.tensor([1.0, -1.0]).repeat(4)
    bound = exact_norm(layer, inputs, weights) / 10
    losses = lambda: (layer(inputs) * weights).sum(dim=(1, 2))  # noqa: E731
    assert contribution(layer, losses, norm_rule="ghost", max_grad_norm=bound).norm() <= bound * (1 + SLACK)


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 0.0), (torch.float32, 3e3), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_standardization_takes_out_most_of_a_gradient_and_what_is_left_is_at_most_c(dtype, mean, sign, norm_rule):
    """A mean far above the deviation, or half precision, leaves rows of the standardized weight with a mean of their own."""
    layer = WeightStandardizedConv2d(64, 8, 3, padding="valid").to(dtype)
    with torch.no_grad():
        layer.weight.copy_(normal(8, 64, 3, 3) + mean)
        rows = layer.weight.float().flatten(1)
        row = ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True))[0].view(1, 64, 3, 3)
    inputs = (row + sign + 1e-2 * normal(1, 64, 3, 3, seed=3)).to(dtype)
    found = contribution(
        layer, lambda: 10.0 * layer(inputs)[:, 0].flatten(1).sum(1).float(), norm_rule=norm_rule, max_grad_norm=C
    )
    assert 0.0 < found.norm() <= C * (1 + SLACK)


TOKENS, WORDS, PIXELS = 8_192, 151_936, "pixels of one channel"


class Scale(nn.Module):
    """A layer's own vector, one number for each of its inputs."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, input):
        return input * self.weight


def equal(*shape):
    return torch.full(shape, 1 / 3)


# A layer, its inputs, and the gradients of its outputs, whose terms all point the same way: none cancels another's rounding.
LARGEST = {
    "tokens of a linear layer": (lambda: nn.Linear(64, 48), equal(1, TOKENS, 64), equal(1, TOKENS, 48)),
    "one word, again and again": (lambda: nn.Embedding(WORDS, 8), torch.full((1, TOKENS), 7), equal(1, TOKENS, 8)),
    "words and hidden states": (lambda: nn.Linear(128, WORDS), equal(1, 2, 128), equal(1, 2, WORDS)),
    "hidden states and words": (lambda: nn.Linear(WORDS, 16, bias=False), equal(1, 2, WORDS), equal(1, 2, 16)),
    "tokens of a vector": (lambda: Scale(512), equal(1, TOKENS, 512), equal(1, 1, 1).expand(1, TOKENS, 512)),
    "a vector of many numbers": (lambda: Scale(65_535), equal(1, 2, 65_535), equal(1, 1, 1).expand(1, 2, 65_535)),
    PIXELS: (lambda: nn.Conv2d(1, 1, 1), equal(1, 1, 512, 512), equal(1, 1, 512, 512)),
    "tokens of a normalization": (lambda: nn.LayerNorm(512), normal(1, TOKENS, 512), equal(1, TOKENS, 512)),
}  # fmt: skip


@pytest.mark.parametrize("processor", [contextlib.nullcontext, *thorough(OneAfterAnother)])
@pytest.mark.parametrize("dtype", [torch.float32, *thorough(torch.bfloat16)])
@pytest.mark.parametrize(
    ("name", "norm_rule"),
    further(
        [(name, rule) for name in LARGEST for rule in ("ghost", "direct") if (name, rule) != (PIXELS, "ghost")],
        quick=[*((name, "ghost") for name in LARGEST), (PIXELS, "direct")],
    ),
)
def test_an_example_contributes_c_at_the_largest_sizes(name, norm_rule, dtype, processor):
    """Neither more, which no noise would cover, nor much less, whichever way a processor adds up its norm."""
    make, inputs, weights = LARGEST[name]
    with torch.device("meta"):
        layer = make()
    layer = layer.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.25)
    inputs, weights = (each.to(dtype) if each.is_floating_point() else each for each in (inputs, weights))
    with processor():
        found = contribution(
            layer, lambda: ((layer(inputs) * weights).flatten(1)).sum(dim=1), max_grad_norm=C, norm_rule=norm_rule
        )
    assert (1 - 2e-3) * C <= found.norm() <= C * (1 + SLACK)


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("kappa", [0.5, 30.0, 1e6])
@pytest.mark.parametrize("name", HARD)
def test_an_example_contributes_c_and_padding_changes_nothing_however_much_cancels(name, kappa, norm_rule):
    layer, *factors = twice(*HARD[name], kappa)
    bound, found = exact_norm(layer, *factors) / 10, []
    # Gram matrices of p and of q columns lose (p + q)·eps/2 of the sizes of a square's terms, which are at most 4κ²‖g‖².
    lost = sum(layer.weight.shape) * torch.finfo(torch.float32).eps * kappa**2
    for sides in [(0, 0), (0, 37), (37, 0), (0, 600)][: 1 if name == "embedding" else 4]:
        inputs, weights = (nn.functional.pad(factor, (0, 0, *sides)) for factor in factors) if sides != (0, 0) else factors
        losses = lambda inputs=inputs, weights=weights: (layer(inputs) * weights).flatten(1).sum(dim=1)  # noqa: E731
        found.append(contribution(layer, losses, norm_rule=norm_rule, max_grad_norm=bound))
        assert found[-1].norm() <= bound * (1 + SLACK)
        assert kappa > 1 or found[-1].norm() >= bound * (1 - 2e-3)  # safety must not cost a gradient its signal
        assert kappa > 30 or (found[-1] - found[0]).norm() <= (1e-3 + lost) * bound  # else it is hardly more than rounding


def test_products_are_of_full_precision_whatever_the_backward_pass_is_called_in():
    model, found = build("roberta", torch.float32), []
    for enabled in (False, True):
        with book_keeping(model, max_grad_norm=C) as clipped:
            losses = losses_of(model, *batch_for(model, torch.float32))
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                clipped.backward(losses)
            found.append(torch.cat([total.flatten() for total in clipped.sums.values()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
