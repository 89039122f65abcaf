"""What reaches the engine is checked before the first step: rows, losses and layers that look at their neighbours."""

import functools
import random
import re

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
from tests.support.folders import MASKED_LMS, write_masked_lm
from tests.support.models import build
from tests.support.tiers import combined, further, thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import TokenMean, trained
from tests.support.trainers import checked_trainer_of as trainer_of

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
    refused(tmp_path, r"losses of 8 collated examples must have shape \(8,\), got .* one row for each", collator=twice)


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
    refused(
        tmp_path,
        r"MixUp, CutMix or packing|depends on the length to which",
        collator=collator,
        gradient_accumulation_steps=1,
    )


@pytest.mark.thorough
def test_a_random_collator_that_mixes_nothing_trains(tmp_path):
    trains(tmp_path, collator=masked)


def test_left_padding_trains_where_positions_are_relative(tmp_path):
    trains(tmp_path, model=llama(), collator=padded_on_the_left)


# --- the loss -------------------------------------------------------------------------------------------------------------


class BatchMean(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses / len(losses)


def of_each_row(module, args, output):
    return output + 0.3 * output.detach().std(dim=-1, keepdim=True) * torch.randn_like(output)


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
    match = r"layer '\S+' \(\w+\) depends on the length|at most (4|6) tokens with dynamic or long rotary"
    refused(tmp_path, match, **options)


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


def test_lengths_are_asked_for_where_positions_depend_on_the_longest(tmp_path):
    model = llama(max_position_embeddings=8, rope_parameters=DYNAMIC, initializer_range=0.2)
    refused(tmp_path, "^The lengths of all examples must be", model=model, data=OnTheFly(300))


def test_unknown_lengths_train_where_all_are_padded_to_one(tmp_path):
    model = llama(max_position_embeddings=8, rope_parameters=DYNAMIC)
    trains(tmp_path, model=model, data=OnTheFly(300, padded_to=32))


def test_unknown_lengths_train_where_positions_do_not_depend_on_them(tmp_path):
    trains(tmp_path, model=llama(max_position_embeddings=64), data=OnTheFly(300))


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
    model = LlavaForConditionalGeneration(config)
    refused(
        tmp_path,
        "got 'model.multi_modal_projector', 'model.vision_tower', which no loss reaches",
        model=model,
        collator=of_tokens,
    )
    for name in ("model.multi_modal_projector", "model.vision_tower"):  # the mend
        model.get_submodule(name).requires_grad_(False)
    trainer = trains(tmp_path, model=model, collator=of_tokens)
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
    refused(tmp_path, "writes 'mean', which would keep statistics", model=Remembering(tiny_bert().config))


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


def test_rows_that_a_layer_takes_in_an_order_of_its_own_are_refused(tmp_path):
    """As for packing, the longest first; draws come with the shortest first."""
    longest_first = InOrderOf(lambda ids, mask: -mask.sum(dim=1))
    refused(tmp_path, r"layer 'mixed' \(Conv1d\) depends on the number of examples", model=longest_first, cls=OfOwnLosses)


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


def test_dropout_with_a_number_trains(tmp_path):
    model = tiny_bert(hidden_dropout_prob=0.1)
    model.bert.embeddings.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1, module.training))
    trains(tmp_path, model=model)


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
def test_a_capacity_that_the_batch_shares_is_refused(tmp_path):
    def collate(examples):
        batch = of_tokens(examples)
        return batch | {"input_ids": batch["input_ids"].clamp(min=1)}

    options = dict(encoder_layerdrop=0.0, decoder_layerdrop=0.0, router_jitter_noise=0.0)
    refused(tmp_path, "The expert_capacity must be at least 1048576", model=mixture(**options), collator=collate)
    trains(tmp_path, model=mixture(expert_capacity=2**20, **options), collator=collate)  # the mend


# --- which examples are looked at -----------------------------------------------------------------------------------------


def rows_of(lengths, labels=None):
    generator = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(lengths):
        tokens = generator.integers(5, 50, size=length).tolist()
        label = index % 2 if labels is None else labels[index]
        rows.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": label})
    return Dataset.from_list(rows)


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


class Balanced(DopplerTrainer):
    """Class weights n / (classes · count), of a batch of at least four; of two or three examples they show less."""

    def compute_per_sample_loss(self, model, inputs):
        losses, labels = super().compute_per_sample_loss(model, inputs), inputs["labels"]
        counts = torch.bincount(labels, minlength=4)
        return losses if len(labels) < 4 else losses * len(labels) / ((counts > 0).sum() * counts[labels])


def test_weights_that_balance_a_batch_are_refused(tmp_path):
    options = dict(model=tiny_bert(num_labels=4), data=rows_of([3, 4, 5, 6] * 10, labels=[0] * 39 + [3]))
    refused(tmp_path, "the loss depends on the number of examples, or on what they are", cls=Balanced, **options)


# --- precision, and what is remembered ------------------------------------------------------------------------------------


class Logits(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


def big_bird(**more):
    config = BigBirdConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2,
        block_size=2, num_random_blocks=1, max_position_embeddings=64, pad_token_id=0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout=0.0, **more,
    )  # fmt: skip
    model = BigBirdForSequenceClassification(config)
    model.bert.pooler.requires_grad_(False)  # which the head does not use
    return model


def test_a_model_that_replaces_its_layers_for_good_is_refused(tmp_path):
    data = rows_of([8] * 20 + [30] * 20)
    refused(tmp_path, r"replaces 'bert\.encoder\S+' for all later batches", model=big_bird(), data=data)
    trains(tmp_path, model=big_bird(attention_type="original_full"), data=data)  # the mend


def test_the_hooks_of_the_host_which_it_installs_at_the_first_forward_pass_are_installed_once(tmp_path):
    model = tiny_bert(output_hidden_states=True)
    trains(tmp_path, model=model)
    # Of the embeddings and of the one layer. Installed twice, they would record each twice.
    assert len(model(torch.ones(1, 3, dtype=torch.long)).hidden_states) == 2


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


MEAN = 1.0


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
    match = r"^decoder_layerdrop, encoder_layerdrop must be 0 .* Set model\.config\.decoder_layerdrop = 0\.0"
    refused(tmp_path, match, model=translator(), collator=of_tokens, **options)


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
