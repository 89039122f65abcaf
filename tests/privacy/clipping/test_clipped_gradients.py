"""The clipped sum equals a plain float64 loop over single examples, for the models that people fine-tune."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping import clipped_gradients
from doppler_hf.privacy.clipping.clip_factors import AUTOMATIC_CLIPPING_GAMMA, clip_factors
from tests.support.models import batch_for, build, losses_of, rows, vit
from tests.support.per_example import clip_and_sum, gradients_of_each, median_norm, norms_of
from tests.support.tiers import combined

MODELS = ["roberta", "bert", "distilbert", "gpt2", "vit", "roberta-lora", "vit-lora"]
OF_EVERY_KIND = [["vanilla", "automatic"], ["flat", "per_layer"]]


@functools.cache
def loop_over_examples(name):
    model = build(name)
    inputs, labels = batch_for(model)
    return gradients_of_each(model, lambda index: losses_of(model, *rows(inputs, labels, index)), len(labels))


@pytest.mark.parametrize(("name", "clipping", "granularity"), combined(MODELS, *OF_EVERY_KIND))
def test_clipped_sum_equals_a_loop_over_single_examples(name, clipping, granularity):
    model = build(name)
    inputs, labels = batch_for(model)
    gradients = loop_over_examples(name)
    options = dict(max_grad_norm=median_norm(gradients), clipping=clipping, granularity=granularity)
    sums = clip_and_sum(gradients, **options)
    with ClippedGradients(model, **options) as clipped:
        ours = clipped.backward(losses_of(model, inputs, labels))
        torch.testing.assert_close(ours, norms_of(gradients), atol=1e-10, rtol=1e-10)
        assert clipped.sums.keys() == sums.keys()
        for parameter, total in sums.items():
            torch.testing.assert_close(clipped.sums[parameter], total, atol=1e-10, rtol=1e-10, msg=parameter)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_used_twice_in_a_checkpointed_block(reentrant):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.linear = nn.Linear(3, 3), nn.Linear(3, 3)

        def block(self, x):
            return self.linear(torch.tanh(self.linear(x)))

        def forward(self, x, checkpointed):
            x = self.first(x)
            return (checkpoint(self.block, x, use_reentrant=reentrant) if checkpointed else self.block(x)).sum(dim=1)

    torch.manual_seed(0)
    model, x, sums = Repeated().double(), torch.randn(4, 3).double(), []
    for checkpointed in (False, True):
        with ClippedGradients(model, max_grad_norm=0.5) as clipped:
            clipped.backward(model(x, checkpointed))
            sums.append(clipped.sums)
    for name in sums[0]:
        torch.testing.assert_close(sums[1][name], sums[0][name], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "autocast", "clipping", "granularity"),
    combined(["roberta", "vit", "roberta-lora"], [False, True], *OF_EVERY_KIND),
)
def test_one_example_contributes_at_most_the_clip_norm(name, autocast, clipping, granularity):
    model = build(name, torch.float32)
    inputs, labels = batch_for(model, torch.float32)
    for scale in (1e-3, 1.0, 1e4):  # far below, near and far above C
        with ClippedGradients(model, max_grad_norm=0.1, clipping=clipping, granularity=granularity) as clipped:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = losses_of(model, *rows(inputs, labels, slice(0, 1)))
            clipped.backward(scale * losses.float())
            norm = math.sqrt(sum(total.double().square().sum().item() for total in clipped.sums.values()))
            assert 0.0 < norm <= 0.1 * (1 + 1e-6)


def test_dropout_trains_and_stays_bounded():
    model = vit(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    inputs, labels = batch_for(model, torch.float32)
    with ClippedGradients(model, max_grad_norm=1.0) as clipped:
        norms = clipped.backward(losses_of(model, inputs, labels))
    assert (norms > 0).all()


def test_evaluation_in_between_leaves_no_trace():
    model = build("vit")
    inputs, labels = batch_for(model)
    with ClippedGradients(model, max_grad_norm=0.5) as clipped:
        clipped.backward(losses_of(model, inputs, labels))
        before = {name: total.clone() for name, total in clipped.sums.items()}
        model.eval()
        with torch.no_grad():
            losses_of(model, *rows(inputs, labels, slice(0, 2)))
        model.train()
        clipped.reset()
        clipped.backward(losses_of(model, inputs, labels))
        for name, total in before.items():
            torch.testing.assert_close(clipped.sums[name], total, atol=1e-12, rtol=1e-12)


def test_model_is_left_as_it_was():
    model = build("vit")
    names, order = list(model.state_dict()), [id(p) for p in model.parameters()]
    attributes = {id(p): set(p.__dict__) for p in model.parameters()}
    inputs, labels = batch_for(model)
    with ClippedGradients(model) as clipped:
        clipped.backward(losses_of(model, inputs, labels))
        assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == order
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert {id(p): set(p.__dict__) for p in model.parameters()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    losses_of(model, inputs, labels).sum().backward()  # ordinary training works again


def test_raw_gradients_never_reach_grad():
    model = build("bert")
    inputs, labels = batch_for(model)
    with ClippedGradients(model) as clipped:
        clipped.backward(losses_of(model, inputs, labels))
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("clipping", "bad"),
    combined(OF_EVERY_KIND[0], [math.nan, math.inf], strength=1),
)
def test_an_example_without_a_finite_gradient_contributes_nothing(bad, clipping):
    model = build("vit")
    inputs, labels = batch_for(model)
    poisoned = {"pixel_values": inputs["pixel_values"].clone()}
    poisoned["pixel_values"][2] = bad
    with ClippedGradients(model, max_grad_norm=0.5, clipping=clipping) as clipped:
        norms = clipped.backward(losses_of(model, poisoned, labels))
        assert not norms[2].isfinite()
        assert clipped.num_non_finite == 1
        others = torch.tensor([0, 1, 3, 4, 5])
        sums = {name: total.clone() for name, total in clipped.sums.items()}
        clipped.reset()
        clipped.backward(losses_of(model, *rows(inputs, labels, others)))
        for name, total in sums.items():
            torch.testing.assert_close(total, clipped.sums[name], atol=1e-10, rtol=1e-10)


def test_a_model_where_every_example_is_bad_gives_zero():
    model = build("vit")
    inputs, labels = batch_for(model)
    with ClippedGradients(model) as clipped:
        clipped.backward(losses_of(model, {"pixel_values": inputs["pixel_values"] * float("nan")}, labels))
        assert all(not total.any() for total in clipped.sums.values())


def test_an_unused_parameter_gets_zero():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            return self.used(x)[:, 0]

    model = Half()
    with ClippedGradients(model) as clipped:
        clipped.backward(model(torch.randn(4, 3)))
        assert not clipped.sums["unused.weight"].any()
        assert clipped.sums["used.weight"].any()


def test_no_losses_change_nothing():
    model = build("vit")
    with ClippedGradients(model) as clipped:
        assert clipped.backward(torch.zeros(0)).shape == (0,)
        assert all(not total.any() for total in clipped.sums.values())


def test_factors_at_zero_and_at_the_bound():
    norms = torch.tensor([0.0, 1.0, 2.0, 4.0])
    torch.testing.assert_close(
        clip_factors(norms, max_grad_norm=2.0, clipping="vanilla"), torch.tensor([1.0, 1.0, 1.0, 0.5])
    )
    torch.testing.assert_close(
        clip_factors(norms, max_grad_norm=2.0, clipping="automatic"), 2.0 / (norms + AUTOMATIC_CLIPPING_GAMMA)
    )


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_an_embedding_used_twice_and_its_padding_row(padding_idx):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(6, 3, padding_idx=padding_idx), nn.Linear(3, 1)

        def forward(self, first, second):
            return self.head(torch.tanh(self.table(first).sum(dim=1) * self.table(second)))[:, 0]

    torch.manual_seed(0)
    model = Twice().double()
    first, second = torch.tensor([[0, 1, 1], [2, 0, 0], [5, 5, 5]]), torch.tensor([1, 0, 2])
    losses = model(first, second)
    expected_norms, expected = [], {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        expected_norms.append(norm)
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient * min(1.0, 0.5 / norm)
    with ClippedGradients(model, max_grad_norm=0.5) as clipped:
        norms = clipped.backward(model(first, second))
        torch.testing.assert_close(norms, torch.tensor(expected_norms, dtype=torch.float64), atol=1e-12, rtol=1e-12)
        for name, total in expected.items():
            torch.testing.assert_close(clipped.sums[name], total, atol=1e-12, rtol=1e-12)


def test_a_tied_embedding_counts_both_of_its_uses():
    model = build("gpt2-lm")
    ids = torch.randint(0, 40, (3, 5))

    def lm_losses(rows):
        logits = model(input_ids=rows).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(dim=1)

    expected = 0.0
    for row in ids:
        gradients = torch.autograd.grad(lm_losses(row[None]).sum(), list(model.parameters()))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        expected = expected + gradients[0] * min(1.0, 0.5 / norm)
    with ClippedGradients(model, max_grad_norm=0.5) as clipped:
        clipped.backward(lm_losses(ids))
        torch.testing.assert_close(clipped.sums["transformer.wte.weight"], expected, atol=1e-10, rtol=1e-10)


# --- refused, by name ---------------------------------------------------------------------------------------------------


def refused(model, message, call=lambda model: model(torch.randn(4, 3)).sum(dim=-1)):
    with pytest.raises(ValueError, match=message), ClippedGradients(model) as clipped:
        clipped.backward(call(model))


def test_batch_norm_is_refused_even_frozen():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    refused(model, r"'1' \(BatchNorm1d\) mixes the examples .* GroupNorm")
    model[1].requires_grad_(False)
    refused(model, "BatchNorm1d")
    refused(nn.Sequential(*model, nn.BatchNorm1d(3)), r"The layers '\*' \(2 of them\) \(BatchNorm1d\) mix the examples")


def test_an_embedding_that_renormalizes_is_refused():
    tables = nn.Embedding(5, 3, max_norm=1.0), nn.Embedding(5, 3, max_norm=2.0)
    refused(nn.Sequential(*tables), r"The layers '\*' \(2 of them\) \(Embedding\) have max_norm, .* Set max_norm to None")


def test_a_parameter_used_outside_its_module_is_refused():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return x @ self.inner.weight

    refused(Outside(), "No per-sample gradient for .*: 'inner.weight', used outside")


def test_an_embedding_whose_table_is_also_a_head_is_refused():
    class FunctionallyTied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 3)

        def forward(self, ids):
            return F.linear(self.table(ids), self.table.weight).sum(dim=(1, 2))

    refused(FunctionallyTied(), "on which the loss depends: 'table.weight'", lambda m: m(torch.tensor([[1], [2]])))


def test_a_layer_that_sees_flattened_rows_is_refused():
    class Flattened(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return self.linear(x.reshape(-1, 3)).reshape(len(x), -1).sum(dim=-1)

    refused(Flattened(), r"'linear.weight'.* whose layer has an input of 2 dimensions, which do not start with the batch",
            lambda m: m(torch.randn(4, 2, 3)))  # fmt: skip


# --- memory that does not suffice -----------------------------------------------------------------------------------------


def test_what_fails_before_it_is_added_leaves_the_sum_as_it_was(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 1)), torch.randn(5, 3)
    with ClippedGradients(model) as clipped:
        clipped.backward(model(x)[:, 0])
        expected = {name: total.clone() for name, total in clipped.sums.items()}
        monkeypatch.setattr(clipped_gradients, "norms_of", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            clipped.backward(model(x)[:, 0])
        torch.testing.assert_close(clipped.sums, expected, rtol=0.0, atol=0.0)


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
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt, self.layer, self.hungry = nn.Embedding(2, 3), nn.Linear(3, 1), Hungry().requires_grad_(False)

        def forward(self, x):
            return self.layer(self.hungry(x + self.prompt(torch.arange(2)[None]))).sum(dim=(1, 2))

    model, x = Prompted(), torch.randn(4, 2, 3)
    with ClippedGradients(model) as clipped:
        clipped.backward(model(x))
        model.hungry.calls_left = 0
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
        model.hungry.calls_left = math.inf
        clipped.backward(model(x))


@pytest.mark.usefixtures("unchecked_arrays")
def test_losses_must_be_one_per_example():
    model = nn.Sequential(nn.Linear(3, 1))
    refused(model, r"shape \(batch,\), one per example, got 2 dimensions", lambda m: m(torch.randn(4, 3)))
    refused(
        model,
        "losses must be as many as the rows with which the model was called, got another number",
        lambda m: m(torch.randn(4, 3))[:2, 0],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(max_grad_norm=0.0), "max_grad_norm must be a finite number of at least 1e-30, got 0"),
        (dict(clipping="soft"), "clipping must be one of automatic, vanilla, got 'soft'"),
        (dict(granularity="layer"), "granularity must be one of flat, per_layer, got 'layer'"),
        (dict(engine="ghost"), "engine must be one of book_keeping, opacus, got 'ghost'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClippedGradients(nn.Linear(1, 1), **arguments)


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        ClippedGradients(nn.Linear(1, 1).requires_grad_(False))


def test_backward_outside_the_context_is_refused():
    with pytest.raises(RuntimeError, match="with"):
        ClippedGradients(nn.Linear(1, 1)).backward(torch.zeros(1))
