"""The book-keeping engine's norms and clipped sums are those of a loop over single examples, for the models people tune."""

import functools

import pytest
import torch
from torch import nn

from tests.support.models import BATCH, LENGTH, MODELS, batch_for, build, losses_of, rows
from tests.support.pairwise import pairwise
from tests.support.per_example import (
    NORM_RULES,
    assert_equals_loop,
    assert_equals_loop_or_is_refused,
    assert_matches,
    assert_same_sums,
    book_keeping,
    clip_and_sum,
    gradients_of_each,
    median_norm,
    trainable,
)
from tests.support.tiers import further

# Whole models, which pass the same arrays again and again; test_clipped_gradients.py and test_layers.py check shapes.
pytestmark = pytest.mark.usefixtures("unchecked_arrays")

# ResNet has neither attention nor, in transformers, checkpointing.
TRANSFORMERS = [name for name in MODELS if name not in ("resnet", "bit")]
CHECKPOINTING = ["off", "non-reentrant", "reentrant"]


def on_batch(model, **options):
    """Return the function from rows of the model's batch to their losses."""
    inputs, labels = batch_for(model, **options)
    return lambda index: losses_of(model, *rows(inputs, labels, index))


@functools.cache
def reference(name, attention="sdpa", batch=BATCH):
    """Gradients of each example of a model without checkpointing, and without an engine."""
    model = build(name, attention=attention)
    return gradients_of_each(model, on_batch(model, batch=batch), batch)


@pytest.mark.parametrize(
    ("name", "attention", "checkpointing"),
    further(
        [("resnet", "eager", "off"), ("bit", "eager", "off"), *pairwise(TRANSFORMERS, ["sdpa", "eager"], CHECKPOINTING)]
    ),
)
def test_norms_and_sums_equal_a_loop_over_single_examples(name, attention, checkpointing):
    model = build(name, attention=attention, checkpointing=checkpointing)
    assert_matches(model, on_batch(model), reference(name, attention))


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("roberta", "non-reentrant"), ("t5-lm", "non-reentrant"), ("t5-lm", "reentrant")]
)
def test_dropout_draws_the_same_numbers_without_the_engine_and_with_checkpointing(name, checkpointing):
    """Beside a position bias, too, whose gradient is mapped over examples: within it nothing random is computed again."""
    sums = []
    for choice in ("off", checkpointing):
        model = build(name, checkpointing=choice)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.2
        losses = on_batch(model)
        torch.manual_seed(0)
        expected = losses(slice(None))
        torch.manual_seed(0)
        with book_keeping(model) as clipped:
            found = losses(slice(None))
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
            clipped.backward(found)
            sums.append(clipped.sums)
    assert_same_sums(sums[1], sums[0])


@pytest.mark.parametrize(
    ("name", "parts", "checkpointing", "on_accelerator"),
    further(
        pairwise(
            ["bert", "gpt2-lm", "t5-lm", "vit", "vit-lora", "llama-dora"],
            [(BATCH,), (4, 2), (1,) * BATCH],
            CHECKPOINTING,
            [False, True],
        )
    ),
)
def test_cutting_a_batch_changes_nothing(name, parts, checkpointing, on_accelerator):
    model = build(name, checkpointing=checkpointing)
    losses, max_grad_norm = on_batch(model), median_norm(reference(name))
    with book_keeping(model, max_grad_norm=max_grad_norm, on_accelerator=on_accelerator) as clipped:
        for index in torch.arange(BATCH).split(parts):
            clipped.backward(losses(index))
        assert_same_sums(clipped.sums, clip_and_sum(reference(name), max_grad_norm=max_grad_norm))


@pytest.mark.parametrize("norm_rule", further(NORM_RULES, quick=["auto"]))
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        # Here the gradient of something shared by the batch has the shape of one that has a row for each example.
        ("t5-lm", LENGTH),  # the encoder's relative bias: a row for each position
        ("t5-lm", 5),  # the decoder's
        ("t5-lm", 2),  # heads
        ("gpt2-lm", LENGTH),  # learned positions
        ("gpt2", LENGTH),
        ("bert", LENGTH),
        ("distilbert", LENGTH),
        ("llama-lm", LENGTH),  # rotary angles
        ("vit", 5),  # positions, with the class token
        ("vit", 16),  # hidden size
        ("roberta-dora", 16),  # DoRA passes an identity matrix through A and B for the norm of the columns
        ("roberta-dora", 4),  # rank
    ],
)
def test_a_batch_as_large_as_another_dimension(name, batch, norm_rule):
    model = build(name)
    assert_matches(model, on_batch(model, batch=batch), reference(name, batch=batch), norm_rule=norm_rule)


FREEZE = {
    "only biases": lambda name: name.endswith("bias"),  # BitFit
    "only weights": lambda name: name.endswith("weight"),
    "no embeddings": lambda name: not any(part in name for part in ("embed", "wte", "wpe", "shared")),
    "only embeddings": lambda name: any(part in name for part in ("embed", "wte", "wpe", "shared")),
    "only the last block": lambda name: any(part in name for part in ("layer.1.", "h.1.", "block.1.", "layers.1.")),
}


@pytest.mark.parametrize(
    ("name", "trained", "norm_rule"),
    further(
        [
            (name, trained, norm_rule)
            for name, trained, norm_rule in pairwise(["t5-lm", "roberta", "gpt2-lm", "vit"], list(FREEZE), NORM_RULES)
            if (name, trained) != ("t5-lm", "only biases")  # it has none
        ]
    ),
)
def test_a_partly_frozen_model(name, trained, norm_rule):
    model = build(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(FREEZE[trained](parameter_name))
    assert_equals_loop(model, on_batch(model), BATCH, norm_rule=norm_rule)


@pytest.mark.parametrize("name", ["bert", "gpt2-lm", "llama-lm"])
def test_an_argument_that_is_shared_by_the_batch_may_come_first(name):
    model = build(name)
    inputs, labels = batch_for(model)

    def losses(index):
        some, of_these = rows(inputs, labels, index)
        return losses_of(model, {"position_ids": torch.arange(LENGTH)[None]} | some, of_these)

    assert_equals_loop_or_is_refused(model, losses, BATCH, naming="batch")


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("dora")])
def test_the_magnitude_of_dora_has_a_rule(name):
    model = build(name)
    inputs, labels = batch_for(model)
    assert any("magnitude" in parameter for parameter in trainable(model))
    with book_keeping(model) as clipped:
        clipped.backward(losses_of(model, inputs, labels))
        assert not any("magnitude" in layer for layer in clipped.fallbacks)
