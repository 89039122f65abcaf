"""What reaches the engine is checked before the first step: rows, losses and layers that look at their neighbours."""

import collections
import dataclasses
import functools
import math
import operator
import random
import re
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from PIL import Image as PILImage
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.data import default_collate
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertTokenizer,
    BigBirdConfig,
    BigBirdForSequenceClassification,
    ConvBertConfig,
    ConvBertForSequenceClassification,
    CpmAntConfig,
    CpmAntForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorWithPadding,
    DefaultDataCollator,
    FNetConfig,
    FNetForSequenceClassification,
    HubertConfig,
    HubertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    Phi3Config,
    Phi3ForSequenceClassification,
    TrainerCallback,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    default_data_collator,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy.batching import probe, random_data, same_distribution
from doppler_hf.run import start_check
from tests.support.folders import MASKED_LMS, write_masked_lm
from tests.support.models import build
from tests.support.tiers import combined, further, thorough
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import TokenMean, trained
from tests.support.trainers import checked_trainer_of as trainer_of

pytestmark = pytest.mark.usefixtures("usual_trials")


# Before, the host drew a coin for each layer, also where none is ever left out, and such a model is refused for that.
draws_for_layers_that_stay = pytest.mark.skipif(
    TorchVersion(transformers.__version__) < "5.23", reason="draws coins for layers that always stay"
)


def refused(tmp_path, match, *, collator=None, **options):
    """Train, and expect a refusal before the first step."""
    trainer = trainer_of(tmp_path, **options)
    if collator is not None:
        trainer.data_collator = collator
    with pytest.raises(ValueError, match=match):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "out" / "privacy_ledger.json").exists()


def trains(tmp_path, *, collator=pad, **options):
    """Train a step without a refusal, and return the trainer."""
    trainer = trainer_of(tmp_path, **{"max_steps": 1} | options)
    trainer.data_collator = collator
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    return trainer


# --- the model and its optimizer ------------------------------------------------------------------------------------------


def test_a_model_of_which_nothing_is_trained_is_refused(tmp_path):
    refused(
        tmp_path, r"must have a trainable parameter, got none\. Set requires_grad", model=tiny_bert().requires_grad_(False)
    )


def test_a_model_in_float16_is_refused_for_its_range(tmp_path):
    refused(
        tmp_path, r"must not be in float16, got 'bert\..*Load the model with dtype=torch\.float32", model=tiny_bert().half()
    )


class Waves(torch.nn.Module):
    """Weights of a Fourier layer."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

    def forward(self, x):
        return (torch.fft.fft(x) @ self.weight).real


class LinearLoss(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return model(inputs["x"]).mean(dim=1)


def test_complex_weights_are_refused_since_noise_is_of_real_numbers(tmp_path):
    data = Dataset.from_dict({"x": torch.randn(24, 64).tolist()})
    refused(
        tmp_path, r"must be real numbers, got 'weight' of type torch\.complex64\. Keep .* and use torch\.view_as_complex",
        model=Waves(), cls=LinearLoss, data=data, collator=default_data_collator, remove_unused_columns=False,
    )  # fmt: skip


def test_a_frozen_part_may_be_in_float16(tmp_path):
    model = tiny_bert()
    model.bert.requires_grad_(False).embeddings.word_embeddings.half()
    model.bert.embeddings.word_embeddings.register_forward_hook(lambda _, inputs, output: output.float())
    trains(tmp_path, model=model)


class NotingPrecision(DopplerTrainer):
    phase = "check"

    def training_step(self, *args, **kwargs):
        self.phase = "training"
        return super().training_step(*args, **kwargs)

    def compute_per_sample_loss(self, model, inputs):
        switches = torch.backends.cudnn.conv, torch.backends.cuda.matmul
        with self.noted.open("a") as file:
            print(self.phase, *(switch.fp32_precision for switch in switches), file=file)
        return super().compute_per_sample_loss(model, inputs)


def test_examples_are_compared_in_float32_whatever_is_allowed_in_training(tmp_path):
    switch = torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, "tf32"
    try:
        trainer = trainer_of(tmp_path, cls=NotingPrecision, max_steps=1)
        trainer.noted = tmp_path / "noted"  # what is in a file no check puts back
        trainer.train()
    finally:
        switch.fp32_precision = before
    assert {*trainer.noted.read_text().splitlines()} == {"check ieee ieee", "training tf32 tf32"}


class PlainSGD(DopplerTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


class WrittenOver(PlainSGD):
    def create_optimizer(self, model=None):
        DopplerTrainer.create_optimizer(self, model)
        return super().create_optimizer(model)


class Assigned(DopplerTrainer):
    def __init__(self, **options):
        super().__init__(**options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class LowerHead(DopplerTrainer):
    def create_optimizer(self, model=None):
        super().create_optimizer(model)
        self.optimizer.param_groups[-1]["lr"] = 1e-4
        return self.optimizer


@pytest.mark.parametrize("cls", [PlainSGD, WrittenOver, Assigned])
def test_an_optimizer_of_the_users_own_is_refused_however_it_comes_in(tmp_path, cls):
    refused(tmp_path, r"create_optimizer must make a DopplerOptimizer in a private run, got SGD", cls=cls)


class OwnDoppler(DopplerTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = DopplerOptimizer(self.model.parameters(), lr=0.1, base="sgd")
        return self.optimizer


class WrittenOverByDoppler(OwnDoppler):
    def create_optimizer(self, model=None):
        DopplerTrainer.create_optimizer(self, model)
        return super().create_optimizer(model)


@pytest.mark.parametrize("cls", [OwnDoppler, WrittenOverByDoppler])
def test_a_doppler_optimizer_of_the_users_own_is_told_the_size_of_the_noise(tmp_path, cls):
    trainer = trained(trainer_of(tmp_path, cls=cls, max_steps=1))
    assert trainer.optimizer.optimizer.noise_std == trainer.private_run.mechanism.noise_std(0) > 0.0


def test_groups_of_the_optimizer_may_be_changed(tmp_path):
    trainer = trained(trainer_of(tmp_path, cls=LowerHead, lr_scheduler_type="constant", max_steps=2))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [1e-2, 1e-4]


# --- the collator ---------------------------------------------------------------------------------------------------------


def without_mask(examples):
    return {name: value for name, value in pad(examples).items() if name != "attention_mask"}


def twice(examples):
    return {name: torch.cat([value, value]) for name, value in pad(examples).items()}


def mixed_up(examples):
    """MixUp with a fixed share, of the labels too."""
    batch = pad(examples)
    return batch | {"input_ids": (batch["input_ids"] + batch["input_ids"].flip(0)) // 2}


def randomly_mixed_up(examples):
    """MixUp as it is: each row with another one, in random order and with a random share."""
    batch = pad(examples)
    share = torch.rand(())
    other = batch["input_ids"][torch.randperm(len(examples))]
    return batch | {"input_ids": (share * batch["input_ids"] + (1 - share) * other).long()}


def mixed_in_pairs(examples):
    """MixUp of rows 0 and 1, 2 and 3, …; an odd last row stays as it is."""
    batch = pad(examples)
    tokens, even = batch["input_ids"].clone(), len(examples) // 2 * 2
    share = torch.from_numpy(np.random.beta(0.4, 0.4, even // 2))[:, None]
    tokens[0:even:2] = (share * batch["input_ids"][0:even:2] + (1 - share) * batch["input_ids"][1:even:2]).long()
    return batch | {"input_ids": tokens}


def mixed_now_and_then(examples):
    """In one batch of twenty a row has the second half of the row before it."""
    batch = pad(examples)
    tokens = batch["input_ids"]
    return (
        batch | {"input_ids": torch.cat([tokens[:, :2], tokens.roll(1, 0)[:, 2:]], 1)} if random.random() < 0.05 else batch
    )


def padded_on_the_left(examples):
    width = max(len(example["input_ids"]) for example in examples)
    rows = {
        name: [[0] * (width - len(e[name])) + list(e[name]) for e in examples] for name in ("input_ids", "attention_mask")
    }
    return {name: torch.tensor(value) for name, value in rows.items()} | {
        "labels": torch.tensor([example["labels"] for example in examples])
    }


def masked(examples):
    """A random collator that looks at one example at a time, as for masked language modeling."""
    batch = pad(examples)
    hidden = torch.rand(batch["input_ids"].shape) < 0.15
    return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 4)}


class Detached(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return super().compute_per_sample_loss(model, inputs).detach()


class Listed(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return list(super().compute_per_sample_loss(model, inputs))


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(("cls", "kind"), [(Detached, "one without a gradient"), (Listed, "a list")])
def test_losses_that_are_no_tensor_of_the_graph_are_refused(tmp_path, cls, kind):
    refused(tmp_path, rf"must return a tensor that is attached to the graph, got {kind}\.", cls=cls)


def test_rows_are_not_taken_for_examples(tmp_path):
    refused(tmp_path, r"losses of 1 collated examples must have shape \(1,\), got .* one row for each", collator=twice)


def every_other(examples):
    return pad(examples[::2])


@pytest.mark.parametrize(("collator", "got"), [(twice, "more"), (every_other, "fewer")])
def test_rows_are_counted_in_every_step(tmp_path, collator, got):
    trainer = trainer_of(tmp_path, grad_sample_self_check=False, per_device_train_batch_size=10)
    trainer.data_collator = lambda examples: collator(examples) if len(examples) > 3 else pad(examples)
    with pytest.raises(ValueError, match=rf"losses of a micro-batch must be one for each of its examples, got {got}\. Let"):
        trainer.train()


@pytest.mark.parametrize(
    ("made_of", "got"), [(lambda batch: tuple(batch.values()), "tuple"), (lambda batch: None, "NoneType")]
)
def test_a_batch_that_is_no_dictionary_is_refused(tmp_path, made_of, got):
    trainer = trainer_of(tmp_path)
    trainer.data_collator = lambda rows: made_of(pad(rows))
    with pytest.raises(ValueError, match=rf"collator must return a dictionary of tensors, .* got a {got}\. Return one"):
        trainer.train()


@pytest.mark.parametrize("collator", [mixed_up, randomly_mixed_up, padded_on_the_left])
def test_rows_that_depend_on_other_examples_are_refused(tmp_path, collator):
    refused(tmp_path, r"MixUp, CutMix or packing", collator=collator, gradient_accumulation_steps=1)


@pytest.mark.parametrize("collator", [*thorough(mixed_in_pairs), mixed_now_and_then])
def test_rows_that_are_mixed_now_and_then_are_refused(tmp_path, all_trials, collator):
    refused(tmp_path, r"MixUp, CutMix or packing", collator=collator, gradient_accumulation_steps=1)


@pytest.mark.thorough
def test_a_random_collator_that_mixes_nothing_trains(tmp_path, all_trials):
    trains(tmp_path, collator=masked)


@pytest.fixture
def all_batches(monkeypatch):
    """Compare as many batches as a user's training does, of other places and numbers."""
    monkeypatch.setattr(same_distribution, "_SECONDS", 1.0)


def reversed_tokens(examples, chosen):
    """Some rows read backwards, beside random masks."""
    batch = masked(examples)
    return batch | {"input_ids": torch.where(chosen[:, None], batch["input_ids"].flip(1), batch["input_ids"])}


def every_second_reversed(examples):
    return reversed_tokens(examples, torch.arange(len(examples)) % 2 == 1)


def first_reversed(examples):
    return reversed_tokens(examples, torch.arange(len(examples)) == 0)


def half_reversed_by_numpy(examples):
    return reversed_tokens(examples, torch.from_numpy(np.random.permutation(len(examples)) < len(examples) // 2))


def half_reversed(examples):
    return reversed_tokens(examples, torch.randperm(len(examples)) < len(examples) // 2)


def a_fortieth_reversed(examples):
    return reversed_tokens(examples, torch.randperm(len(examples)) < len(examples) // 40)


@pytest.mark.parametrize("collator", [every_second_reversed, *thorough(first_reversed, half_reversed_by_numpy)])
@pytest.mark.parametrize("views", [1, *thorough(3)])
def test_random_rows_that_follow_their_places_or_number_are_refused(tmp_path, collator, views, all_batches):
    options = {"collator": collator, "augmentation_multiplicity": views, "gradient_accumulation_steps": 1}
    # By chance no coin of the first trials falls on the rows that are compared, and these are seen to be others.
    refused(tmp_path, "as likely whatever other examples are beside them|MixUp, CutMix or packing", **options)


def showing_the_row_before(examples):
    """Some tokens are those of the row before, by a coin for each token of an example, so that others have other coins."""
    batch = pad(examples)
    tokens = batch["input_ids"].clone()
    for row, example in enumerate(examples):
        for place in range(len(example["input_ids"])):
            if random.random() < 0.2 and row:
                tokens[row, place] = batch["input_ids"][row - 1, place]
    return batch | {"input_ids": tokens}


def test_random_rows_that_show_the_row_before_are_refused(tmp_path, all_batches):
    options = {"collator": showing_the_row_before, "gradient_accumulation_steps": 1}
    refused(tmp_path, "as likely whatever other examples are beside them", **options)


def hidden_by_width(examples):
    """As many places of every row, by the width to which the longest example pads it, of which its own are the fewer."""
    batch = pad(examples)
    width = batch["input_ids"].shape[1]
    places = torch.rand(batch["input_ids"].shape).argsort(dim=1)[:, : 2 + width // 8]
    is_hidden = torch.zeros_like(batch["input_ids"]).scatter(1, places, 1) * batch["attention_mask"] == 1
    return batch | {"input_ids": batch["input_ids"].masked_fill(is_hidden, 4)}


@pytest.mark.thorough
def test_random_rows_that_follow_the_width_of_the_batch_are_refused(tmp_path, all_batches):
    """No example shows it beside others that are no longer."""
    options = {"collator": hidden_by_width, "gradient_accumulation_steps": 1}
    refused(tmp_path, "as likely whatever other examples are beside them", **options)


@pytest.mark.thorough
def test_rows_that_follow_their_places_are_refused_if_the_data_set_alone_is_random(tmp_path, all_batches):
    """Then the collator draws nothing, and none of its batches can be compared with another."""

    def hidden(rows):
        return rows | {"input_ids": [[4 if random.random() < 0.15 else token for token in row] for row in rows["input_ids"]]}

    def collator(examples):
        batch = pad(examples)
        batch["input_ids"][1::2] = batch["input_ids"][1::2].flip(1)
        return batch

    data = text_data().with_transform(hidden)
    options = {"collator": collator, "data": data, "remove_unused_columns": False}
    refused(tmp_path, "rows that are as likely whatever other examples are beside them", **options)


@pytest.mark.parametrize("collator", [half_reversed, a_fortieth_reversed])
def test_a_random_order_of_the_rows_is_refused(tmp_path, collator):
    refused(tmp_path, r"got a random order of all rows \(torch\.randperm\)", collator=collator)


def test_copies_of_an_example_may_be_written_into():
    """As by a collator that crops or mirrors in place: the next copy, and the next batch, are whole."""
    loader = types.SimpleNamespace(
        examples=[{"input_ids": [5, 6, 7]}], collator=lambda rows: [row["input_ids"].pop() for row in rows]
    )
    make = random_data.copies_of(loader, 0)
    assert [make(2), make(3)] == [[7, 7], [7, 7, 7]]


def padded_on_either_side(examples):
    """Each row is padded on one side, by its own coin, and all to one length."""
    batch = {
        name: F.pad(value, (0, 12 - value.shape[1])) if value.ndim == 2 else value for name, value in pad(examples).items()
    }
    for row, lengths in enumerate(batch["attention_mask"].sum(1)):
        if np.random.rand() < 0.5:
            for name in ("input_ids", "attention_mask"):
                batch[name][row] = batch[name][row].roll(12 - int(lengths))
    return batch


@pytest.mark.thorough
def test_random_rows_of_which_each_has_numbers_of_its_own_train(tmp_path, all_batches):
    trains(tmp_path, collator=padded_on_either_side)


def test_left_padding_trains_where_positions_are_relative(tmp_path):
    trains(tmp_path, model=llama(), collator=padded_on_the_left)


# --- the loss -------------------------------------------------------------------------------------------------------------


class BatchMean(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses / len(losses)


class HardestAlone(DopplerTrainer):
    """Keeps the sixteen largest losses of a batch."""

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses * (losses >= losses.topk(min(16, len(losses))).values[-1])


def test_losses_that_are_coupled_in_large_batches_alone_are_refused(tmp_path):
    options = {"per_device_train_batch_size": 40, "gradient_accumulation_steps": 1, "data": text_data(80)}
    refused(tmp_path, "The loss of one example changes with the examples beside it", cls=HardestAlone, **options)


def as_neftune(module, args, output):
    """Noise that is the smaller, the longer the longest example of a batch is."""
    size = 5.0 / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.empty_like(output).uniform_(-size, size)


def as_wide_as_the_batch(module, args, output):
    return output + 0.3 * output.detach().std() * torch.randn_like(output)


def of_each_row(module, args, output):
    return output + 0.3 * output.detach().std(dim=-1, keepdim=True) * torch.randn_like(output)


@pytest.mark.parametrize("noise", [as_neftune, as_wide_as_the_batch])
def test_noise_of_a_forward_whose_size_follows_the_batch_is_refused(tmp_path, noise):
    model = tiny_bert()
    model.bert.embeddings.word_embeddings.register_forward_hook(noise)
    refused(tmp_path, "The gradient of one example changes with the examples beside it", model=model)


def test_noise_of_a_forward_may_follow_its_own_row(tmp_path):
    model = tiny_bert()
    model.bert.embeddings.word_embeddings.register_forward_hook(of_each_row)
    trains(tmp_path, model=model)


@pytest.mark.parametrize(
    ("trainer", "clipping"),
    combined([TokenMean, BatchMean], ["automatic", "vanilla"], strength=1),
)
def test_a_loss_that_scales_with_the_batch_is_refused(tmp_path, trainer, clipping):
    # The first two have equal shares, as if both were merely clipped to less.
    data = rows_of([6, 6, 3, 8] * 6)
    refused(tmp_path, "the loss depends on the number of examples", cls=trainer, data=data, clipping=clipping)


# --- models that look at their neighbours' padding ------------------------------------------------------------------------


def encoder(config, model, **more):
    torch.manual_seed(0)
    options = dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=2,
        max_position_embeddings=32, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return model(config(**(options | more)))


def llama(**more):
    torch.manual_seed(0)
    options = dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
        intermediate_size=16, num_labels=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForSequenceClassification(LlamaConfig(**(options | more)))


@pytest.mark.thorough
def test_random_rows_may_be_padded_on_the_left(tmp_path):
    """Alone an example is cut out of its row, which ends with it."""

    def hidden(examples):
        batch = padded_on_the_left(examples)
        is_hidden = (batch["attention_mask"] == 1) & (torch.rand(batch["input_ids"].shape) < 0.15)
        # Positions are counted from the first token.
        places = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return batch | {"input_ids": batch["input_ids"].masked_fill(is_hidden, 4), "position_ids": places}

    trains(tmp_path, model=llama(), collator=hidden)


def phi3():
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 6}  # fmt: skip
    options = dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_labels=2,
        intermediate_size=16, max_position_embeddings=32, original_max_position_embeddings=6, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Phi3ForSequenceClassification(Phi3Config(**options, rope_parameters=rope))


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
NEIGHBOURLY = {
    "fnet": lambda: encoder(FNetConfig, FNetForSequenceClassification),
    "convbert": lambda: encoder(ConvBertConfig, ConvBertForSequenceClassification, head_ratio=1, embedding_size=16),
    "llama, dynamic": lambda: llama(max_position_embeddings=4, rope_parameters=DYNAMIC),
    "phi3, longrope": phi3,
}


@pytest.mark.parametrize("name", further([*NEIGHBOURLY], quick=["fnet", "llama, dynamic"]))
def test_a_model_that_sees_its_neighbours_padding_is_refused_by_name(tmp_path, name):
    options = dict(model=NEIGHBOURLY[name](), remove_unused_columns=False, collator=pad if name != "fnet" else without_mask)
    refused(tmp_path, r"layer '\S+' \(\w+\) depends on the length", **options)


class OnTheFly(torch.utils.data.Dataset):
    """Texts whose lengths nobody knows beforehand; one of them is long."""

    def __init__(self, number, *, padded_to=0):
        self.number, self.padded_to = number, padded_to

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        length = 30 if index == self.number // 2 + 1 else 3 + index % 3
        tokens, rest = [5 + (index + 7 * place) % 40 for place in range(length)], max(self.padded_to - length, 0)
        return {"input_ids": tokens + [0] * rest, "attention_mask": [1] * length + [0] * rest, "labels": index % 2}


@pytest.mark.parametrize(
    ("seconds", "match"), [(math.inf, "depends on the length"), (0.0, "^The lengths of all examples must be")]
)
def test_one_long_text_is_found_or_asked_for_where_lengths_are_unknown(tmp_path, monkeypatch, seconds, match):
    monkeypatch.setattr(probe, "_SECONDS_OF_SIZES", seconds)
    model = llama(max_position_embeddings=8, rope_parameters=DYNAMIC, initializer_range=0.2)
    refused(tmp_path, match, model=model, data=OnTheFly(300))


def test_unknown_lengths_train_where_all_are_padded_to_one(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_SECONDS_OF_SIZES", 0.0)
    model = llama(max_position_embeddings=8, rope_parameters=DYNAMIC)
    trains(tmp_path, model=model, data=OnTheFly(300, padded_to=32))


def test_unknown_lengths_train_where_positions_do_not_depend_on_them(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_SECONDS_OF_SIZES", 0.0)
    trains(tmp_path, model=llama(), data=OnTheFly(300))


SPEECH = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8), conv_stride=(4, 2),
    conv_kernel=(8, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=2,
    classifier_proj_size=8, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
    final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, feat_extract_norm="group", vocab_size=10,
)  # fmt: skip


class Speech(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        logits = model(input_values=inputs["input_values"], attention_mask=inputs["attention_mask"]).logits
        return F.cross_entropy(logits, inputs["labels"], reduction="none")


def sounds():
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_values": torch.randn(100 + 20 * (index % 5), generator=generator), "labels": index % 2}
        for index in range(24)
    ]


def padded_sounds(examples):
    values = nn.utils.rnn.pad_sequence([example["input_values"] for example in examples], batch_first=True)
    lengths = torch.tensor([len(example["input_values"]) for example in examples])
    return {
        "input_values": values,
        "attention_mask": (torch.arange(values.shape[1]) < lengths[:, None]).long(),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


@draws_for_layers_that_stay
@pytest.mark.parametrize(
    ("config", "model"),
    [(Wav2Vec2Config, Wav2Vec2ForSequenceClassification), (HubertConfig, HubertForSequenceClassification)],
)
def test_a_group_norm_over_time_is_refused_by_name(tmp_path, config, model):
    torch.manual_seed(0)
    model = model(config(**SPEECH))
    next(part for name, part in model.named_modules() if name.endswith("pos_conv_embed")).requires_grad_(False)
    options = dict(model=model, cls=Speech, data=sounds(), remove_unused_columns=False)
    refused(tmp_path, r"layer '\S*feature_extractor\S*' \(\w+\) depends on the length", collator=padded_sounds, **options)


def test_a_model_that_masks_as_if_padded_on_the_left_is_refused_and_not_the_engine(tmp_path):
    """Gradients of short examples, which it leaves out, are far larger alone than in the batch."""
    torch.manual_seed(0)
    config = CpmAntConfig(
        vocab_size=50, hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=16, num_hidden_layers=1, prompt_length=2,
        prompt_types=8, segment_types=4, position_bias_num_buckets=8, position_bias_max_distance=16,
    )  # fmt: skip
    options = dict(model=CpmAntForCausalLM(config), remove_unused_columns=False)
    refused(tmp_path, r"layer '\S+softmax' \(Softmax\) depends on the length", collator=of_tokens, **options)


@pytest.mark.parametrize(
    "model",
    [tiny_bert, *thorough(llama, lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))],
)
def test_other_stock_models_train(tmp_path, model):
    trains(tmp_path, model=model())


@pytest.mark.parametrize("name", ["fnet", "llama, dynamic"])
def test_the_mend_that_is_named_mends(tmp_path, name):
    whole = 8
    rows = [
        {
            "input_ids": row["input_ids"] + [0] * (whole - len(row["input_ids"])),
            "attention_mask": row["attention_mask"] + [0] * (whole - len(row["input_ids"])),
            "labels": row["labels"],
        }
        for row in text_data()
    ]
    options = dict(model=NEIGHBOURLY[name](), data=Dataset.from_list(rows), max_steps=1, remove_unused_columns=False)
    trains(tmp_path, **options, collator=without_mask if name == "fnet" else pad)


def of_tokens(examples):
    batch = pad(examples)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def test_a_multimodal_model_trains_without_a_cache_of_what_its_layers_saw(tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    text = sizes | dict(model_type="llama", vocab_size=50, num_key_value_heads=2, pad_token_id=0)
    vision = sizes | dict(model_type="clip_vision_model", image_size=8, patch_size=4, projection_dim=16)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=49, vision_feature_layer=-1)
    assert config.text_config.use_cache
    trainer = trains(tmp_path, model=LlavaForConditionalGeneration(config), collator=of_tokens)
    assert not trainer.model.config.text_config.use_cache


# --- statistics of the data -----------------------------------------------------------------------------------------------


class Remembering(BertForSequenceClassification):
    """Keeps a running mean of its embeddings, and subtracts it."""

    kind = "buffer"

    def __init__(self, config):
        super().__init__(config)
        mean = torch.zeros(config.hidden_size)
        if self.kind == "parameter":
            self.mean = nn.Parameter(mean, requires_grad=False)
        else:
            self.register_buffer("mean", mean, persistent=self.kind == "saved buffer")

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.bert.embeddings(input_ids)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(dim=(0, 1)), alpha=0.1)
        embedded = self.bert.embeddings.word_embeddings(input_ids) - self.mean
        return super().forward(inputs_embeds=embedded, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize("kind", ["buffer", "saved buffer", "parameter"])
def test_statistics_of_the_data_are_refused_wherever_they_are_kept(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(Remembering, "kind", kind)
    named = "frozen parameter" if kind == "parameter" else "buffer"
    refused(tmp_path, f"writes the {named} 'mean'", model=Remembering(tiny_bert().config))


# --- what would be ignored ------------------------------------------------------------------------------------------------


class OfTheBatch(DopplerTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **options)


class OfBoth(OfTheBatch):
    def compute_per_sample_loss(self, model, inputs):
        return super().compute_per_sample_loss(model, inputs)


def test_a_loss_of_the_batch_is_refused_where_it_would_not_be_called(tmp_path):
    with pytest.raises(ValueError, match=r"OfTheBatch\.compute_loss has no effect .* Override compute_per_sample_loss"):
        trainer_of(tmp_path, cls=OfTheBatch)
    trainer_of(tmp_path, cls=OfBoth)
    trainer_of(tmp_path, cls=OfTheBatch, disable_dp=True, noise_multiplier=None)


class OfAnOrder(DopplerTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(train_dataset)


def test_a_sampler_is_refused_which_would_not_be_called(tmp_path):
    with pytest.raises(ValueError, match=r"OfAnOrder\._get_train_sampler has no effect on a private training"):
        trainer_of(tmp_path, cls=OfAnOrder)
    trainer_of(tmp_path, cls=OfAnOrder, disable_dp=True, noise_multiplier=None)


class OfTheUsersOwn(nn.Module):
    """A model that computes its loss, of the batch, as the host's trainer wants it."""

    def __init__(self):
        super().__init__()
        self.bert = tiny_bert()

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.bert(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def test_a_model_of_the_users_own_needs_a_loss_per_example(tmp_path):
    refused(tmp_path, r"must be one of transformers for a loss that is known, got OfTheUsersOwn", model=OfTheUsersOwn())


class InOrderOf(nn.Module):
    """Takes the rows of a batch in an order that follows from them, as for packing, and puts them back."""

    def __init__(self, key):
        super().__init__()
        torch.manual_seed(0)
        self.key = key
        self.embeddings, self.mixed, self.head = nn.Embedding(50, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask, labels):
        order = torch.argsort(self.key(input_ids, attention_mask), stable=True)
        kept = attention_mask.unsqueeze(-1)
        sequences = (self.embeddings(input_ids) * kept)[order]
        sequences = torch.tanh(self.mixed(sequences.mT)).mT[torch.argsort(order)]
        logits = self.head((sequences * kept).sum(dim=1) / kept.sum(dim=1))
        return F.cross_entropy(logits, labels, reduction="none")


class OfOwnLosses(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return model(**inputs)


@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize(
    "key",
    [
        lambda ids, mask: ids[:, 0],
        lambda ids, mask: -ids[:, 0],
        lambda ids, mask: ids[:, 1] % 3,
        lambda ids, mask: mask.sum(dim=1),
    ],
    ids=["ascending", "descending", "in groups", "by length"],
)
def test_rows_that_a_layer_takes_in_an_order_of_its_own_are_refused(tmp_path, key, batch_size):
    match = r"'mixed\..*after sorting or in groups\. Let it|in the places of others at the parameters 'mixed"
    refused(tmp_path, match, model=InOrderOf(key), cls=OfOwnLosses, per_device_train_batch_size=batch_size)


def test_rows_that_a_layer_takes_in_their_order_train(tmp_path):
    trains(tmp_path, model=InOrderOf(lambda ids, mask: torch.arange(len(ids))), cls=OfOwnLosses)


class Freezing(TrainerCallback):
    def __init__(self, trainable):
        self.trainable = trainable

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.classifier.requires_grad_(self.trainable)


@pytest.mark.parametrize(("trainable", "change"), [(False, "frozen"), (True, "unfrozen")])
def test_what_is_trained_stays_the_same(tmp_path, trainable, change):
    model = tiny_bert()
    model.classifier.requires_grad_(not trainable)
    trainer = trainer_of(tmp_path, model=model, callbacks=[Freezing(trainable)])
    with pytest.raises(ValueError, match=rf"must stay the same .*, got 'classifier.bias' {change}\. Set requires_grad"):
        trainer.train()
    assert trainer.state.global_step == 1


# Without an optimizer's state there is nothing that the other optimizer cannot read.
@pytest.mark.parametrize("save_only_model", [*thorough(False), True])
def test_a_private_checkpoint_is_not_resumed_without_privacy(tmp_path, save_only_model):
    saving = dict(save_strategy="steps", save_steps=2, save_only_model=save_only_model)
    trainer_of(tmp_path, **saving).train()
    public = trainer_of(tmp_path, noise_multiplier=None, disable_dp=True, **saving)
    with pytest.raises(ValueError, match=r"disable_dp must be False to resume from .* holds a privacy ledger, got True\."):
        public.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


@pytest.mark.parametrize("save_only_model", [False, *thorough(True)])
def test_a_checkpoint_without_privacy_is_not_resumed_under_another_runs_ledger(tmp_path, save_only_model):
    saving = dict(save_strategy="steps", save_steps=2, save_only_model=save_only_model)
    trainer_of(tmp_path).train()
    trainer_of(tmp_path, noise_multiplier=None, disable_dp=True, **saving).train()
    with pytest.raises(ValueError, match=r"no privacy_ledger\.json in .*, which was saved without privacy"):
        trainer_of(tmp_path, **saving).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


# --- in training mode -----------------------------------------------------------------------------------------------------


class Centered(DopplerTrainer):
    """Standardizes its inputs over the batch, in training only."""

    def compute_per_sample_loss(self, model, inputs):
        if model.training:
            embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = (embedded - embedded.mean((0, 1))) / embedded.std((0, 1))
        return super().compute_per_sample_loss(model, inputs)


class MixedUp(Centered):
    def compute_per_sample_loss(self, model, inputs):
        if model.training:
            embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = 0.5 * embedded + 0.5 * embedded.roll(1, 0)
        return DopplerTrainer.compute_per_sample_loss(self, model, inputs)


def frozen_embeddings(**more):
    model = tiny_bert(initializer_range=0.3, **more)
    model.get_input_embeddings().requires_grad_(False)
    return model


@pytest.mark.parametrize("trainer", [Centered, MixedUp])
def test_what_couples_examples_in_training_only_is_refused(tmp_path, trainer):
    refused(tmp_path, "changes with the examples beside it", cls=trainer, model=frozen_embeddings(hidden_dropout_prob=0.1))


class RandomlyMixedUp(DopplerTrainer):
    """MixUp with dropout that no attribute of the model switches off."""

    def compute_per_sample_loss(self, model, inputs):
        embedded = F.dropout(model.get_input_embeddings()(inputs["input_ids"]).detach(), 0.2, training=model.training)
        if model.training:
            embedded = 0.5 * embedded + 0.5 * embedded.roll(1, 0)
        inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": embedded}
        return super().compute_per_sample_loss(model, inputs)


def test_a_random_loss_that_mixes_examples_in_training_only_is_refused(tmp_path):
    refused(tmp_path, "changes with the examples beside it", cls=RandomlyMixedUp, model=frozen_embeddings())


class Capped(nn.Module):
    """An embedding whose tokens of one kind count only up to a number of them in the batch, in training mode."""

    def __init__(self, layer, **options):
        super().__init__()
        self.layer = layer
        self.options = options
        vars(self).update(options)

    def forward(self, tokens):
        x = self.layer(tokens)
        name, kind = next(iter(self.options)), (tokens % 2).flatten()
        if name == "max_tokens_per_expert":
            place = torch.stack([(kind == expert).cumsum(0) for expert in (0, 1)])[kind, torch.arange(len(kind))]
            return x * (place <= vars(self)[name]).view_as(tokens)[..., None]
        if name == "token_drop_ratio":
            if self.training and self.token_drop_ratio > 0:
                least = x.detach().norm(dim=-1).mean(0).argsort()[: int(x.shape[1] * self.token_drop_ratio)]
                x = x.index_fill(1, least, 0.0)
            return x
        x = F.dropout(x, 0.1, self.training)  # a number that no attribute holds
        return x * (kind.cumsum(0) <= 1.25 * len(kind) / 4).view_as(tokens)[..., None] if self.training else x


@pytest.mark.parametrize(
    "option", [{"max_tokens_per_expert": 256}, *thorough({"token_drop_ratio": 0.5}, {"literal": 0.1})], ids=str
)
def test_what_couples_examples_is_seen_whatever_it_is_called_and_beside_any_dropout(tmp_path, option):
    model = tiny_bert(initializer_range=0.3, hidden_dropout_prob=0.1)
    model.bert.embeddings.word_embeddings = Capped(model.bert.embeddings.word_embeddings, **option)
    # Of one length, so that no padding is beside an example.
    refused(tmp_path, "of one example changes with the examples beside it", model=model, data=rows_of([8] * 40))


def test_dropout_with_a_number_trains(tmp_path):
    model = tiny_bert(hidden_dropout_prob=0.1)
    model.bert.embeddings.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1, module.training))
    trains(tmp_path, model=model)


class SeldomMixedUp(DopplerTrainer):
    """MixUp of the embedded rows in one batch of twenty; the coin is one that rows share."""

    def compute_per_sample_loss(self, model, inputs):
        if model.training and random.random() < 0.05:
            embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
            order = torch.randperm(len(embedded))
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = 0.5 * embedded + 0.5 * embedded[order]
        return DopplerTrainer.compute_per_sample_loss(self, model, inputs)


def test_a_loss_that_mixes_examples_now_and_then_is_refused(tmp_path, all_trials):
    options = dict(cls=SeldomMixedUp, model=frozen_embeddings(), gradient_accumulation_steps=1)
    refused(
        tmp_path, "changes? with (others in training mode|the examples beside it)|wrong|in batches of different", **options
    )


class Choosing(DopplerTrainer):
    """Shifts the tokens of each example by a choice of its own, which cannot be held; and mixes rows, or not."""

    mixes = False

    def compute_per_sample_loss(self, model, inputs):
        if model.training:
            shifts = torch.randint(0, 3, (len(inputs["input_ids"]), 1))
            inputs = inputs | {"input_ids": (inputs["input_ids"] + shifts) % 50}
            if self.mixes:
                tokens = inputs["input_ids"]
                inputs = inputs | {"input_ids": torch.cat([tokens[:, :2], tokens.roll(1, 0)[:, 2:]], dim=1)}
        return DopplerTrainer.compute_per_sample_loss(self, model, inputs)


@pytest.mark.thorough
def test_a_choice_that_cannot_be_held_trains(tmp_path, all_trials):
    trains(tmp_path, cls=Choosing, model=tiny_bert(initializer_range=0.3))


def test_a_choice_that_cannot_be_held_is_refused_if_rows_are_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr(Choosing, "mixes", True)
    refused(tmp_path, "change with others in training mode", cls=Choosing, model=tiny_bert(initializer_range=0.3))


def mixture(**more):
    torch.manual_seed(0)
    config = NllbMoeConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1,
        max_position_embeddings=64, init_std=0.2, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        **more,
    )  # fmt: skip
    model = NllbMoeForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("router" not in name and "expert" not in name)
    return model


@draws_for_layers_that_stay
def test_a_capacity_that_the_batch_shares_is_refused_and_left_as_it_was(tmp_path):
    def collate(examples):
        batch = of_tokens(examples)
        return batch | {"input_ids": batch["input_ids"].clamp(min=1)}

    model = mixture(encoder_layerdrop=0.0, decoder_layerdrop=0.0)

    def attributes():
        names = ("expert_capacity", "dropout", "jitter_noise", "training")
        return [(name, vars(module)[name]) for module in model.modules() for name in names if name in vars(module)]

    before, config = attributes(), model.config.to_dict()
    refused(tmp_path, "changes with the examples beside it", model=model, collator=collate)
    after = [(name, value) for name, value in attributes() if name != "training"]
    assert after == [(name, value) for name, value in before if name != "training"]
    assert model.config.to_dict() | {"use_cache": 0} == config | {"use_cache": 0}


# --- which examples are looked at -----------------------------------------------------------------------------------------


def rows_of(lengths, labels=None):
    generator = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(lengths):
        tokens = generator.integers(5, 50, size=length).tolist()
        label = index % 2 if labels is None else labels[index]
        rows.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": label})
    return Dataset.from_list(rows)


def test_two_lengths_are_looked_at_if_there_are_two(tmp_path):
    data = rows_of([5] * 3 + [8] * 60)  # more than nine in ten are of one length
    refused(tmp_path, "pad on the right", data=data, collator=padded_on_the_left)


class Unlabelled(DopplerTrainer):
    """The shortest and the longest examples have no gradient, or none that is finite; all losses scale with the batch."""

    value = 0.0

    def compute_per_sample_loss(self, model, inputs):
        lengths = inputs["attention_mask"].sum(dim=1)
        losses = super().compute_per_sample_loss(model, inputs) * len(lengths)
        return losses * torch.where((lengths == 3) | (lengths == 8), self.value, 1.0)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_examples_without_a_gradient_are_replaced_by_others(tmp_path, monkeypatch, value):
    monkeypatch.setattr(Unlabelled, "value", value)
    refused(tmp_path, "the loss depends on the number of examples", cls=Unlabelled)


@pytest.mark.thorough
def test_one_usable_length_is_enough_to_train(tmp_path):
    class Short(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            is_left_out = inputs["attention_mask"].sum(dim=1) == 8
            return super().compute_per_sample_loss(model, inputs) * torch.where(is_left_out, float("nan"), 1.0)

    with pytest.warns(UserWarning, match="gradient that is not finite, and contribute nothing"):
        trains(tmp_path, cls=Short, data=rows_of([8, 8, 5] * 8))


def test_examples_none_of_which_has_a_gradient_are_refused(tmp_path):
    class Nothing(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            return 0.0 * super().compute_per_sample_loss(model, inputs)

    refused(tmp_path, "must each have a finite gradient that is not zero", cls=Nothing)


def left_beside(rows):
    """A transform that leaves the images beside what it makes of them, as most do."""
    return rows | {"pixel_values": [np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255 for image in rows["image"]]}


def stacked(rows):
    return {name: torch.tensor(np.stack([row[name] for row in rows])) for name in ("pixel_values", "labels")}


def test_images_that_a_transform_leaves_beside_its_features_train(tmp_path):
    images = [PILImage.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(0, 240, 6)]
    rows = Dataset.from_dict({"image": images, "labels": [index % 2 for index in range(40)]})
    data, model = rows.with_transform(left_beside), build("vit", torch.float32)
    trains(tmp_path, collator=stacked, data=data, model=model, remove_unused_columns=False)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (PILImage.new("L", (3, 5)), 15),
        ([PILImage.new("L", (3, 5)), PILImage.new("L", (2, 2))], 19),
        ([np.zeros(3), np.zeros(4)], 7),
        ([torch.zeros(3), torch.zeros((2, 2))], 7),
        ([[1, 2], [3]], 3),
        ([1, 2, 3], 3),
        ("text", 1),
        (None, 1),
    ],
    ids=["image", "images", "arrays", "tensors", "lists", "numbers", "text", "nothing"],
)
def test_the_size_of_an_example_is_that_of_its_numbers_and_pixels(value, size):
    assert probe.size_of({"value": value, "label": 1}) == size + 1


def test_a_transform_is_given_one_example_at_a_time(tmp_path):
    """`datasets` transforms all examples that are fetched together, and could mix them, or draw one number for all."""
    seen = []

    def counted(rows):
        seen.append(len(rows["input_ids"]))
        return rows

    trainer_of(tmp_path, data=text_data().with_transform(counted), remove_unused_columns=False, max_steps=2).train()
    assert set(seen) == {1}


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("views", [1, 2])
def test_a_transform_that_makes_more_rows_of_an_example_is_refused(tmp_path, times, views):
    """Each window of a long text would contribute C, with the checks before the first step and without them."""

    def windows(rows):
        return {name: [value for value in values for _ in range(times)] for name, values in rows.items()}

    data = text_data().with_transform(windows)
    for checked in (True, False):
        options = dict(grad_sample_self_check=checked, augmentation_multiplicity=views, remove_unused_columns=False)
        with pytest.raises(ValueError, match="train_dataset must return one row for each example, got more or fewer"):
            trainer_of(tmp_path / str(checked), data=data, **options).train()


class Labels(DopplerTrainer):
    """Keeps the labels that reach the loss."""

    def compute_per_sample_loss(self, model, inputs):
        self.seen = [*getattr(self, "seen", []), *inputs["labels"].flatten().tolist()]
        return super().compute_per_sample_loss(model, inputs)


@pytest.mark.parametrize(
    "collator",
    [default_data_collator, functools.partial(default_data_collator, return_tensors="pt")],
    ids=["default", "with options"],
)
def test_a_whole_number_among_the_labels_does_not_cut_those_of_others(tmp_path, collator):
    """The host's default collator asks the first example alone whether labels are whole numbers."""
    data = [{"input_ids": [index + 1] * 4, "label": 0.5 if index else 3} for index in range(8)]
    everyone = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1, accountant="pld", max_steps=1)
    trainer = trainer_of(
        tmp_path, cls=Labels, model=tiny_bert(num_labels=1), data=data, grad_sample_self_check=False, **everyone
    )
    trainer.data_collator = collator
    trainer.train()
    assert sorted(trainer.seen[-8:]) == [0.5] * 7 + [3.0]


class OwnPadding(DataCollatorWithPadding):
    """One's own, made of one of the host's."""


@pytest.mark.parametrize(
    "collator",
    [
        default_data_collator,
        DefaultDataCollator(),
        DataCollatorWithPadding(BertTokenizer(vocab={"[PAD]": 0})),
        OwnPadding(BertTokenizer(vocab={"[PAD]": 0})),
        functools.partial(default_data_collator, return_tensors="pt"),
        default_collate,
    ],
    ids=["default", "as a class", "padding", "one's own padding", "with options", "torch's"],
)
def test_an_example_without_a_column_of_others_is_refused(tmp_path, collator):
    """The host's collators ask the first example alone which columns there are."""
    data = [{"input_ids": [index + 1] * 4, "token_type_ids": [0] * 4, "label": index % 2} for index in range(8)]
    del data[0]["token_type_ids"]
    everyone = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1, grad_sample_self_check=False)
    trainer = trainer_of(tmp_path, data=data, **everyone)
    trainer.data_collator = collator
    with pytest.raises(ValueError, match="must all have the same columns, got one that lacks a value in some"):
        trainer.train()


def test_an_example_of_fewer_choices_than_others_is_refused(tmp_path):
    """The host's collator takes as many choices of each example as the first one has."""
    torch.manual_seed(0)
    model = BertForMultipleChoice(tiny_bert().config)
    data = [{"input_ids": [[index + 1] * 4] * (3 if index else 2), "label": index % 2} for index in range(8)]
    everyone = dict(per_device_train_batch_size=7, gradient_accumulation_steps=1, grad_sample_self_check=False)
    trainer = trainer_of(tmp_path, model=model, data=data, **everyone)
    trainer.data_collator = DataCollatorForMultipleChoice(BertTokenizer(vocab={"[PAD]": 0}))
    with pytest.raises(ValueError, match="must all have the same number of choices, got different ones"):
        trainer.train()


def weighted(examples, *, share):
    """Masked at random, with a weight that depends on the batch."""
    batch = masked(examples)
    return batch | {"weight": torch.full((len(examples),), share(batch))}


class Weighted(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        weight = inputs.pop("weight")
        return weight * super().compute_per_sample_loss(model, inputs)


@pytest.mark.parametrize(
    "share",
    [
        lambda batch: len(batch["labels"]) / float(batch["attention_mask"].sum()),
        lambda batch: 4.0 / len(batch["labels"]),
        lambda batch: 4.0 / (1.0 + float(((batch["input_ids"] != 4) & (batch["attention_mask"] == 1)).sum())),
    ],
    ids=["tokens", "examples", "tokens left"],
)
def test_a_random_collator_that_counts_over_the_batch_is_refused(tmp_path, share):
    options = dict(cls=Weighted, remove_unused_columns=False, collator=lambda examples: weighted(examples, share=share))
    refused(tmp_path, "counts nothing over the batch", **options)


@pytest.mark.thorough
def test_a_random_collator_that_weighs_each_example_trains(tmp_path):
    collator = functools.partial(weighted, share=lambda batch: 2.0)
    trains(tmp_path, cls=Weighted, remove_unused_columns=False, collator=collator)


class Balanced(DopplerTrainer):
    """Class weights n / (classes · count), of a batch of at least four; of two or three examples they show less."""

    def compute_per_sample_loss(self, model, inputs):
        losses, labels = super().compute_per_sample_loss(model, inputs), inputs["labels"]
        counts = torch.bincount(labels, minlength=4)
        return losses if len(labels) < 4 else losses * len(labels) / ((counts > 0).sum() * counts[labels])


def test_weights_that_balance_a_batch_are_refused(tmp_path):
    options = dict(model=tiny_bert(num_labels=4), data=rows_of([3, 4, 5, 6] * 10, labels=[0] * 39 + [3]))
    refused(tmp_path, "class weights that balance a batch", cls=Balanced, **options)


def test_weights_that_balance_a_batch_are_refused_where_labels_are_in_no_column(tmp_path):
    rows = rows_of([3, 4, 5, 6] * 30, labels=[0] * 117 + [3] * 3)
    refused(tmp_path, "class weights that balance a batch", cls=Balanced, model=tiny_bert(num_labels=4), data=Rows(rows))


class Trimmed(DopplerTrainer):
    """Leaves out the tenth of the examples whose loss is highest."""

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        least = losses.detach().sort(descending=True).values[int(0.1 * len(losses))]
        return torch.where(losses <= least, losses, 0.0 * losses)


class Hardest(DopplerTrainer):
    """Keeps 70 % of the examples, those of the highest loss, but at least eight."""

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        kept = min(len(losses), max(8, int(0.7 * len(losses))))
        return torch.where(losses >= losses.detach().topk(kept).values[-1], losses, 0.0 * losses)


@pytest.mark.parametrize("cls", [Trimmed, Hardest])
def test_a_share_of_a_batch_that_is_left_out_is_refused(tmp_path, cls):
    refused(tmp_path, "the loss depends on them", cls=cls, model=tiny_bert(initializer_range=0.3))


# --- precision, and what is remembered ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*thorough("autocast"), "parameters"])
def test_rounding_hides_no_forgotten_mask(tmp_path, kind):
    data = rows_of([8] * 40 + [12] * 4)
    model = tiny_bert(initializer_range=0.02)
    model = model.bfloat16() if kind == "parameters" else model
    before = [parameter.clone() for parameter in model.parameters()]
    options = dict(bf16=kind == "autocast", data=data, collator=without_mask)
    refused(tmp_path, "changes with the examples beside it", model=model, **options)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    trainer = trainer_of(tmp_path, model=model, data=data, max_steps=1, bf16=kind == "autocast")
    trainer.train()  # with its mask
    assert trainer.state.global_step == 1


class CastByHand(BertForSequenceClassification):
    """Asks for bfloat16 in its forward pass, in three ways."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        hidden = self.bert(input_ids, attention_mask=attention_mask).pooler_output
        hidden = hidden.to(torch.bfloat16).float().bfloat16().to(dtype=torch.bfloat16)
        return SequenceClassifierOutput(logits=self.classifier(hidden).float())


class NeedsBfloat16(nn.Module):
    def forward(self, hidden):
        if hidden.dtype != torch.bfloat16:
            raise RuntimeError("only support bf16")
        return hidden


class Logits(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


def test_a_cast_in_the_model_hides_no_forgotten_mask(tmp_path):
    model, data = CastByHand(tiny_bert().config).bfloat16(), rows_of([8] * 40 + [12] * 4)
    options = dict(cls=Logits, model=model, data=data, remove_unused_columns=False)
    refused(tmp_path, "changes with the examples beside it", collator=without_mask, **options)
    trains(tmp_path, **options)


def test_a_layer_that_needs_bfloat16_is_refused_by_name(tmp_path):
    model = tiny_bert().bfloat16()
    model.bert.pooler.activation = NeedsBfloat16()
    refused(tmp_path, r"float32 too, .* in the layer 'bert\.pooler\.activation' \(NeedsBfloat16\)\.", model=model)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=["device", "host"]
)
def test_a_check_in_float32_that_does_not_fit_is_left_out_and_said_so(tmp_path, monkeypatch, capsys, error):
    def too_large(model):
        raise error

    monkeypatch.setattr(start_check, "in_full_precision", too_large)
    trains(tmp_path, model=tiny_bert().bfloat16())
    assert "The check in float32 does not fit into memory" in capsys.readouterr().out


def big_bird():
    config = BigBirdConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2,
        block_size=2, num_random_blocks=1, max_position_embeddings=64, pad_token_id=0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
    )  # fmt: skip
    return BigBirdForSequenceClassification(config)


def test_a_model_that_replaces_its_layers_for_good_is_refused_and_left_as_it_was(tmp_path):
    model = big_bird()
    layers = dict(model.named_modules())
    # Its blocks at random are the same for all rows.
    whole, data = {"gradient_accumulation_steps": 1}, rows_of([8] * 20 + [30] * 20)
    refused(tmp_path, r"replaces 'bert\.encoder\S+' for all later batches", model=model, data=data, **whole)
    assert dict(model.named_modules()) == layers
    trains(tmp_path, model=model, data=rows_of([32] * 20), **whole)


def test_the_hooks_of_the_host_which_it_installs_at_the_first_forward_pass_are_installed_once(tmp_path):
    model = tiny_bert(output_hidden_states=True)
    trains(tmp_path, model=model)
    # Of the embeddings and of the one layer. Installed twice, they would record each twice.
    assert len(model(torch.ones(1, 3, dtype=torch.long)).hidden_states) == 2


class WithoutMask(nn.Module):
    """A bag of embeddings that reads the padding, whose row is zero until noise is added to it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        total = self.embedding(input_ids).sum(1)
        return SequenceClassifierOutput(logits=self.head(total / attention_mask.sum(1, keepdim=True)))


def test_a_model_that_reads_the_padding_is_refused_although_its_row_is_zero_at_first(tmp_path):
    model = WithoutMask()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    refused(tmp_path, "changes with the examples beside it", model=model, cls=Logits, remove_unused_columns=False)
    assert not model.embedding.weight[0].any()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


class PlainModule(nn.Module):
    """No model of the host's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        return SequenceClassifierOutput(logits=self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1)))


def test_a_module_that_is_no_model_of_the_host_trains(tmp_path):
    trainer = trained(trainer_of(tmp_path, cls=Logits, model=PlainModule(), remove_unused_columns=False))
    trainer.save_model()
    assert trainer.state.global_step == 4
    assert main(["verify", str(tmp_path / "out")]) == 0


class Bank(DopplerTrainer):
    """Keeps the mean loss of the last batch in an attribute."""

    bank = 0.0

    def compute_per_sample_loss(self, model, inputs):
        losses = DopplerTrainer.compute_per_sample_loss(self, model, inputs)
        if model.training:
            last, self.bank = self.bank, losses.detach().mean()
            losses = losses * (1.0 + last)
        return losses


class Counted(DopplerTrainer):
    """Trains more of the loss after some calls, of which a draw may take several."""

    def compute_per_sample_loss(self, model, inputs):
        self.calls = getattr(self, "calls", 0) + 1
        losses = super().compute_per_sample_loss(model, inputs)
        return losses if self.calls > 1000 else 0.5 * losses


def test_a_loss_that_follows_a_count_of_calls_is_refused(tmp_path):
    refused(tmp_path, "something of earlier batches is remembered", cls=Counted)


class SameCoin(DopplerTrainer):
    """Turns the labels of a whole micro-batch round, or of none."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if self.model.training and torch.rand(()) < 0.3:
            inputs = {**inputs, "labels": 1 - inputs["labels"]}
        return inputs


def test_a_coin_for_a_whole_micro_batch_is_found_where_inputs_are_prepared_too(tmp_path):
    refused(tmp_path, "share|shares", cls=SameCoin)


def divided_by_the_batch(model):
    def divide(gradient):
        return gradient * (30.0 / gradient.norm()).clamp(max=1.0)

    def after(module, inputs, output):
        if output.requires_grad:
            output.register_hook(divide)

    model.bert.pooler.register_forward_hook(after)
    return model


def test_a_gradient_that_is_clipped_to_a_norm_over_the_batch_is_refused(tmp_path):
    """No example of the check has such a norm, but one may."""
    refused(tmp_path, "changes with the examples beside it", model=divided_by_the_batch(tiny_bert()))


def test_a_gradient_that_is_clipped_row_by_row_trains(tmp_path):
    model = tiny_bert()

    def after(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * (0.01 / gradient.norm(dim=1, keepdim=True)).clamp(max=1.0))

    model.bert.pooler.register_forward_hook(after)
    trains(tmp_path, model=model)


MEAN = 1.0


class Kept:
    """A namespace."""

    mean = 1.0


@dataclasses.dataclass(slots=True)
class Running:
    """A mean in a slot."""

    value: float = 1.0


class Slow(DopplerTrainer):
    """Divides by a running mean of the losses that one batch moves by a millionth; kept in several places."""

    place = "attribute"
    kept = 1.0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mean, self.means, self.queue = 1.0, {"a": [torch.ones(())]}, collections.deque([1.0], maxlen=1)
        mean = 1.0

        def in_closure(now):
            nonlocal mean
            mean = float(0.999999 * mean + 1e-6 * now)
            return mean

        self.in_closure = in_closure

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        now = losses.detach().mean()
        if self.place == "attribute":
            self.mean = 0.999999 * self.mean + 1e-6 * now
            return losses / self.mean
        if self.place == "list, in place":
            return losses / self.means["a"][0].mul_(0.999999).add_(1e-6 * now).clone()
        if self.place == "queue":
            self.queue.append(float(0.999999 * self.queue[0] + 1e-6 * now))
            return losses / self.queue[0]
        if self.place == "closure":
            return losses / self.in_closure(now)
        if self.place in READ:
            read, write = READ[self.place]
            mean = float(read(self))
            write(self, 0.999999 * mean + 1e-6 * float(now))
            return losses / mean
        self.mean, self.seen = now, self.__dict__.get("seen", 0) + 1
        self.means["last"] = losses  # for a log, which no loss reads
        return losses


def write_global(trainer, value):
    global MEAN
    MEAN = value


# Place → what reads a mean there, and what writes it.
READ = {
    "number of NumPy": (lambda t: vars(t).get("m", 1.0), lambda t, value: vars(t).update(m=np.float32(value))),
    "array, in place": (
        lambda t: vars(t).setdefault("m", np.ones(1))[0],
        lambda t, value: operator.setitem(t.m, 0, value),
    ),
    "tuple": (lambda t: vars(t).get("m", (0, 1.0))[1], lambda t, value: vars(t).update(m=(0, value))),
    "slot": (lambda t: vars(t).setdefault("m", Running()).value, lambda t, value: setattr(t.m, "value", value)),
    "global variable": (lambda t: MEAN, write_global),
    "class": (lambda t: Kept.mean, lambda t, value: setattr(Kept, "mean", value)),
    "class of the trainer": (lambda t: Slow.kept, lambda t, value: setattr(Slow, "kept", value)),
    "complex number": (lambda t: vars(t).get("m", 1.0 + 0j).real, lambda t, value: vars(t).update(m=complex(value))),
    "whole numbers": (
        lambda t: vars(t).get("m", torch.tensor([10**15]))[0] / 1e15,
        lambda t, value: vars(t).update(m=torch.tensor([int(value * 1e15)])),
    ),
    "parameter that nothing trains": (
        lambda t: vars(t).setdefault("m", nn.Parameter(torch.ones(()), requires_grad=False)).item(),
        lambda t, value: t.m.fill_(value),
    ),
}
PLACES = ["attribute", "list, in place", "queue", "closure", *READ]


@pytest.mark.parametrize(
    "place", further(PLACES, quick=["closure", "array, in place", "tuple", "slot", "parameter that nothing trains"])
)
def test_a_slow_memory_is_refused_wherever_it_is_kept(tmp_path, monkeypatch, place):
    monkeypatch.setattr(Slow, "place", place)
    for owner, name in ((Slow, "kept"), (Kept, "mean"), (sys.modules[__name__], "MEAN")):
        monkeypatch.setattr(owner, name, 1.0)
    refused(tmp_path, "something of earlier batches is remembered", cls=Slow)


class LeavesOut(DopplerTrainer):
    """Leaves out what is far below the usual loss: one outlier leaves out all others, later on."""

    mean = 1.0

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        kept = losses.detach() > 1e-3 * self.mean
        self.mean = 0.99 * self.mean + 0.01 * losses.detach().mean().item()
        return losses * kept


def test_a_remembered_threshold_far_from_all_losses_is_found(tmp_path):
    refused(tmp_path, "something of earlier batches is remembered", cls=LeavesOut)


def test_what_is_noted_and_not_read_is_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(Slow, "place", "noted")
    assert trained(trainer_of(tmp_path, cls=Slow)).state.global_step == 4


def test_memory_outside_of_buffers_is_refused(tmp_path):
    refused(tmp_path, "something of earlier batches is remembered", cls=Bank)


# --- numbers that rows share ----------------------------------------------------------------------------------------------


def translator(**more):
    """A stock model that leaves out a layer of all rows at a time, with probability 0.05 by default."""
    torch.manual_seed(0)
    config = M2M100Config(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, **more,
    )  # fmt: skip
    return M2M100ForConditionalGeneration(config)


@pytest.mark.parametrize(
    "cut", [{"gradient_accumulation_steps": 2}, {"max_tokens_per_micro_batch": 64}], ids=["pieces", "tokens"]
)
def test_a_layer_that_is_left_out_of_a_micro_batch_is_refused_where_a_draw_has_several(tmp_path, cut):
    options = {"gradient_accumulation_steps": 1} | cut
    match = (
        r"all rows share, drawn in the layer 'model\.encoder' .* with decoder_layerdrop=0\.0 and encoder_layerdrop=0\.0\."
    )
    refused(tmp_path, match, model=translator(), collator=of_tokens, **options)


@draws_for_layers_that_stay
@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 1}, {"decoder_layerdrop": 0.0, "encoder_layerdrop": 0.0}]
)
def test_a_layer_that_is_left_out_trains_in_a_single_micro_batch_and_one_that_never_is_in_several(tmp_path, options):
    probabilities = {name: value for name, value in options.items() if "layerdrop" in name}
    cut = {name: value for name, value in options.items() if name not in probabilities}
    trains(tmp_path, model=translator(**probabilities), **cut, collator=of_tokens)


def masked_alike(examples):
    """One share of masked tokens for all rows."""
    batch = pad(examples)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3 * np.random.rand()
    return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 4)}


def test_a_share_of_masks_for_a_batch_is_refused_where_a_draw_has_several_and_trains_in_one(tmp_path):
    refused(tmp_path, r"data_collator must draw its random numbers for each example", collator=masked_alike)
    trains(tmp_path, gradient_accumulation_steps=1, collator=masked_alike)


# --- what a refusal says --------------------------------------------------------------------------------------------------


class OfTokens(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        tokens = inputs["input_ids"].float()
        return (tokens * model(**{name: value for name, value in inputs.items() if name != "labels"}).logits.sum()).flatten()


class Flattened(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).view(*x.shape[:2], -1)


def flattening():
    model = tiny_bert(max_position_embeddings=64)
    model.bert.encoder.layer[0].intermediate.dense = Flattened(model.bert.encoder.layer[0].intermediate.dense)
    return model


@pytest.mark.parametrize("cls", [TokenMean, *thorough(BatchMean)])
def test_a_refusal_has_no_number_that_is_computed_from_examples(tmp_path, cls):
    said = set()
    for seed in range(3):
        with pytest.raises(ValueError, match="changes with the examples beside it") as refusal:
            trainer_of(tmp_path, data=text_data(seed=seed), cls=cls).train()
        said.add(re.sub(r"'[\w.]+'", "", str(refusal.value)))
    assert not any(re.search(r"\d", text) for text in said)


@pytest.mark.parametrize("case", ["loss", "labels", "layer"])
def test_a_refusal_names_no_length_of_an_example(tmp_path, case):
    data = rows_of([7] * 20 + [31])
    model = flattening() if case == "layer" else tiny_bert(max_position_embeddings=64)
    trainer = trainer_of(tmp_path, model=model, data=data, cls=OfTokens if case == "loss" else DopplerTrainer)
    if case == "labels":
        trainer.data_collator = lambda examples: pad(examples) | {"labels": pad(examples)["input_ids"]}
    with pytest.raises(ValueError, match="dimensions") as refusal:
        trainer.train()
    for number in ("31", "62", "93", "7,", "14"):
        assert number not in str(refusal.value)


@pytest.mark.thorough
@pytest.mark.parametrize("start", range(4))
def test_short_texts_that_are_often_masked_nowhere_train(tmp_path, start):
    """No word of three is, half of the time; another example must not be masked as the one before it."""
    folder = write_masked_lm(tmp_path / "model", MASKED_LMS["bert"]())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = random.Random(0)
    texts = [" ".join(words.choices(["good", "bad", "film", "plot"], k=3)) for _ in range(40)]
    data = Dataset.from_dict(tokenizer(texts, return_token_type_ids=False).data)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2)
    trainer = trainer_of(tmp_path / "out", model=AutoModelForMaskedLM.from_pretrained(folder), data=data, max_steps=2)
    trainer.data_collator = collator
    assert trained(trainer).state.global_step == 2


# --- what the first pass keeps --------------------------------------------------------------------------------------------


class ScaledByFirst(DopplerTrainer):
    """All losses are divided by the mean of the first ones ever."""

    scale = None

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        if self.scale is None:
            self.scale = losses.detach().mean()
        return losses / self.scale


class WeighedByFirst(DopplerTrainer):
    """Labels are weighed by how many of each the first batch had."""

    weights = None

    def compute_per_sample_loss(self, model, inputs):
        if self.weights is None:
            self.weights = 1.0 / (1.0 + torch.bincount(inputs["labels"], minlength=2))
        return super().compute_per_sample_loss(model, inputs) * self.weights[inputs["labels"]]


class CenteredByFirst(nn.Module):
    """Subtracts the mean of the first batch, which is no buffer that is saved."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.is_set = inner, False
        self.register_buffer("mean", torch.zeros(16), persistent=False)

    def forward(self, x):
        if self.training and not self.is_set:
            self.mean.copy_(x.detach().mean(dim=(0, 1)))
            self.is_set = True
        return self.inner(x - self.mean)


def with_first_mean():
    model = tiny_bert()
    model.bert.encoder.layer[0].intermediate.dense = CenteredByFirst(model.bert.encoder.layer[0].intermediate.dense)
    return model


class CenteredByParameter(nn.Module):
    """Subtracts the mean of the first batch, which becomes a parameter that is not trained."""

    def __init__(self, inner, listed):
        super().__init__()
        self.inner, self.listed = inner, nn.ParameterDict() if listed else None
        self.register_parameter("mean", None)

    def forward(self, x):
        mean = self.mean if self.listed is None else self.listed.get("mean")
        if mean is None:
            mean = nn.Parameter(x.detach().mean(dim=(0, 1)), requires_grad=False)
            if self.listed is None:
                self.mean = mean
            else:
                self.listed["mean"] = mean
        return self.inner(x - mean)


@pytest.mark.parametrize("listed", [False, True])
def test_a_parameter_that_the_first_batch_makes_is_refused_and_gone(tmp_path, listed):
    model = tiny_bert()
    dense = model.bert.encoder.layer[0].intermediate.dense
    model.bert.encoder.layer[0].intermediate.dense = CenteredByParameter(dense, listed)
    names = [name for name, _ in model.named_parameters()]
    refused(tmp_path, r"The forward pass writes the frozen parameter '.*mean'", model=model)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize(
    "options",
    [dict(cls=ScaledByFirst), dict(cls=WeighedByFirst), dict(model=with_first_mean)],
    ids=["loss", "labels", "layer"],
)
def test_what_the_first_batch_sets_for_all_later_ones_is_refused(tmp_path, options):
    made = options | ({"model": options["model"]()} if "model" in options else {})
    refused(tmp_path, r"another first batch: something of earlier batches is remembered .*public numbers, and", **made)


class NotesFirst(DopplerTrainer):
    """Keeps the first losses, which no loss reads."""

    first = None

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        if self.first is None:
            self.first = losses.detach()
        return losses


@pytest.mark.parametrize("checks", [True, False])
def test_nothing_is_left_of_the_examples_of_the_check(tmp_path, checks):
    trainer = trainer_of(tmp_path, cls=NotesFirst, grad_sample_self_check=checks, max_steps=1)
    left = []

    class AtBegin(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            left.append(trainer.first)

    trainer.add_callback(AtBegin())
    trainer.train()
    assert left == [None]
    assert trainer.first is not None
