"""Each form of a gradient against the gradient in full: norms, sums, joins, and what is noted when."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from doppler_hf.privacy.clipping import gradients as of_gradients
from doppler_hf.privacy.clipping.gradients import (
    Dense,
    Lookup,
    Notes,
    Product,
    Squares,
    Standardization,
    Standardized,
    Tied,
    Use,
    Weights,
    combined,
    in_groups,
)
from doppler_hf.privacy.clipping.torch_layers import RULES
from tests.support.nets import Net, draw, ready, tokens
from tests.support.per_example import assert_equals_loop, book_keeping
from tests.support.tiers import thorough

EXAMPLES, TIME, P, Q, ROWS = 3, 6, 4, 5, 9
EXACT = dict(rtol=1e-12, atol=1e-12)
# What a square is raised by in float64 is far below this.
CLOSE = dict(rtol=1e-11, atol=1e-11)


def product(seed=1, time=TIME, p=P, q=Q):
    return Product(draw(EXAMPLES, time, p, seed=seed), draw(EXAMPLES, time, q, seed=seed + 100))


def lookup(seed=1, time=TIME, rows=ROWS, dim=Q):
    return Lookup(tokens(EXAMPLES, time, upto=rows), draw(EXAMPLES, time, dim, seed=seed), rows)


def dense(seed=1, n=P * Q):
    return Dense(draw(EXAMPLES, n, seed=seed))


def tied():
    """The product has a row for each row of the table."""
    return Tied(product(p=ROWS), lookup(seed=2))


def standardized(seed=1, time=TIME):
    """The weight is standardized but for an epsilon, so its rows have a norm below √q."""
    weight = draw(P, Q, seed=5)
    weight = 0.9 * (weight - weight.mean(1, keepdim=True)) / weight.std(1, correction=0, keepdim=True)
    return Standardized(product(seed, time), Standardization(weight, draw(P, seed=6).square()))


def in_full(gradient):
    """Each example's gradient, shape (examples, n), by sums over places one after another."""
    match gradient:
        case Dense(values):
            return values
        case Product(left, right):
            return torch.stack([sum(torch.outer(l, r) for l, r in zip(*each)) for each in zip(left, right)]).flatten(1)
        case Standardized(of_weight, standard):
            full = in_full(of_weight).view(-1, *standard.weight.shape)
            along = (full * standard.weight).mean(2, keepdim=True)
            return (full - full.mean(2, keepdim=True) - along * standard.weight).flatten(1)
        case Lookup(ids, values, rows):
            full = torch.zeros(len(ids), rows, values.shape[2], dtype=values.dtype)
            for example, place in zip(*map(torch.flatten, torch.meshgrid(*map(torch.arange, ids.shape), indexing="ij"))):
                full[example, ids[example, place]] += values[example, place]
            return full.flatten(1)
        case Tied(first, second):
            return in_full(first) + in_full(second)


GRADIENTS = {
    "dense": dense,
    "product": product,
    "wide product": lambda: product(p=8, q=3),
    "product of one place": lambda: product(time=1),
    "look-up": lookup,
    "look-up of one place": lambda: lookup(time=1),
    "tied": tied,
    "standardized": standardized,
}


def squares_of(gradient, *, halves=True):
    squares = Squares(in_kernels=False, halves=halves)
    gradient.add_squares(squares, "all")
    return squares.norms()["all"].square()


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("name", GRADIENTS)
def test_squares_are_those_of_the_gradient_in_full(name, halves, monkeypatch):
    monkeypatch.setattr(of_gradients, "BLOCK", 4)
    gradient = GRADIENTS[name]()
    torch.testing.assert_close(squares_of(gradient, halves=halves), in_full(gradient).square().sum(1), **CLOSE)


def test_squares_that_are_known_are_not_computed_once_more():
    gradient = Dense(draw(EXAMPLES, 7), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(squares_of(gradient), gradient.squares)


def test_squares_are_raised_for_terms_that_cancel():
    """Two places that cancel: the square in full is zero, and that of S = Σ ‖l‖‖r‖ counts."""
    ones = torch.ones(1, 1, 3)
    gradient = Product(torch.cat([ones, -ones], dim=1), torch.cat([ones, ones], dim=1))
    eps, size = torch.finfo(torch.float32).eps, 6.0
    expected = eps * (of_gradients.GUARD * size**2 + of_gradients.TERMS * size**2)
    assert squares_of(gradient).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("scale", [3.0, 1e16, 1e19])
@pytest.mark.parametrize("offset", [0.0, 1e-3, -1e-3])  # of rows that rounding has left with a mean
@pytest.mark.parametrize("small", [0.0, 1e-4, 1e-2])
def test_the_square_of_a_standardized_gradient_is_never_below_the_true_one_however_much_cancels(small, offset, scale):
    """A row of the product is along ŵ and 1, but for a small part, which is all that standardization keeps."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 4608, generator=generator)
    weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, correction=0, keepdim=True) + offset
    left = torch.zeros(1, 1, 64)
    left[..., 0] = scale
    for mean in (2.0, -2.0):
        right = weight[:1].unsqueeze(1) + mean + small * torch.randn(1, 1, 4608, generator=generator)
        gradient = Standardized(Product(left, right), Standardization(weight, torch.ones(64)))
        exact = in_full(
            Standardized(Product(left.double(), right.double()), Standardization(weight.double(), torch.ones(64)))
        )
        found = squares_of(gradient)
        if found.isfinite():  # else the example is left out
            assert exact.square().sum() <= found <= exact.square().sum() + 2e-2 * scale**2 * 4608 * 5
        assert found.isfinite() == (scale < 1e17)


def test_groups_are_added_up_apart_however_many_are_compared_at_once(monkeypatch):
    for at_once in (1, 2**20):
        monkeypatch.setattr(of_gradients, "AT_ONCE", at_once)
        squares, gradients = Squares(in_kernels=False, halves=True), [product(1), product(2), lookup(3), dense(4), tied()]
        for index, gradient in enumerate(gradients):
            gradient.add_squares(squares, "even" if index % 2 == 0 else "odd")
        found = squares.norms()
        for group, some in (("even", gradients[::2]), ("odd", gradients[1::2])):
            expected = sum(in_full(each).square().sum(1) for each in some).sqrt()
            torch.testing.assert_close(found[group], expected, **CLOSE)


@pytest.mark.parametrize(("at_once", "sizes"), [(1, [1, 1, 1, 1]), (200, [2, 1, 1]), (2**20, [3, 1])])
def test_gram_matrices_are_kept_until_so_many_numbers_are_compared(at_once, sizes, monkeypatch):
    """Three of 6 × 6 numbers for each example, and one of a longer text."""
    monkeypatch.setattr(of_gradients, "AT_ONCE", at_once)
    compared, compare = [], Squares._compare
    monkeypatch.setattr(Squares, "_compare", lambda self, pairs: compared.append(len(pairs)) or compare(self, pairs))
    squares = Squares(in_kernels=False, halves=True)
    for gradient in (product(1), product(2), lookup(3), product(4, time=7)):
        gradient.add_squares(squares, "all")
    squares.norms()
    assert sorted(compared, reverse=True) == sizes


def test_a_square_that_rounding_has_made_negative_is_zero():
    squares = Squares(in_kernels=False, halves=True)
    squares.add("all", torch.tensor([5.0, 1.0]))
    squares.add("all", torch.tensor([-1.0, -1.1]))
    assert squares.norms()["all"].tolist() == [2.0, 0.0]


def weights(*factors, finite=None):
    factors = torch.tensor(factors, dtype=torch.float64)
    return Weights(factors, finite if finite is None else torch.tensor(finite), torch.zeros(()))


@pytest.mark.parametrize("has_total", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_weighted_sum_is_that_of_the_gradient_in_full(name, has_total):
    gradient, of_clip = GRADIENTS[name](), weights(0.5, 2.0, -1.0)
    full = in_full(gradient)
    # In the shape of the parameter, as sums are kept.
    total = draw(full.shape[1], seed=7).view_as(gradient.weighted(of_clip, None)) if has_total else None
    expected = of_clip.factors @ full + (0 if total is None else total.flatten())
    found = gradient.weighted(of_clip, total)
    torch.testing.assert_close(found.flatten(), expected, **EXACT)
    assert total is None or found.data_ptr() == total.data_ptr()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_not_finite_is_left_out_of_the_sum(name, bad):
    gradient = GRADIENTS[name]()
    expected = gradient.weighted(weights(0.5, 0.0, 2.0), None)
    for factor in (gradient.factors[0], gradient.factors[-1]):
        factor[1] = bad
    if isinstance(gradient, Tied):
        gradient.lookup.values[1] = bad
    found = gradient.weighted(weights(0.5, 0.0, 2.0, finite=[True, False, True]), None)
    torch.testing.assert_close(found, expected, **EXACT)


def test_what_a_kernel_has_weighted_is_taken_in_the_place_of_the_factors():
    for gradient in (product(), tied()):
        plain = weights(0.5, 2.0, -1.0)
        left, right = gradient.factors
        by_kernel = Weights(plain.factors, None, plain.zero, (3 * left, right))
        first = gradient.product if isinstance(gradient, Tied) else gradient
        rest = plain.factors @ in_full(gradient.lookup) if isinstance(gradient, Tied) else 0
        torch.testing.assert_close(gradient.weighted(by_kernel, None).flatten(), 3 * in_full(first).sum(0) + rest, **EXACT)


@pytest.mark.parametrize("make", [dense, product, lookup, standardized])
def test_several_uses_are_joined_to_their_sum(make):
    uses = [make(seed=1), make(seed=2), make(seed=3)]
    before = [use.factors[0].clone() for use in uses]
    whole = type(uses[0]).joined(uses)
    torch.testing.assert_close(in_full(whole), sum(map(in_full, uses)), **EXACT)
    assert all(torch.equal(use.factors[0], each) for use, each in zip(uses, before))


def test_uses_of_several_forms_are_one_gradient():
    def full(*uses):
        return sum(map(in_full, uses))

    head, table = product(p=ROWS), lookup(seed=2)
    values = dense(3, n=ROWS * Q)
    before = values.values.clone()
    for uses, form in [
        ({Product: [head], Lookup: [table]}, Tied),
        ({Lookup: [table], Product: [head, head]}, Tied),
        ({Product: [head]}, Product),
        ({Lookup: [table, table]}, Lookup),
        ({Dense: [values], Product: [head]}, Dense),
        ({Standardized: [standardized(1), standardized(2)]}, Standardized),
        ({Standardized: [standardized(1)], Product: [product(2)], Dense: [dense(3)]}, Dense),
        ({Product: [head, head], Dense: [values], Lookup: [table, table]}, Dense),
    ]:
        expected = full(*(use for some in uses.values() for use in some))
        found = combined(uses)
        assert type(found) is form
        torch.testing.assert_close(in_full(found), expected, **EXACT)
        torch.testing.assert_close(squares_of(found), expected.square().sum(1), **CLOSE)
    assert torch.equal(values.values, before)  # autograd's own, perhaps


@pytest.mark.parametrize("name", ["dense", "product", "look-up"])
def test_examples_have_terms_if_all_factors_have(name):
    gradient = GRADIENTS[name]()
    assert gradient.has_terms().tolist() == [True] * EXAMPLES
    gradient.factors[0][0] = 0.0
    gradient.factors[-1][2] = 0.0
    gradient.factors[0][2, 0] = torch.inf  # times zero
    if name == "product":
        gradient.factors[-1][1, 1:] = 0.0  # one place is left
    assert gradient.has_terms().tolist() == [False, True, False]


# --- notes ----------------------------------------------------------------------------------------------------------------


def noted(*calls, rule="ghost", examples=EXAMPLES):
    """What is kept of some calls on one parameter: (method, arguments) each."""
    notes, parameter = Notes(norm_rule=rule, in_kernels=False), torch.empty(ROWS, Q)
    notes.num_examples = examples
    for method, *arguments in calls:
        getattr(notes, method)(parameter, *arguments)
    return notes.gradients({"weight": parameter, "unused": torch.empty(1)})


def test_an_unused_parameter_has_no_gradient_and_one_is_given_once():
    assert noted(("note_product", *product(p=ROWS).factors)).keys() == {"weight"}
    notes, parameter = Notes(norm_rule="auto", in_kernels=False), torch.empty(2, 3)
    notes.num_examples = EXAMPLES
    notes.note_rows(parameter, draw(EXAMPLES, 6))
    assert notes.gradients({"weight": parameter}).keys() == {"weight"}
    assert notes.gradients({"weight": parameter}) == {}  # its memory is free


def test_sums_over_time_are_noted_for_trained_parameters_in_float32():
    terms = torch.ones(1, 701, 2, dtype=torch.bfloat16)  # whose sum bfloat16 would round
    notes, trained = Notes(norm_rule="auto", in_kernels=False), torch.empty(2, requires_grad=True)
    for parameter in (trained, torch.empty(2), None):
        notes.note_sum(parameter, terms)
    assert notes.uses.keys() == {trained}
    (gradient,) = notes.gradients({"bias": trained}).values()
    assert gradient.values.tolist() == [[701.0, 701.0]]
    assert gradient.values.dtype == torch.float32


@pytest.mark.parametrize("frozen", ["weight", "bias", ""])
def test_a_normalization_has_the_gradients_that_autograd_has(frozen):
    weight, bias = draw(Q, seed=4).requires_grad_(frozen != "weight"), draw(Q, seed=5).requires_grad_(frozen != "bias")
    x, grad = draw(EXAMPLES, TIME, Q), draw(EXAMPLES, TIME, Q, seed=2)
    mean, rstd = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
    notes = Notes(norm_rule="auto", in_kernels=False)
    notes.num_examples = EXAMPLES
    notes.note_normalized(weight, bias, (x, mean, rstd, grad))
    found = notes.gradients({"weight": weight, "bias": bias})
    trained = {name: each for name, each in {"weight": weight, "bias": bias}.items() if each.requires_grad}
    assert found.keys() == trained.keys()
    for example in range(EXAMPLES):
        output = nn.functional.layer_norm(x[example], (Q,), weight, bias)
        expected = torch.autograd.grad((output * grad[example]).sum(), [*trained.values()])
        for name, each in zip(trained, expected, strict=True):
            torch.testing.assert_close(found[name].values[example], each, **EXACT)


def test_a_product_is_formed_where_its_parts_together_are_large():
    """As a head that is called for some tokens at a time: 9·5 numbers against 14 for each place."""
    parts = [product(seed, time=8, p=ROWS) for seed in range(6)]
    calls = [("note_product", *part.factors) for part in parts]
    few, many = noted(*calls[:1], rule="auto")["weight"], noted(*calls, rule="auto")["weight"]
    assert (type(few), type(many)) == (Product, Dense)
    torch.testing.assert_close(many.values, sum(map(in_full, parts)), **EXACT)
    assert type(noted(*calls)["weight"]) is Product
    assert noted(*calls)["weight"].left.shape[1] == 48


def test_a_table_of_few_rows_is_formed():
    short, long = lookup(time=ROWS - 1), lookup(time=ROWS)
    kept, formed = (noted(("note_lookup", each.ids, each.values))["weight"] for each in (short, long))
    assert (type(kept), type(formed)) == (Lookup, Dense)
    torch.testing.assert_close(formed.values, in_full(long), **EXACT)


def test_what_is_noted_beside_a_gradient_in_full_is_added_to_it():
    head, table, values = product(p=ROWS), lookup(seed=2), dense(3, n=ROWS * Q)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        calls = [("note_product", *head.factors), ("note_lookup", table.ids, table.values), ("note_rows", values.values)]
        found = noted(*(calls[index] for index in order))["weight"]
        assert type(found) is Dense
        torch.testing.assert_close(found.values, in_full(head) + in_full(table) + values.values, **EXACT)


def test_gradients_in_full_of_several_calls_are_added_up_and_large_ones_know_their_norm(monkeypatch):
    monkeypatch.setattr(of_gradients, "SMALL", EXAMPLES * 8)
    rows = [draw(2 * EXAMPLES, 8, seed=seed) for seed in range(3)]  # two of each example
    full = [each.unflatten(0, (EXAMPLES, 2)).sum(1) for each in rows]
    one = noted(("note_rows", rows[0]))["weight"]
    torch.testing.assert_close(one.squares, full[0].square().sum(1), **EXACT)
    assert noted(("note_rows", rows[0][:, :7]))["weight"].squares is None
    several = noted(*(("note_rows", each) for each in rows))["weight"]
    torch.testing.assert_close(several.values, sum(full), **EXACT)
    torch.testing.assert_close(squares_of(several), sum(full).square().sum(1), **CLOSE)


@pytest.mark.parametrize("rule", ["ghost", "direct"])
def test_rows_of_an_example_are_added_up(rule):
    rows = Product(draw(2 * EXAMPLES, TIME, ROWS), draw(2 * EXAMPLES, TIME, Q, seed=2))
    table = Lookup(tokens(2 * EXAMPLES, 2, upto=ROWS), draw(2 * EXAMPLES, 2, Q), ROWS)
    terms = draw(2 * EXAMPLES, TIME, ROWS * Q)
    for call, full in [
        (("note_product", *rows.factors), in_full(rows)),
        (("note_lookup", table.ids, table.values), in_full(table)),
        (("note_rows", terms[:, 0]), terms[:, 0]),
    ]:
        found = noted(call, rule=rule)["weight"]
        torch.testing.assert_close(in_full(found), full.unflatten(0, (EXAMPLES, 2)).sum(1), **EXACT)


def test_in_a_check_the_examples_are_compared_and_nothing_is_kept():
    notes, parameters = Notes(norm_rule="auto", in_kernels=False), {"a": torch.empty(ROWS, Q), "b": torch.empty(ROWS, Q)}
    notes.num_examples, notes.examined = EXAMPLES, torch.tensor([True, False, True])
    left, right = product(p=ROWS).factors
    left[1] = 0.0
    notes.note_product(parameters["a"], left, right)
    assert notes.coupled == set()
    right[1], left[1, 3, 2] = 0.0, 1e-30
    notes.note_product(parameters["a"], left, right)
    assert notes.coupled == set()
    right[1, 0, 1] = 1e-30
    notes.note_product(parameters["b"], left, right)
    assert notes.coupled == {parameters["b"]}
    assert notes.gradients(parameters) == {}


def test_small_gradients_in_full_of_a_group_are_side_by_side():
    gradients = {
        "a": dense(1, n=3), "b": product(2), "c": dense(3, n=2), "d": dense(4, n=40), "e": dense(5, n=1),
        "f": Dense(torch.ones(EXAMPLES, 2)),
    }  # fmt: skip
    found = in_groups(gradients, dict.fromkeys("abcdf", "one") | {"e": "two"}, small=EXAMPLES * 40)
    assert found.keys() == {("b",), ("d",), ("a", "c"), ("e",), ("f",)}
    together = torch.cat([gradients["a"].values, gradients["c"].values], dim=1)
    assert torch.equal(found["a", "c"].values, together)


# --- a form of one's own ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scaled(Use):
    """g_i = s_i·v, one vector for all examples, as of a layer that adds a bias times the example's own number."""

    scales: torch.Tensor
    vector: torch.Tensor

    @property
    def factors(self):
        return (self.scales.unsqueeze(1) * self.vector,)

    @classmethod
    def joined(cls, uses):
        return Dense.joined([Dense(use.factors[0]) for use in uses])

    def in_full(self, total):
        return self.factors[0] if total is None else total.add_(self.factors[0])

    def add_squares(self, squares, group):
        squares.add(group, self.scales.square() * self.vector.square().sum())

    def weighted(self, weights, total):
        summed = (self.scales * weights.factors).sum() * self.vector
        return summed if total is None else total.add_(summed)


class Shift(nn.Module):
    """Adds the sum of its bias to every number of its input, so that each number of the bias has one gradient."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.bias.sum()


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, notes):
        ctx.bias, ctx.notes = bias, notes
        return x + bias.sum()

    @staticmethod
    def backward(ctx, grad):
        ctx.notes.note(ctx.bias, Scaled(grad.flatten(1).sum(1), torch.ones(4, dtype=grad.dtype)))
        return grad, None, None


@pytest.mark.parametrize("calls", [1, *thorough(2)])
def test_a_form_and_a_rule_of_ones_own_are_one_class_and_one_function(calls, monkeypatch):
    monkeypatch.setitem(RULES, Shift.forward, lambda notes, module, input: _Shifted.apply(input, module.bias, notes))

    def forward(net, x):
        for _ in range(calls):
            x = net.own(x).tanh()
        return net.last(x)

    net, x = ready(Net(forward, own=Shift(), last=nn.Linear(3, 2))), draw(EXAMPLES, 3)
    losses = lambda index: net(x[index]).square().sum(1)  # noqa: E731
    assert_equals_loop(net, losses, EXAMPLES)
    with book_keeping(net) as clipped:
        clipped.backward(losses(slice(None)))
        assert clipped.fallbacks == {}
