"""Trained parameters that no loss reaches, which noise alone would move: named before anything is spent, with a fix."""

import re

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import BertModel, Gemma3Config, Gemma3ForConditionalGeneration

from doppler_hf import DopplerTrainer
from tests.support import chat
from tests.support.refusals import refused
from tests.support.tiny import tiny_bert
from tests.support.trainers import OfLogits, trained
from tests.support.trainers import checked_trainer_of as trainer_of


class WithUnused(nn.Module):
    """Has a head and a scale that its forward does not call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.unused = nn.Embedding(50, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return self.head((self.embedding(input_ids) * mask).sum(dim=1) / mask.sum(dim=1))


class OfText(DopplerTrainer):
    """Classifies by the first token's logits."""

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits[:, 0, :2], labels, reduction="none")


TEXT = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
VISION = TEXT | dict(image_size=8, patch_size=4)


def gemma(vocab_size=50):
    torch.manual_seed(0)
    text = TEXT | dict(vocab_size=vocab_size, num_key_value_heads=1, head_dim=8, pad_token_id=0)
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=vocab_size - 1)
    return Gemma3ForConditionalGeneration(config)


ADAPTERS = LoraConfig(r=2, target_modules="all-linear")


def gemma_with_adapters():
    return get_peft_model(gemma(), ADAPTERS)


UNREACHED = {
    "a layer and a parameter of one's own": (WithUnused, OfLogits, ["unused.weight", "scale"], "head.weight"),
    "a tower": (gemma, OfText, ["model.vision_tower.", "model.multi_modal_projector."], "model.language_model."),
    "adapters": (gemma_with_adapters, OfText, ["base_model.model.model.vision_tower."], "base_model.model.model.language"),
    "adapters of peft_config": (
        lambda: gemma(100),
        None,
        ["base_model.model.model.vision_tower."],
        "base_model.model.model.language",
    ),
    "a pooler": (lambda: _WithPooler(), OfLogits, ["bert.pooler."], "bert.encoder."),
}


class _WithPooler(nn.Module):
    """Reads the first token's state, beside the pooler."""

    def __init__(self):
        super().__init__()
        self.bert = BertModel(tiny_bert().config)

    def forward(self, **inputs):
        return self.bert(**inputs).last_hidden_state[:, 0, :2]


def state_of(model, beginnings):
    return {name: value.clone() for name, value in model.named_parameters() if name.startswith(tuple(beginnings))}


def trainer_for(tmp_path, model, cls, **options):
    if cls is None:  # TRL's, which makes the adapters itself
        sft = pytest.importorskip("doppler_hf.sft", reason="the extra trl is not installed")
        own = dict(train_dataset=chat.texts(), processing_class=chat.chat_tokenizer(), peft_config=ADAPTERS)
        return sft.DopplerSFTTrainer(model, chat.arguments_of(tmp_path, cls=sft.DopplerSFTConfig, bf16=False), **own)
    return trainer_of(tmp_path, model=model, cls=cls, max_steps=2, remove_unused_columns=False, **options)


@pytest.mark.parametrize("name", UNREACHED)
def test_they_are_refused_and_the_mend_that_is_named_leaves_them_as_they_are(tmp_path, name):
    new, cls, unreached, reached = UNREACHED[name]
    model = (trainer := trainer_for(tmp_path, new(), cls)).model
    with refused("unreached-parameters") as raised:
        trainer.train()
    assert not list(tmp_path.rglob("privacy_ledger.json"))
    for line in re.search(r"before trainer\.train\(\): (.*)\. Or set", str(raised.value))[1].split("; "):
        exec(line)  # as the user would
    still = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any(each.startswith(reached) for each in still)
    assert not any(each.startswith(tuple(unreached)) for each in still)
    before = state_of(model, unreached)
    assert before
    moving = state_of(model, [reached])
    trainer.train()
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in before.items())
    assert any(not torch.equal(value, model.get_parameter(name)) for name, value in moving.items())


def test_noise_moves_them_where_it_is_wanted(tmp_path):
    model = WithUnused()
    before = state_of(model, ["unused."])
    trained(trainer_for(tmp_path, model, OfLogits, train_unreached_parameters=True))
    assert all(not torch.equal(value, model.cpu().get_parameter(name)) for name, value in before.items())


class ByFirstToken(nn.Module):
    """Has experts, of which the first token chooses one; those that none of a batch chooses are not called."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

    def forward(self, input_ids, attention_mask):
        found, of_row = self.embedding(input_ids[:, 0]), input_ids[:, 0] % len(self.experts)
        for place, expert in enumerate(self.experts):
            is_taken = (of_row == place).unsqueeze(1)
            if is_taken.any():
                found = found + is_taken * expert(found)
        return self.head(found)


@pytest.mark.parametrize("experts", [4, 12])
def test_experts_that_only_some_examples_reach_stay_and_nothing_is_told_of_which(tmp_path, capsys, experts):
    """Gradients of two examples are compared; the others are asked for what those two do not reach."""
    ids = [[5 + row % experts] * (3 + row % 5) for row in range(60)]
    data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row), "labels": row[0] % 2} for row in ids])
    trained(trainer_for(tmp_path, ByFirstToken(experts), OfLogits, data=data))
    told = capsys.readouterr()
    assert "reach" not in told.out + told.err  # the first examples decide which, and what is printed ends in logs
