"""One example contributes at most C to the book-keeping engine's sum, whatever rounding does: the sensitivity itself.

The contribution is measured in float64 on the float32 numbers that the sum is made of. C is below the norm of the
gradient, so that the clipping is what bounds it.
"""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from doppler_hf.privacy.clipping import factored as gradients
from doppler_hf.privacy.clipping import ghost_norm
from doppler_hf.privacy.clipping.per_sample_gradient import Dense, sum_over_time
from tests.support.models import batch_for, build, losses_of, rows
from tests.support.pairwise import pairwise
from tests.support.per_example import (
    CLIPPINGS,
    GRANULARITIES,
    NORM_RULES,
    assert_same_sums,
    book_keeping,
    norm_of,
)
from tests.support.tiers import combined, thorough

# The arrays are those of the other tests of the same functions, which check them; here that would be a third of the time.
pytestmark = pytest.mark.usefixtures("unchecked_arrays")

C = 0.1
SLACK = 1e-6  # a few roundings of float32, of relative size 6e-8 each, in factor times gradient
EVERY_CLIPPING = [(clipping, granularity) for clipping in CLIPPINGS for granularity in GRANULARITIES]


def contribution(model, losses, **options):
    """Return the norm of the clipped sum, in float64."""
    with book_keeping(model, **options) as clipped:
        clipped.backward(losses())
        return norm_of(clipped.sums.values())


@pytest.mark.parametrize(
    ("name", "scale", "norm_rule", "clipping", "granularity", "autocast", "is_alone"),
    pairwise(
        ["roberta", "llama-lm", "vit", "roberta-lora"],
        [1e-3, 1.0, 1e4], NORM_RULES, CLIPPINGS, GRANULARITIES, [True, False], [False, True],
    ),
)  # fmt: skip
def test_one_example_contributes_at_most_the_clip_norm(name, scale, norm_rule, clipping, granularity, autocast, is_alone):
    """Alone, or among others whose losses do not count."""
    model = build(name, torch.float32)
    inputs, labels = batch_for(model, torch.float32)
    options = dict(max_grad_norm=C, clipping=clipping, granularity=granularity, norm_rule=norm_rule)
    some, of_these = rows(inputs, labels, slice(4, 5)) if is_alone else (inputs, labels)

    def losses():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            all_losses = losses_of(model, some, of_these).float()
        counted = torch.arange(len(all_losses)) == (0 if is_alone else 1)
        return scale * torch.where(counted, all_losses, 0.0)

    assert 0.0 < contribution(model, losses, **options) <= C * (1 + SLACK)


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("name", ["gpt2-lm", "t5-lm", "resnet", "vit-dora"])
def test_so_does_one_of_a_tied_a_convolutional_and_a_decomposed_model(name, norm_rule):
    model = build(name, torch.float32)
    inputs, labels = batch_for(model, torch.float32)
    for scale in (1e-3, 1.0, 1e4):
        norm = contribution(
            model,
            lambda scale=scale: scale * losses_of(model, *rows(inputs, labels, slice(3, 4))),
            max_grad_norm=C,
            norm_rule=norm_rule,
        )
        assert 0.0 < norm <= C * (1 + SLACK)


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["roberta", "gpt2-lm", "resnet", "vit-dora"])
def test_a_backward_pass_under_autocast_keeps_the_bound(name, granularity, norm_rule):
    """Matrix products would then be rounded to bfloat16, those of the engine too."""
    model = build(name, torch.float32)
    inputs, labels = batch_for(model, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        norm = contribution(
            model,
            lambda: losses_of(model, *rows(inputs, labels, slice(3, 4))).float() * 1e2,
            max_grad_norm=C,
            granularity=granularity,
            norm_rule=norm_rule,
        )
    assert 0.0 < norm <= C * (1 + SLACK)


# --- cancellation --------------------------------------------------------------------------------------------------------

# κ = Σₜ ‖gₜ‖‖aₜ‖ / ‖Σₜ gₜaₜᵀ‖: how much larger the terms are than their sum. A Gram matrix in float32 knows ‖G‖² up to
# 6e-8·κ² only, and a matrix product knows G up to 6e-8·κ.
CANCELLATION = [1.0, 1e2, 1e3, 1e4, 1e6]
FEATURES, OUTPUTS, PAIRS = 12, 10, 16


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_pairs(coefficients, kappa):
    """Append the opposite of the coefficients, changed by 1/κ of their size."""
    return torch.cat([coefficients, -coefficients + normal(*coefficients.shape, seed=9) / kappa * 2], dim=1)


def cancelling_linear(kappa):
    """Each token twice, with opposite gradients of the output but for a rest."""
    inputs = normal(2, PAIRS, FEATURES, seed=1).repeat(1, 2, 1)
    return nn.Linear(FEATURES, OUTPUTS), inputs, in_pairs(normal(2, PAIRS, OUTPUTS, seed=2), kappa)


def cancelling_embedding(kappa):
    ids = torch.arange(2 * PAIRS).view(2, PAIRS).repeat(1, 2)
    return nn.Embedding(2 * PAIRS, FEATURES), ids, in_pairs(normal(2, PAIRS, FEATURES, seed=2), kappa)


def cancelling_norm(kappa):
    inputs = normal(2, PAIRS, FEATURES, seed=1).repeat(1, 2, 1)
    return nn.LayerNorm(FEATURES), inputs, in_pairs(normal(2, PAIRS, FEATURES, seed=2), kappa)


def cancelling_copies(kappa):
    """A norm that has no rule: its weight is replaced by one copy per example."""
    return (LlamaRMSNorm(FEATURES), *cancelling_norm(kappa)[1:])


def cancelling_convolution(kappa):
    """Patches that occur twice, one under the other."""
    inputs = normal(2, 3, PAIRS, 4, seed=1).repeat(1, 1, 2, 1)
    weights = in_pairs(normal(2, PAIRS // 2, 2, OUTPUTS, seed=2), kappa).permute(0, 3, 1, 2)
    return nn.Conv2d(3, OUTPUTS, 2, stride=2), inputs, weights


class Tied(nn.Module):
    """A head on given features, and its rows looked up: two gradients of one table, here nearly opposite."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(OUTPUTS, FEATURES), nn.Linear(FEATURES, OUTPUTS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, features):
        ids = torch.arange(OUTPUTS).expand(len(features), -1)
        return torch.cat([self.head(features).flatten(1), self.table(ids).flatten(1)], dim=1)


def cancelling_tied(kappa):
    features, of_logits = normal(2, PAIRS, FEATURES, seed=1), normal(2, PAIRS, OUTPUTS, seed=2)
    of_head = of_logits.double().transpose(1, 2) @ features.double()
    of_rows = -of_head + normal(2, OUTPUTS, FEATURES, seed=9) * of_head.std() / kappa
    return Tied(), features, torch.cat([of_logits.flatten(1), of_rows.float().flatten(1)], dim=1)


CANCELLING = {
    "linear": cancelling_linear,
    "embedding": cancelling_embedding,
    "layer norm": cancelling_norm,
    "copies": cancelling_copies,
    "convolution": cancelling_convolution,
    "tied": cancelling_tied,
}


def exact_gradients(model, inputs, weights):
    """The first example's gradient in float64."""
    exact = model.double()
    inputs = inputs if inputs.dtype == torch.long else inputs.double()
    loss = (exact(inputs[:1]) * weights[:1].double()).sum()
    gradients = torch.autograd.grad(loss, [parameter for parameter in exact.parameters() if parameter.requires_grad])
    model.float()
    return gradients


@pytest.mark.parametrize(
    ("name", "kappa", "clipping", "granularity", "norm_rule"),
    combined(CANCELLING, CANCELLATION, CLIPPINGS, GRANULARITIES, NORM_RULES),
)
def test_cancellation_inside_an_example_does_not_break_the_bound(name, kappa, clipping, granularity, norm_rule):
    torch.manual_seed(0)
    model, inputs, weights = CANCELLING[name](kappa)
    norm = norm_of(exact_gradients(model, inputs, weights))
    others = torch.tensor([1.0, 0.0]).view(2, *(1 for _ in weights.shape[1:]))  # the second example has no gradient
    options = dict(clipping=clipping, granularity=granularity, norm_rule=norm_rule, max_grad_norm=norm / 10)
    ours = contribution(model, lambda: (model(inputs) * weights * others).flatten(1).sum(dim=1), **options)
    assert ours <= norm / 10 * (1 + SLACK)
    # Safety must not cost a gradient its signal, and no form less than another, since others decide on the form. Beyond that
    # the parameters in float32 and float64 are of other gradients.
    if kappa <= 1e4 and granularity == "flat":
        bound = norm / 10 if clipping == "vanilla" else norm / 10 * norm / (norm + 0.01)
        assert ours >= bound * (1 - 1e-3 - kappa * 1e-6)


@pytest.mark.parametrize(("name", "kappa"), [(name, kappa) for name in CANCELLING for kappa in (1e2, 1e6)])
def test_the_cancellation_is_what_it_says(name, kappa):
    """The ratio of the terms' norms to the norm of their sum grows with κ, so that the test above tests something."""
    torch.manual_seed(0)
    gentle, strong = (norm_of(exact_gradients(*CANCELLING[name](factor))[:1]) for factor in (1.0, kappa))
    assert kappa / 30 <= gentle / strong <= kappa * 3


def with_equal_numbers(time, outputs, features, kappa):
    """Tokens of one direction each way: every product in a sum is rounded alike, and the errors add up."""
    inputs = (1 + 0.1 * torch.rand(2, time // 2, 1, generator=torch.Generator().manual_seed(3))) / 3
    weights = torch.full((2, time // 2, outputs), 0.7)
    return inputs.expand(-1, -1, features).repeat(1, 2, 1), torch.cat([weights, -weights * (1 + 1 / kappa)], dim=1)


def with_noise(time, outputs, features, kappa):
    weights = normal(2, time // 2, outputs, seed=2)
    return normal(2, time // 2, features, seed=1).repeat(1, 2, 1), in_pairs(weights, kappa)


@pytest.mark.parametrize(
    ("sizes", "numbers", "kappa", "norm_rule"),
    combined(
        [(64, 64, 64), (512, 128, 96), (32, 768, 768), (4, 4096, 1024)],  # the last two as in BERT and Llama
        [with_noise, with_equal_numbers],
        [1.0, 1e3, 1e5],
        NORM_RULES,
    ),
)
def test_rounding_in_a_large_layer_does_not_break_the_bound(sizes, numbers, kappa, norm_rule):
    time, outputs, features = sizes
    """The norm of millions of numbers, and Gram matrices of long vectors, are sums in which rounding adds up."""
    inputs, weights = numbers(time, outputs, features, kappa)
    norm = (weights[0].double().T @ inputs[0].double()).norm().item()
    layer, counted = nn.Linear(features, outputs, bias=False), torch.tensor([1.0, 0.0])
    options = dict(max_grad_norm=norm / 10, norm_rule=norm_rule)
    ours = contribution(layer, lambda: (layer(inputs) * weights).sum(dim=(1, 2)) * counted, **options)
    assert ours <= norm / 10 * (1 + SLACK)
    if kappa == 1.0:
        assert ours >= norm / 10 * (1 - 1e-2)


@pytest.mark.parametrize("norm_rule", NORM_RULES)
@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("numbers", [with_noise, with_equal_numbers])
@pytest.mark.parametrize(("time", "rows", "features"), [(128, 4, 768), (512, 1, 64)])
def test_rounding_in_a_large_table_does_not_break_the_bound(time, rows, features, numbers, kappa, norm_rule):
    """Few rows, each looked up many times."""
    _, weights = numbers(time, features, 1, kappa)
    ids = (torch.arange(time // 2) % rows).repeat(2, 2)
    norm = torch.zeros(rows, features).double().index_add_(0, ids[0], weights[0].double()).norm().item()
    table, counted = nn.Embedding(rows, features), torch.tensor([1.0, 0.0])
    options = dict(max_grad_norm=norm / 10, norm_rule=norm_rule)
    ours = contribution(table, lambda: (table(ids) * weights).sum(dim=(1, 2)) * counted, **options)
    assert ours <= norm / 10 * (1 + SLACK)
    if kappa == 1.0:
        assert ours >= norm / 10 * (1 - 1e-2)


# --- gradients that are not numbers, or too large for one -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "clipping", "granularity", "bad", "norm_rule"),
    pairwise(
        ["roberta", "gpt2-lm", "t5-lm", "vit-lora"], CLIPPINGS, GRANULARITIES, [math.nan, math.inf, -math.inf], NORM_RULES
    ),
)
def test_examples_without_a_finite_gradient_contribute_nothing(name, clipping, granularity, bad, norm_rule):
    model = build(name)
    inputs, labels = batch_for(model)
    others, two = torch.tensor([0, 1, 3, 5]), torch.tensor([2, 4])
    options = dict(max_grad_norm=0.5, clipping=clipping, granularity=granularity, norm_rule=norm_rule)
    with book_keeping(model, **options) as clipped:
        clipped.backward(losses_of(model, *rows(inputs, labels, others)))
        expected = {key: total.clone() for key, total in clipped.sums.items()}
        clipped.reset()
        norms = clipped.backward(losses_of(model, inputs, labels) * torch.ones(6).index_fill(0, two, bad))
        assert norms.isfinite().tolist() == [True, True, False, True, False, True]
        assert clipped.num_non_finite == 2
        assert_same_sums(clipped.sums, expected)
        clipped.reset()
        assert clipped.num_non_finite == 0


@pytest.mark.parametrize(
    ("name", "bad", "norm_rule"), combined(["vit", "resnet", "vit-dora"], [math.nan, math.inf], NORM_RULES)
)
def test_an_input_that_is_not_a_number_contributes_nothing(name, bad, norm_rule):
    model = build(name)
    inputs, labels = batch_for(model)
    others = torch.tensor([0, 1, 3, 4, 5])
    with book_keeping(model, max_grad_norm=0.5, norm_rule=norm_rule) as clipped:
        clipped.backward(losses_of(model, *rows(inputs, labels, others)))
        expected = {key: total.clone() for key, total in clipped.sums.items()}
        clipped.reset()
        inputs["pixel_values"][2, 0, 3, 3] = bad
        clipped.backward(losses_of(model, inputs, labels))
        assert clipped.num_non_finite == 1
        assert_same_sums(clipped.sums, expected)
        clipped.reset()
        clipped.backward(losses_of(model, {"pixel_values": inputs["pixel_values"] * bad}, labels))
        assert clipped.num_non_finite == 6
        assert all(not total.any() for total in clipped.sums.values())


@pytest.mark.parametrize(
    ("name", "scale", "norm_rule"), combined(["roberta", "gpt2-lm", "vit-lora"], [1e-30, 1e15, 1e25, 1e36], NORM_RULES)
)
def test_norms_whose_square_leaves_the_range_of_float32(name, scale, norm_rule):
    """Such an example is clipped or dropped; neither it nor its neighbours may exceed C or turn into NaN."""
    model = build(name, torch.float32)
    inputs, labels = batch_for(model, torch.float32)
    ones = torch.zeros(6).index_fill(0, torch.tensor(2), scale)
    norm = contribution(model, lambda: losses_of(model, inputs, labels) * ones, max_grad_norm=C, norm_rule=norm_rule)
    assert 0.0 <= norm <= C * (1 + SLACK)


# Inputs and gradients of outputs, whose products are ordinary or large while their squares leave the range of float32.
FAR_APART = [(1e17, 1e-23), (1e-23, 1e17), (1e30, 1e-28), (1e-35, 1e37), (1e22, 1.0), (1e-20, 1e-2), (1e15, 1e15)]


class Vectors(nn.Module):
    """One copy of a vector for each example."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8192))

    def forward(self, x):
        return self.scale * x


def far_apart(name, large, small):
    """Return a model, inputs of two examples, and the gradients of its outputs, of which the second's are ordinary."""
    scales = torch.tensor([[large, small], [1.0, 1.0]]).view(2, 2, 1, 1).unbind(dim=1)
    shapes = {"linear": (2, 6, 4, 5), "long": (2, 2, 8192, 3), "short": (2, 1, 8192, 3), "square": (2, 64, 8, 8)}
    if name in shapes:
        batch, time, features, outputs = shapes[name]
        factors = normal(batch, time, features, seed=1), normal(batch, time, outputs, seed=2)
        return nn.Linear(features, outputs, bias=False), factors[0] * scales[0], factors[1] * scales[1]
    if name == "embedding":
        return nn.Embedding(4, 5), torch.arange(6).remainder(4).repeat(2, 1), normal(2, 6, 5, seed=2) * scales[1]
    if name == "vectors":
        return Vectors(), normal(2, 3, 8192, seed=1) * scales[0], normal(2, 3, 8192, seed=2) * scales[1]
    of_head, of_rows = normal(2, PAIRS, OUTPUTS, seed=2), normal(2, OUTPUTS, FEATURES, seed=3)
    weights = (of_head * scales[1]).flatten(1), (of_rows * (scales[0] * scales[1])).flatten(1)
    return Tied(), normal(2, PAIRS, FEATURES, seed=1) * scales[0], torch.cat(weights, dim=1)


@pytest.mark.parametrize(
    ("name", "scales", "clipping", "granularity", "norm_rule"),
    pairwise(
        ["linear", "long", "short", "square", "embedding", "vectors", "tied"],
        FAR_APART,
        CLIPPINGS,
        GRANULARITIES,
        NORM_RULES,
    ),
)
def test_factors_of_any_size_are_clipped_to_the_norm_of_their_product(name, scales, clipping, granularity, norm_rule):
    model, inputs, weights = far_apart(name, *scales)
    norm = norm_of(exact_gradients(model, inputs, weights))
    options = dict(clipping=clipping, granularity=granularity, norm_rule=norm_rule, max_grad_norm=C)
    only_first = torch.tensor([1.0, 0.0]).view(2, *(1 for _ in weights.shape[1:]))
    ours = contribution(model, lambda: (model(inputs) * weights * only_first).flatten(1).sum(dim=1), **options)
    bound = min(C, norm) if clipping == "vanilla" else C * norm / (norm + 0.01)
    bound *= min(1.0, max(0.0, 2 - norm / 2**63))  # the largest fade away
    assert bound * (1 - 1e-2) - 1e-9 <= ours <= bound * (1 + SLACK) + 1e-30


@pytest.mark.parametrize(
    ("name", "scales", "norm_rule"),
    pairwise(
        ["linear", "long", "embedding", "vectors", "tied"],
        [*FAR_APART, (1e38, 1e30), (math.inf, 1.0), (1.0, math.nan)],
        NORM_RULES,
    ),
)
def test_an_example_of_any_size_leaves_the_others_as_they_are(name, scales, norm_rule):
    """Only the rows of that example may be computed in another way."""
    model, inputs, weights = far_apart(name, *scales)
    with book_keeping(model, max_grad_norm=C, norm_rule=norm_rule) as clipped:
        sums = []
        for counted in ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0]):
            kept = torch.tensor(counted).view(2, *(1 for _ in weights.shape[1:])) > 0
            clipped.backward(
                (model(inputs * kept if name == "vectors" else inputs) * weights.where(kept, 0.0)).flatten(1).sum(dim=1)
            )
            sums.append({key: total.clone() for key, total in clipped.sums.items()})
            clipped.reset()
    both, first, second = sums
    assert_same_sums(both, {key: first[key] + second[key] for key in both}, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("scales", [(1e-23, 1e17), (1e-24, 1e18), (1e18, 1e-25)])
@pytest.mark.parametrize("name", ["linear", "long", "square", "tied"])
def test_small_factors_do_not_hide_a_norm_above_a_small_bound(name, scales):
    """Their squares vanish, or nearly so, while their product is ten times the clip norm."""
    model, inputs, weights = far_apart(name, *scales)
    norm = norm_of(exact_gradients(model, inputs, weights))
    only_first = torch.tensor([1.0, 0.0]).view(2, *(1 for _ in weights.shape[1:]))
    options = dict(max_grad_norm=norm / 10, norm_rule="ghost")
    ours = contribution(model, lambda: (model(inputs) * weights * only_first).flatten(1).sum(dim=1), **options)
    assert norm / 10 * (1 - 1e-2) <= ours <= norm / 10 * (1 + SLACK)


def test_small_factors_leave_no_trace_in_the_bound_where_they_cancel():
    """Two tokens of opposite sign and hidden size: the rest is what counts."""
    model, inputs, weights = far_apart("linear", 1e17, 1.0)
    inputs, weights = inputs.repeat(1, 2, 1), in_pairs(weights, 1e3) * 1e-23
    norm = norm_of(exact_gradients(model, inputs, weights))
    only_first = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    options = dict(max_grad_norm=norm / 10, norm_rule="ghost")
    ours = contribution(model, lambda: (model(inputs) * weights * only_first).flatten(1).sum(dim=1), **options)
    assert norm / 10 * (1 - 1e-2) <= ours <= norm / 10 * (1 + SLACK)


@pytest.mark.parametrize("share", [1e-4, 1e-6, 1e-8])
def test_a_factor_below_the_range_of_float32_is_rounded_to_nothing(share):
    """It would be rounded to a multiple of 1.4e-45, up to twice what it is."""
    inputs, weights = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 3), 3e38) * torch.tensor([0.9, 0.8, 0.7])
    layer = nn.Linear(2, 3, bias=False)
    with book_keeping(layer, max_grad_norm=1.0, norm_rule="direct") as clipped:
        clipped.backward((layer(inputs) * weights).sum(dim=(1, 2)), weights=torch.tensor([share]))
        assert norm_of(clipped.sums.values()) <= share * (1 + SLACK)


# --- long vectors and long sequences --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 1000, 1024, 1025, 4096, 151_936])
@pytest.mark.parametrize("numbers", ["equal", "alternating", "normal"])
def test_products_are_rounded_no_more_than_is_allowed_for(length, numbers):
    x, y = normal(1, 2, length, seed=1), normal(1, 3, length, seed=2)
    if numbers != "normal":  # every partial sum is rounded alike
        x, y = torch.full_like(x, 1 / 3), torch.full_like(y, 0.7)
    if numbers == "alternating":
        y[..., 1::2] *= -1
    exact = x.double() @ y.double().mT
    sizes = x.double().norm(dim=2).unsqueeze(2) * y.double().norm(dim=2).unsqueeze(1)
    allowed = ghost_norm.gamma(ghost_norm.roundings(length), torch.float32)
    assert ((ghost_norm.products(x, y.mT) - exact).abs() <= allowed * sizes).all()


@pytest.mark.parametrize(
    ("length", "block", "most"), [(1, 128, 1), (128, 128, 128), (129, 128, 129), (257, 128, 130), (151_936, 1024, 1172)]
)
def test_roundings_are_those_of_a_block_and_of_the_blocks(length, block, most):
    assert ghost_norm.roundings(length, block) == most


TIME, DIM = 300, 400  # longer than what is tried with Gram matrices of both factors


def awkward(rows):
    """Rows of which a Gram matrix has no plain Cholesky factor: zeros, copies, opposites, and all but copies."""
    if rows == "zeros":
        return torch.zeros(1, TIME, DIM)
    x = normal(1, TIME, DIM, seed=1)
    if rows == "copies":
        return x[:, :7].repeat(1, TIME // 7 + 1, 1)[:, :TIME]
    if rows == "nearly equal":
        return x[:, :1] + 1e-6 * x
    if rows == "of all sizes":
        return x * torch.logspace(-30, 15, TIME)[:, None] * (torch.arange(TIME) % 5 > 0)[:, None]
    return x


@pytest.mark.parametrize("rows", ["normal", "zeros", "copies", "nearly equal", "of all sizes"])
def test_a_basis_is_above_the_factor_that_it_stands_for_and_close_to_it(rows):
    """As quadratic forms, in units of the rows' norms: the difference has eigenvalues from 0 to 2ε."""
    factor = awkward(rows).double()
    basis = ghost_norm.basis_of(factor)
    units = basis.norms.unsqueeze(1) * basis.norms.unsqueeze(2)
    above = basis.rows @ basis.rows.mT - factor @ factor.mT
    lost = basis.lost * torch.eye(TIME, dtype=torch.float64)
    assert torch.linalg.eigvalsh(above / units).min() >= 0.0
    assert torch.linalg.eigvalsh((above - lost) / units).max() <= 3 * TIME * (2 * TIME + DIM + 10) * 2.0**-53
    assert (basis.norms >= factor.norm(dim=2)).all()


@pytest.mark.parametrize("rows", ["normal", *thorough("copies"), "nearly equal"])
@pytest.mark.parametrize(
    ("time", "words"), [(16, 256_000), (64, 50_257), (128, 3_000), (128, 20_000), (256, 3_000), (512, 3_000), (700, 3_000)]
)
def test_a_norm_is_never_below_the_exact_one_and_above_by_less_than_a_thousandth(time, words, rows):
    """Of tokens whose terms do not cancel, and whose hidden states may all be alike."""
    left, right = normal(1, time, words, seed=1), normal(1, time, 768, seed=2)
    if rows == "copies":
        right[:, 1::2] = right[:, :1]
    if rows == "nearly equal":
        right = right[:, :1] + 0.1 * right
    exact = ((left.double() @ left.double().mT) * (right.double() @ right.double().mT)).sum()
    for factors in ((left, right), (right, left)):
        norms = gradients.OuterProducts(*factors).norms()
        assert 1 <= norms.raised(torch.float32) / exact.sqrt() <= 1 + 1e-3
        assert norms.values + norms.errors >= exact.sqrt()


def test_an_uncertain_example_leaves_the_norms_of_others_as_they_are():
    """That Gram matrices do not suffice is found, and mended, for each example on its own."""
    left, right = normal(3, 128, 8192, seed=1), normal(3, 128, 512, seed=2)
    left[1], right[1, 64:] = torch.cat([left[1, :64], left[1, 64:] * 0.1 - left[1, :64]]), right[1, :64]  # mostly cancels
    norms = raised(left, right)
    for row in range(3):
        torch.testing.assert_close(
            norms[row : row + 1], raised(left[row : row + 1], right[row : row + 1]), atol=0.0, rtol=2e-7
        )
    exact = ((left.double() @ left.double().mT) * (right.double() @ right.double().mT)).sum(dim=(1, 2)).sqrt()
    assert (norms >= exact).all()
    assert (norms[[0, 2]] <= exact[[0, 2]] * (1 + 1e-3)).all()
    grams = ghost_norm.gram_matrix(left), ghost_norm.gram_matrix(right)
    assert ghost_norm.from_grams(*grams, lengths=(8192, 512))[1].tolist() == [True, False, True]


@pytest.mark.parametrize("beta", [0, 1])
def test_the_sum_over_a_long_sequence_is_the_same_in_pieces(beta, monkeypatch):
    monkeypatch.setattr(gradients, "SUM_PIECE", 48)
    left, right, weights = normal(2, 600, 7, seed=1), normal(2, 600, 12, seed=2), torch.tensor([0.3, 2.0])
    before = normal(7, 12, seed=3)
    total = before.clone()
    gradients.OuterProducts(left, right).add_weighted(total, weights, beta=beta)
    torch.testing.assert_close(
        total, beta * before + torch.einsum("b,btp,btq->pq", weights, left, right), atol=1e-4, rtol=1e-5
    )


def test_a_row_that_is_looked_up_often_has_the_norm_of_its_sum():
    """A sum of 512 terms of one sign, whose rounding adds up: the norm is that of the numbers that are added."""
    table, weights = nn.Embedding(3, 64), torch.full((1, 512, 64), 0.7)
    ours = contribution(
        table, lambda: (table(torch.zeros(1, 512, dtype=torch.long)) * weights).sum(dim=(1, 2)), max_grad_norm=C
    )
    assert C * (1 - 1e-3) <= ours <= C * (1 + SLACK)


class LanguageModel(nn.Module):
    """An embedding, one layer, and a head, which may be the embedding's table; all of one size, as in Gemma."""

    def __init__(self, words, hidden, *, tied):
        super().__init__()
        self.table, self.layer = nn.Embedding(words, hidden), nn.Linear(hidden, hidden)
        self.norm, self.head = nn.LayerNorm(hidden, elementwise_affine=False), nn.Linear(hidden, words, bias=False)
        nn.init.normal_(self.table.weight, std=hidden**-0.5)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.norm(self.layer(self.table(ids) * self.table.embedding_dim**0.5)))


def contribution_of_a_text(words, length, hidden, *, tied, precision="float32"):
    """Return ‖contribution‖/C of one text, whose gradient is larger than C."""
    torch.manual_seed(0)
    model = LanguageModel(words, hidden, tied=tied).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    ids = torch.randint(words, (1, length + 1))

    def losses():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            logits = model(ids[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[0, 1:]).unsqueeze(0)

    return contribution(model, losses, max_grad_norm=1e-3) / 1e-3


SMALL = [(50_257, 128, 256), (128_256, 128, 192), (151_936, 96, 256), (256_000, 64, 192), (1000, 512, 768)]
LARGE = [(50_257, 512, 768), (151_936, 256, 768), (256_000, 512, 64), (256_000, 1024, 256), (50_257, 4096, 768)]


QUICK = [(*sizes, place % 2 == 1) for place, sizes in enumerate(SMALL)]


def mark_of(words, *others):
    if (words, *others) not in QUICK:
        return pytest.mark.slow
    return pytest.mark.thorough if words > 100_000 else ()


@pytest.mark.parametrize(
    ("words", "length", "hidden", "tied"),
    [pytest.param(*sizes, tied, marks=mark_of(*sizes, tied)) for sizes in [*SMALL, *LARGE] for tied in (False, True)],
)
def test_a_clipped_text_contributes_the_clip_norm_whatever_the_vocabulary(words, length, hidden, tied):
    assert 1 - 1e-3 <= contribution_of_a_text(words, length, hidden, tied=tied) <= 1 + SLACK


@pytest.mark.parametrize(
    ("precision", "tied"),
    combined(["bf16", "autocast"], [False, True], strength=1),
)
def test_so_does_one_whose_factors_are_of_half_precision(precision, tied):
    """The sum is in float32, of the very factors of which the norm is taken."""
    assert 1 - 1e-3 <= contribution_of_a_text(50_257, 128, 256, tied=tied, precision=precision) <= 1 + SLACK


def test_norms_are_taken_in_full_precision_whatever_the_user_allows(monkeypatch):
    """TF32 and bfloat16 products would round the factors of the norm and of the sum differently."""
    seen, gram_matrix = [], ghost_norm.gram_matrix

    def spied(factor):
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        return gram_matrix(factor)

    monkeypatch.setattr(ghost_norm, "gram_matrix", spied)
    model = build("roberta", torch.float32)
    inputs, labels = batch_for(model, torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with book_keeping(model, norm_rule="ghost") as clipped, torch.autocast("cpu", torch.bfloat16):
            clipped.backward(losses_of(model, inputs, labels).float())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {("highest", False)}


@pytest.mark.parametrize(("own", "padded"), [(40, 128), (100, 300), (150, 500), (300, 1000)])
@pytest.mark.parametrize("hidden", [(96, 64), (768, 768), (5000, 64)])
@pytest.mark.parametrize("alike", [False, True])
def test_padding_does_not_change_a_weight(own, padded, hidden, alike):
    """It is as long as another example asks for, which would change the weight of this one, and of all others.

    By it is chosen whether the norm is taken from both Gram matrices, from a basis, or from the gradient itself.
    """
    left, right = normal(1, padded, hidden[0], seed=1), normal(1, padded, hidden[1], seed=2)
    left[:, own:] = 0  # the loss does not depend on what stands behind the end
    if alike:
        right = right[:, :1] + 0.1 * right
    factors = left[:, :own], right[:, :own]
    direct = gradients.OuterProducts(*factors).densified(torch.Size(hidden)).norms().raised(torch.float32)
    for norm in (raised(left, right), raised(*(factor.flip(1) for factor in (left, right))), direct):
        torch.testing.assert_close(norm, raised(*factors), rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("kappa", [1.0, 300.0, 3e4, 3e6])
@pytest.mark.parametrize("scale", [1.0, 2.0**31, 2.0**60, 2.0**63])
def test_padding_does_not_change_a_contribution_whose_terms_cancel_or_overflow(kappa, scale):
    """A text of 16 tokens beside one of 16, of 100 and of 600, for which the matrix is formed."""
    layer, contributions = nn.Linear(64, 8, bias=False), []
    with torch.no_grad():
        layer.weight.zero_()  # in the forward pass nothing may overflow
    inputs = normal(1, 8, 64, seed=1).repeat(1, 2, 1) * scale
    weights = in_pairs(normal(1, 8, 8, seed=2), kappa) * scale
    norm = (weights[0].double().T @ inputs[0].double()).norm().item()
    bound = min(C, norm / 10)
    for length in (16, 100, 600):
        padding = torch.zeros(1, length - 16, 64)
        padded = torch.cat([inputs, padding], dim=1), torch.cat([weights, padding[..., :8]], dim=1)
        with book_keeping(layer, max_grad_norm=bound) as clipped:
            clipped.backward((layer(padded[0]) * padded[1]).sum(dim=(1, 2)))
            contributions.append(clipped.sums["weight"].double())
    assert contributions[0].norm() >= (bound * (1 - 2e-3) if norm < 2.0**62 else 0.0)
    for other in contributions[1:]:
        # Where terms cancel by more than CANCELLING, it is computed in float64.
        assert (other - contributions[0]).norm() <= bound * min(kappa * 1e-6, 1e-4)


def test_a_sum_over_time_that_cancels_is_the_same_with_padding():
    """Of single numbers, such as the gradients of a bias, torch adds more at a time of longer sequences."""
    terms = in_pairs(normal(1, 300, 1, seed=1), 2e6)
    padded = torch.cat([terms, torch.zeros(1, 100, 1)], dim=1)
    found = [sum_over_time(values, num_examples=1, shape=torch.Size([1])) for values in (terms, padded)]
    assert not any(sums.norms().are_certain() for sums in found)
    first, second = (sums.in_float64().values for sums in found)
    torch.testing.assert_close(second, first, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(first, terms.double().sum(dim=1), rtol=1e-6, atol=0.0)


def magnitude_of_dora():
    layer = get_peft_model(nn.Sequential(nn.Linear(8, 8)), LoraConfig(target_modules=["0"], use_dora=True))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("magnitude" in name)
    return layer


class of_time(nn.Module):
    """A convolution of one token at a time, in groups of channels, by the layer of so many dimensions."""

    def __init__(self, dimensions):
        super().__init__()
        self.convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](8, 8, 1, groups=2)
        self.ones = (1,) * (dimensions - 1)

    def forward(self, x):
        return self.convolution(x.mT.reshape(len(x), 8, *self.ones, -1)).reshape(x.mT.shape).mT


@pytest.mark.parametrize(
    "layer",
    [
        LlamaRMSNorm(8),
        nn.RMSNorm(8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        magnitude_of_dora(),
        of_time(1),
        of_time(2),
        of_time(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("kappa", [1e4, 1e6])
def test_on_which_side_padding_stands_does_not_change_what_cancels(layer, kappa):
    """In the order of its terms, which padding on the left moves, autograd would round their sum by κ times as much."""
    inputs = normal(1, 150, 8, seed=1).repeat(1, 2, 1)
    weights = in_pairs(normal(1, 150, 8, seed=2), kappa)
    bound = norm_of(exact_gradients(layer, inputs, weights)) / 10
    contributions = []
    for before, after in ((0, 0), (0, 37), (37, 0), (301, 0)):
        padded = [nn.functional.pad(x, (0, 0, before, after)) for x in (inputs, weights)]
        with book_keeping(layer, max_grad_norm=bound) as clipped:
            clipped.backward((layer(padded[0]) * padded[1]).sum(dim=(1, 2)))
            contributions.append(torch.cat([total.double().flatten() for total in clipped.sums.values()]))
    for other in contributions[1:]:
        assert (other - contributions[0]).norm() <= 1e-5 * bound


def test_what_cancels_is_the_same_whatever_length_came_first():
    """Of one token it does not show that a copy acts on all, and autograd would add them up."""
    layer, (inputs, weights) = LlamaRMSNorm(8), (normal(1, 300, 8, seed=1), in_pairs(normal(1, 150, 8, seed=2), 1e6))
    inputs[:, 150:] = inputs[:, :150]
    bound = norm_of(exact_gradients(layer, inputs, weights)) / 10
    contributions = []
    with book_keeping(layer, max_grad_norm=bound) as clipped:
        for before in (None, 0, 37):
            padded = [normal(1, 1, 8, seed=3)] * 2
            if before is not None:
                padded = [nn.functional.pad(x, (0, 0, before, 0)) for x in (inputs, weights)]
            clipped.reset()
            clipped.backward((layer(padded[0]) * padded[1]).sum(dim=(1, 2)))
            contributions.append(clipped.sums["weight"].double())
    assert (contributions[2] - contributions[1]).norm() <= 1e-5 * bound


@pytest.mark.parametrize("name", ["roberta", "vit", "gpt2-lm"])
def test_what_cancels_to_nothing_beside_the_whole_gradient_is_not_computed_again(name, monkeypatch):
    """The bias of the keys, which attention does not see: its gradient is nothing but rounding."""
    model = build(name, torch.float32)
    inputs, labels = batch_for(model, torch.float32)
    monkeypatch.setattr(Dense, "in_float64", lambda self: pytest.fail("computed in float64"))
    with book_keeping(model) as clipped:
        losses = losses_of(model, inputs, labels)
        clipped.hold_apart()  # whose comparison is in float64
        clipped.backward(losses)


def test_uses_in_full_that_cancel_are_added_in_float64():
    """A parameter's gradients of several uses, of which one has an example whose terms cancel."""
    left, right = normal(3, 200, 6, seed=1), normal(3, 200, 4, seed=2)
    right[1, 100:], left[1, 100:] = -right[1, :100], left[1, :100] + 1e-6 * normal(100, 6, seed=3)
    ids, values = torch.arange(6).repeat(3, 1), normal(3, 6, 4, seed=4) * 1e-6
    uses = [gradients.OuterProducts(left, right).densified(torch.Size([6, 4])), gradients.LookedUpRows(ids, values)]
    total = gradients.combined(uses, shape=torch.Size([6, 4]))
    exact = left.double().mT @ right.double() + values.double()
    assert total.norms().are_certain().tolist() == [True, False, True]
    torch.testing.assert_close(total.of_examples(torch.tensor([False, True, True])).in_float64().values[0], exact[1])
    assert (total.values.double()[1] - exact[1]).norm() > 1e-4 * exact[1].norm()  # which float32 would have been


@pytest.mark.parametrize("padded", [12, 20])
def test_in_float64_padding_changes_no_weight_however_much_cancels(padded):
    """What a Cholesky factor of the Gram matrix adds to the norm grew with the padding."""
    weights = torch.cat([normal(1, 4, 16, seed=2).double(), torch.zeros(1, 1, 16, dtype=torch.float64)], dim=1)
    rest = normal(1, 5, 16, seed=3).double() * 1e-7
    factors = normal(1, 5, 16, seed=1).double().repeat(1, 2, 1), torch.cat([weights, rest - weights], dim=1)
    longer = [torch.cat([factor, torch.zeros(1, padded, 16, dtype=torch.float64)], dim=1) for factor in factors]
    torch.testing.assert_close(raised(*longer), raised(*factors), rtol=1e-6, atol=0.0)


def raised(left, right):
    return gradients.OuterProducts(left, right).norms().raised(torch.float32)
