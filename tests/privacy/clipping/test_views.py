"""Augmentation multiplicity: the rows of an example are averaged, and clipped once."""

import pytest
import torch
from torch import nn

from doppler_hf import linalg
from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping import gradients as of_gradients
from tests.support.models import BATCH, MODELS, batch_for, build, losses_of, rows
from tests.support.pairwise import pairwise
from tests.support.per_example import (
    CLIPPINGS,
    GRANULARITIES,
    NORM_RULES,
    TOLERANCE,
    assert_same_sums,
    clip_and_sum,
    gradients_of_each,
    median_norm,
    norm_of,
    norms_of,
)
from tests.support.refusals import refused
from tests.support.tiers import further, thorough
from tests.support.tiny import pad

C = 0.1


def means(model, losses, number, *, views):
    """The mean gradient of every `views` rows."""
    # Divided first: RMSNorm computes in float32, in which a third of a gradient is not the gradient of a third.
    of_rows = gradients_of_each(model, lambda index: losses(index) / views, number)
    groups = [of_rows[start : start + views] for start in range(0, number, views)]
    return [{name: sum(row[name] for row in group) for name in group[0]} for group in groups]


def assert_averages(
    name, *, views, engine="book_keeping", clipping="vanilla", granularity="flat", on_accelerator=False, **options
):
    model = build(name)
    inputs, labels = batch_for(model)
    gradients = means(model, lambda index: losses_of(model, *rows(inputs, labels, index)), BATCH, views=views)
    chosen = dict(max_grad_norm=median_norm(gradients), clipping=clipping, granularity=granularity)
    clipped = ClippedGradients(model, engine=engine, **chosen, **options)
    clipped.on_accelerator = on_accelerator
    with clipped:
        norms = clipped.backward(losses_of(model, inputs, labels), views=views)
        torch.testing.assert_close(norms, norms_of(gradients), **TOLERANCE)
        assert_same_sums(clipped.sums, clip_and_sum(gradients, **chosen))


# From so many numbers on a gradient is large: one that is computed, stacked, or added up in another way than small ones.
LARGE = {
    "never": {},
    "always": dict(SMALL=1, RUN=2, TILE=1, BLOCK=1, AT_ONCE=1),
    "half": dict(SMALL=300, RUN=7, TILE=9, BLOCK=5, AT_ONCE=700),
}


@pytest.mark.parametrize(
    ("name", "views", "norm_rule", "clipping", "granularity", "on_accelerator", "large"),
    further(pairwise(MODELS, [1, 2, 3, BATCH], NORM_RULES, CLIPPINGS, GRANULARITIES, [False, True], [*LARGE])),
)
def test_the_mean_over_the_views_of_an_example_is_clipped(
    name, views, norm_rule, clipping, granularity, on_accelerator, large, monkeypatch
):
    for size, number in LARGE[large].items():
        monkeypatch.setattr(linalg if size == "RUN" else of_gradients, size, number)
    options = dict(norm_rule=norm_rule, clipping=clipping, granularity=granularity, on_accelerator=on_accelerator)
    assert_averages(name, views=views, **options)


@pytest.mark.parametrize("name", ["roberta", "gpt2-lm", "vit", "resnet", "roberta-lora"])
def test_so_it_is_by_opacus_samplers(name):
    assert_averages(name, views=3, engine="opacus")


def test_a_grouped_convolution_averages_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(32, 1)).double()
    images = torch.randn(6, 4, 4, 4, dtype=torch.float64)
    gradients = means(model, lambda index: model(images[index]).square().sum(1), 6, views=2)
    chosen = dict(max_grad_norm=median_norm(gradients))
    with ClippedGradients(model, **chosen) as clipped:
        clipped.backward(model(images).square().sum(1), views=2)
        assert_same_sums(clipped.sums, clip_and_sum(gradients, **chosen))


@pytest.mark.parametrize("norm_rule", ["ghost", *thorough("direct")])
def test_what_an_example_contributes_does_not_follow_its_padding(norm_rule):
    """Of views that cancel, so that what their norm is raised by counts: it must reach over their own tokens."""
    model, contributions = build("roberta", torch.float32), []
    signs = 1e4 * torch.tensor([1.0, -1.0, 1.0, -1.0 + 1e-1])
    batch = pad([{"input_ids": [2, 3, 4], "attention_mask": [1] * 3, "labels": 1}] * len(signs))
    for padding in (0, 13):
        inputs = {name: nn.functional.pad(batch[name], (0, padding)) for name in ("input_ids", "attention_mask")}
        with ClippedGradients(model, max_grad_norm=C, norm_rule=norm_rule) as clipped:
            clipped.backward(losses_of(model, inputs, batch["labels"]) * signs, views=len(signs))
            contributions.append(norm_of(clipped.sums.values()))
    assert contributions[1] == pytest.approx(contributions[0], rel=2e-3)  # the norm itself is off by 1e-3


def test_a_view_that_is_not_finite_takes_its_example_with_it():
    model = build("roberta")
    inputs, labels = batch_for(model)
    factor = torch.ones(BATCH, dtype=torch.float64)
    factor[0] = float("inf")
    with ClippedGradients(model, max_grad_norm=C) as clipped:
        norms = clipped.backward(losses_of(model, inputs, labels) * factor, views=3)
        assert norms.isfinite().tolist() == [False, True]
        assert clipped.num_non_finite == 1
        assert 0.0 < norm_of(clipped.sums.values()) <= C * (1 + 1e-9)


@pytest.mark.parametrize("views", [0, 4])
def test_rows_that_are_no_whole_examples_are_refused(views):
    model = build("roberta")
    inputs, labels = batch_for(model)
    with (
        ClippedGradients(model) as clipped,
        refused("out-of-range", match="views"),
    ):
        clipped.backward(losses_of(model, inputs, labels), views=views)
