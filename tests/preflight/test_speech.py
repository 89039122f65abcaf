"""Speech models: what each refusal says is tried as it is written there, and the encoder then trains."""

import re

import pytest
import torch
import transformers as hf
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import default_data_collator

from tests.support.refusals import refused
from tests.support.tiny import tiny_bert
from tests.support.trainers import checked_trainer_of, trained

SIZES = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
OPTIONS = dict(conv_dim=[8], conv_kernel=[4], conv_stride=[2], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
               num_feat_extract_layers=1, feat_extract_norm="layer", classifier_proj_size=8)  # fmt: skip


def recordings(number=24, length=40):
    torch.manual_seed(0)
    sounds = torch.randn(number, length).tolist()
    mask = [[1] * (length - row % 3) + [0] * (row % 3) for row in range(number)]
    return Dataset.from_dict({"input_values": sounds, "attention_mask": mask, "labels": [row % 2 for row in range(number)]})


def wav2vec2(model=hf.Wav2Vec2ForSequenceClassification, config=hf.Wav2Vec2Config, **options):
    torch.manual_seed(0)
    made = model(config(**SIZES, **OPTIONS, **options))
    made.base_model.encoder.pos_conv_embed.requires_grad_(False)
    return made


def without_masks(**options):
    """Switch the masks off after loading; the vector that fills them stays."""
    model = wav2vec2(layerdrop=0.0, **options)
    model.config.mask_time_prob = 0.0
    return model


def of_speech(tmp_path, model, **options):
    own = dict(data=recordings(), evaluated=recordings(8), collator=default_data_collator, remove_unused_columns=False)
    return checked_trainer_of(tmp_path, model=model, **(own | dict(max_steps=2) | options))


def line_of(message, start):
    """The code behind these words of a message."""
    return re.search(rf"{start}: (.*?\))(?=[.;] |\.$)", message)[1]


def moved(trainer):
    """Return the names of the weights that a training changes."""
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trained(trainer)
    return {name for name, each in trainer.model.named_parameters() if not torch.equal(each.cpu(), before[name].cpu())}


def test_without_masks_as_the_refusal_says_the_whole_encoder_trains(tmp_path):
    model = wav2vec2(layerdrop=0.1, mask_time_prob=0.05)
    with refused("shared-random-numbers", match="masked_spec_embed") as raised:
        of_speech(tmp_path, model).train()
    exec(re.search(r"configs: (.*\])\. Then", str(raised.value))[1])  # as the user would
    exec(line_of(str(raised.value), "no longer used"))
    assert "wav2vec2.encoder.layers.0.attention.q_proj.weight" in moved(of_speech(tmp_path, model))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_vector_of_masks_is_not_named_again(tmp_path, is_frozen):
    model = wav2vec2(mask_time_prob=0.05)
    model.wav2vec2.masked_spec_embed.requires_grad_(not is_frozen)
    with refused("shared-random-numbers") as raised:
        of_speech(tmp_path, model).train()
    assert ("masked_spec_embed" in str(raised.value)) != is_frozen


OF_THE_MODULE = {
    "of the encoder": (without_masks, "wav2vec2.masked_spec_embed", {}),
    "of the encoder, with checkpointing": (without_masks, "wav2vec2.masked_spec_embed", dict(gradient_checkpointing=True)),
    "of the whole model": (
        lambda: wav2vec2(mask_time_prob=0.0, layerdrop=0.0, use_weighted_layer_sum=True),
        "layer_weights",
        {},
    ),
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", OF_THE_MODULE)
def test_a_weight_of_a_module_with_layers_is_named_alone_and_the_layers_train_without_it(tmp_path, name):
    make, weight, options = OF_THE_MODULE[name]
    model = make()
    with refused("layer-without-rule", match=f"gradients of '{weight}', which") as raised:
        of_speech(tmp_path, model, **options).train()
    assert "gradient_checkpointing" not in str(raised.value)  # without it the same would follow
    exec(line_of(str(raised.value), "alone"))
    found = moved(of_speech(tmp_path, model, **options))
    assert "wav2vec2.encoder.layers.0.attention.q_proj.weight" in found
    assert weight not in found


class Turned(hf.BertForSequenceClassification):
    """Has a matrix and a table of its own, beside its layers."""

    def __init__(self, config):
        super().__init__(config)
        self.turn, self.shift = nn.Parameter(torch.eye(16)), nn.Parameter(torch.zeros(16, 16))

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.bert(input_ids).last_hidden_state[:, 0]  # vmap does not take a mask here
        logits = self.classifier(hidden @ (self.turn + self.shift))
        return hf.modeling_outputs.SequenceClassifierOutput(
            loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits
        )


def turned():
    torch.manual_seed(0)
    model = Turned(tiny_bert().config)
    model.bert.pooler.requires_grad_(False)
    return model


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_weights_beside_checkpointed_layers_train_without_checkpointing_or_are_frozen(tmp_path):
    rows = [{"input_ids": [5 + row, 6, 7], "attention_mask": [1, 1, 1], "labels": row % 2} for row in range(24)]
    model, steps = turned(), dict(max_steps=2, data=Dataset.from_list(rows))
    with refused("layer-without-rule", match="gradient_checkpointing=False") as raised:
        checked_trainer_of(tmp_path, model=model, gradient_checkpointing=True, **steps).train()
    exec(line_of(str(raised.value), "alone"))
    found = moved(checked_trainer_of(tmp_path, model=model, gradient_checkpointing=True, **steps))
    assert "bert.encoder.layer.0.attention.self.query.weight" in found
    assert "turn" not in found
    found = moved(checked_trainer_of(tmp_path, model=turned(), gradient_checkpointing=False, **steps))
    assert {"turn", "shift"} <= found


def wavlm(target_modules):
    base = wav2vec2(hf.WavLMForSequenceClassification, hf.WavLMConfig, mask_time_prob=0.0, layerdrop=0.0)
    saved = ["projector", "classifier"]
    return get_peft_model(base, LoraConfig(r=2, target_modules=target_modules, modules_to_save=saved))


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask is deprecated:UserWarning")
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "intermediate_dense"]])
def test_adapters_of_layers_that_the_model_does_not_call_are_refused_and_each_layer_that_is_named_trains(tmp_path, targets):
    """WavLM's attention passes the weights of its projections to a function."""
    with refused("adapters-not-called", match="q_proj") as raised:
        of_speech(tmp_path, wavlm(targets)).train()
    named = re.findall("'(.*?)'", re.search(r"such as (.*)\.$", str(raised.value))[1])
    assert {"intermediate_dense", "output_dense"} <= {*named}
    assert not {"q_proj", "v_proj"} & {*named}
    found = moved(of_speech(tmp_path, wavlm(named)))
    assert all(any(f".{each}.lora_B" in name for name in found) for each in named)
