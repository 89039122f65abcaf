"""Situations in which nothing is wrong, and in which a check before the first step could think so: all train."""

import contextlib
import functools
import itertools

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling

from tests.support.chat import chat_tokenizer, preferences
from tests.support.processors import OfAnotherProcessor
from tests.support.tiers import further, thorough
from tests.support.tiny import tiny_bert
from tests.support.trainers import checked_trainer_of, trained


def rows(count=24, *, ids=lambda row: [5 + row % 40, *range(6, 8 + row % 5)], label=lambda row: row % 2):
    found = [(ids(row), label(row)) for row in range(count)]
    return Dataset.from_list([{"input_ids": i, "attention_mask": [1] * len(i), "labels": y} for i, y in found])


def with_head(change):
    model = tiny_bert()
    change(model.classifier)
    return model


def certain(head):
    """All examples are fitted, so that losses and gradients are next to nothing."""
    nn.init.zeros_(head.weight)
    head.bias.data = torch.tensor([50.0, 0.0])


def adapted(**options):
    return get_peft_model(tiny_bert(), LoraConfig(task_type=TaskType.SEQ_CLS, r=2, **options))


def in_half(model):
    return model.to(torch.bfloat16)


ONE = dict(per_device_train_batch_size=1, gradient_accumulation_steps=1)
SITUATIONS = {
    "one row without a label": dict(data=rows(600, label=lambda row: -100 if row == 300 else row % 2)),
    "most rows without a label": dict(data=rows(label=lambda row: row % 2 if row % 3 == 0 else -100)),
    "the first rows without a label": dict(data=rows(label=lambda row: -100 if row < 12 else row % 2)),
    "one label": dict(data=rows(label=lambda row: 1)),
    "one label in a thousand": dict(data=rows(1000, label=lambda row: int(row == 999))),
    "all rows alike": dict(data=rows(ids=lambda row: [7, 8, 9], label=lambda row: 0)),
    "all rows of one length": dict(data=rows(ids=lambda row: [5 + row, 8, 9])),
    "rows of one token": dict(data=rows(ids=lambda row: [5 + row])),
    "one long row": dict(data=rows(ids=lambda row: [5 + row] * (16 if row == 3 else 2))),
    "rows at the model's limit": dict(data=rows(ids=lambda row: [5 + row] * 16)),
    "two rows": dict(data=rows(2), **ONE, target_delta=0.4),
    "one row in a batch": ONE,
    "a head of zeros": dict(model=lambda: with_head(lambda head: [nn.init.zeros_(each) for each in head.parameters()])),
    "a head that is far too large": dict(model=lambda: with_head(lambda head: head.weight.data.mul_(1e4))),
    "everything fitted": dict(model=lambda: with_head(certain), data=rows(label=lambda row: 0)),
    "one class": dict(model=lambda: tiny_bert(num_labels=1), data=rows(label=lambda row: row / 7)),
    "labels of all classes": dict(
        model=lambda: tiny_bert(problem_type="multi_label_classification"), data=rows(label=lambda row: [1.0, row % 2.0])
    ),
    "adapters of random scale": dict(model=lambda: adapted(target_modules=["query"], init_lora_weights=False)),
    "adapters with dropout": dict(model=lambda: adapted(target_modules=["query"], lora_dropout=0.3)),
    "weights in bfloat16": dict(model=lambda: in_half(tiny_bert())),
    "long rows in bfloat16": dict(
        model=lambda: in_half(tiny_bert(max_position_embeddings=700)), data=rows(ids=lambda row: [5 + row, *[7] * 650])
    ),
    "a head alone": dict(model=lambda: with_head(lambda head: None), freeze="bert."),
    "a seed of the user's": dict(seed=7),
}


@pytest.mark.parametrize("name", further([*SITUATIONS], quick=[*SITUATIONS][::2]))
def test_it_trains(tmp_path, name):
    options = dict(SITUATIONS[name])
    model = options.pop("model", tiny_bert)()
    frozen = options.pop("freeze", None)
    for of, parameter in model.named_parameters():
        parameter.requires_grad &= frozen is None or not of.startswith(frozen)
    trainer = trained(checked_trainer_of(tmp_path, model=model, max_steps=1, **options))
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("share", [0.01, *thorough(0.15), 1.0])
def test_masks_that_cover_nothing_or_everything_train(tmp_path, share):
    trainer = checked_trainer_of(tmp_path, model=BertForMaskedLM(tiny_bert(vocab_size=99).config), max_steps=1)
    tokenizer = chat_tokenizer()
    tokenizer.mask_token = "~"
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)
    trainer.data_collator = lambda examples: collator([{"input_ids": each["input_ids"]} for each in examples])
    trained(trainer)


def equal_pairs(count, *, equal, longer_by=0):
    """Pairs, of which some have equal answers, or answers that are equal in their first 40 letters."""
    found = preferences(count).to_list()
    for row in found[:equal]:
        same = "same " * (1 + 8 * bool(longer_by))
        row |= {"chosen": f" {same}", "rejected": f" {same}" + "x" * longer_by}
    return Dataset.from_list(found)


EQUAL = {
    "all": (functools.partial(equal_pairs, 48, equal=48), {}),
    "8 of 48": (functools.partial(equal_pairs, 48, equal=8), {}),
    "1 of 48": (functools.partial(equal_pairs, 48, equal=1), {}),
    "all, once truncated": (functools.partial(equal_pairs, 24, equal=24, longer_by=3), dict(max_length=40)),
    "some, once truncated": (functools.partial(equal_pairs, 24, equal=4, longer_by=3), dict(max_length=40)),
}


@pytest.mark.parametrize(
    ("name", "bf16"),
    further(
        [*itertools.product(EQUAL, [False, True])],
        quick=[("8 of 48", False), ("1 of 48", True), ("all, once truncated", True)],
    ),
)
@pytest.mark.parametrize("rounded", [OfAnotherProcessor, *thorough(contextlib.nullcontext)])
def test_pairs_of_equal_answers_train(tmp_path, name, bf16, rounded):
    """Their gradient is nothing but rounding."""
    pytest.importorskip("trl", reason="the extra trl is not installed")
    from tests.support.dpo import trainer_of

    pairs, options = EQUAL[name]
    with rounded() as processor:
        trained(trainer_of(tmp_path, data=pairs(), bf16=bf16, max_steps=1, **options))
    assert processor is None or processor.products > 100
