"""Other architectures in the book-keeping engine: their per-sample gradients are right, or they are refused by name.

They do what `tests/support/models.py` does not: relative positions looked up once for the batch, tokens before examples,
experts, windows, layer scales, weights used outside of their module. No model may come out silently wrong, and least of all
when the batch is as large as another dimension.
"""

import fnmatch
import re

import peft
import pytest
import torch
import transformers as hf

from tests.support.models import (
    DECODER_LENGTH,
    LENGTH,
    VOCABULARY,
    batch_for,
    encoder_options,
    gpt2_lm,
    losses_of,
    moved,
    qwen2_lm,
    resnet,
    roberta,
    rows,
    t5_lm,
)
from tests.support.per_example import assert_equals_loop, assert_matches, assert_refused, gradients_of_each
from tests.support.tiers import further

# Whole models, which pass the same arrays again and again; test_clipped_gradients.py and test_layers.py check shapes.
pytestmark = pytest.mark.usefixtures("unchecked_arrays")

TEXT = encoder_options("sdpa") | dict(pad_token_id=0)
EAGER = dict(attn_implementation="eager")  # all that the older models have
IMAGE = dict(
    image_size=8, patch_size=4, num_channels=3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, drop_path_rate=0.0,
)  # fmt: skip
DECODER = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=20, attention_dropout=0.0, hidden_dropout=0.0, pad_token_id=0, use_cache=False,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=16, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
)  # fmt: skip
BART = dict(
    vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=20, dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=0, use_cache=False,
)  # fmt: skip
SWIN = dict(
    image_size=8, num_channels=3, embed_dim=8, depths=[2], num_heads=[2], window_size=4, drop_path_rate=0.0,
    hidden_dropout_prob=0.0, num_labels=3,
)  # fmt: skip
CONVNEXT = dict(
    num_channels=3, patch_size=2, hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, drop_path_rate=0.0, num_labels=3,
)  # fmt: skip
OPT = dict(ffn_dim=24, dropout=0.0, word_embed_proj_dim=8)
DEBERTA = dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4, norm_rel_ebd="layer_norm",
               pooler_dropout=0.0, pooler_hidden_size=16, type_vocab_size=0)  # fmt: skip
FUNNEL = dict(vocab_size=VOCABULARY, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=24, hidden_dropout=0.0,
              attention_dropout=0.0, activation_dropout=0.0, num_labels=3)  # fmt: skip
XLNET = dict(vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=24, dropout=0.0, summary_last_dropout=0.0,
             num_labels=3)  # fmt: skip

# What people would expect to work: these must be right.
RIGHT = {
    "mt5": (hf.MT5ForConditionalGeneration, hf.MT5Config, T5),
    "electra": (hf.ElectraForSequenceClassification, hf.ElectraConfig, TEXT | dict(embedding_size=8)),
    "modernbert": (hf.ModernBertForSequenceClassification, hf.ModernBertConfig, TEXT),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, DECODER | dict(head_dim=8, num_key_value_heads=1)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, DECODER | dict(head_dim=8, num_key_value_heads=1)),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, DECODER),
    "gpt-neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, DECODER),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, DECODER | dict(n_layer=1, n_head=2)),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, DECODER | OPT),
    "opt with norms behind": (hf.OPTForCausalLM, hf.OPTConfig, DECODER | OPT | dict(do_layer_norm_before=False)),
    "mpnet": (hf.MPNetForSequenceClassification, hf.MPNetConfig, TEXT | EAGER | dict(pad_token_id=1)),
    "deit": (hf.DeiTForImageClassification, hf.DeiTConfig, IMAGE),
    "dinov2": (hf.Dinov2ForImageClassification, hf.Dinov2Config, IMAGE | dict(layerscale_value=0.5)),
    "convnext": (hf.ConvNextForImageClassification, hf.ConvNextConfig, CONVNEXT | dict(layer_scale_init_value=0.5)),
    "convnextv2": (hf.ConvNextV2ForImageClassification, hf.ConvNextV2Config, CONVNEXT),
    "swin": (hf.SwinForImageClassification, hf.SwinConfig, SWIN | dict(patch_size=1)),
    "swin with eager attention": (hf.SwinForImageClassification, hf.SwinConfig, SWIN | EAGER | dict(patch_size=1)),
    "swin of one window": (hf.SwinForImageClassification, hf.SwinConfig, SWIN | dict(patch_size=2)),
}
RIGHT_OR_REFUSED = {
    "deberta-v2": (hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config, TEXT | EAGER | DEBERTA),
    "xlnet": (hf.XLNetForSequenceClassification, hf.XLNetConfig, XLNET),
    "funnel": (hf.FunnelForSequenceClassification, hf.FunnelConfig, FUNNEL),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig, BART),
    "blenderbot": (hf.BlenderbotForConditionalGeneration, hf.BlenderbotConfig, BART),
    "beit": (hf.BeitForImageClassification, hf.BeitConfig, IMAGE | dict(use_relative_position_bias=True)),
    "swinv2": (hf.Swinv2ForImageClassification, hf.Swinv2Config, SWIN | EAGER | dict(patch_size=1)),
    "donut": (hf.DonutSwinForImageClassification, hf.DonutSwinConfig, SWIN | EAGER | dict(patch_size=1)),
}
NO_BARE_PARAMETERS = {  # What these are refused for is frozen here, which must not let anything else through.
    "xlnet": ("layer.0.rel_attn", "mask_emb"),
    "funnel": ("r_w_bias", "r_r_bias", "r_kernel", "r_s_bias", "seg_embed"),
    "bart": ("embed_positions",),
    "swinv2": ("continuous_position_bias_mlp", "logit_scale"),
    "donut": ("relative_position_bias_table",),
}


def opt_lm():
    return hf.OPTForCausalLM(hf.OPTConfig(**DECODER | OPT))


QUERIES = dict(target_modules=["query", "value"])
OF_TOKENS = dict(target_modules=["q_proj", "fc1", "fc2"])
TOKENS = dict(target_modules=["query", "word_embeddings"])
PROMPT = dict(task_type="CAUSAL_LM", num_virtual_tokens=4)
ADAPTERS_RIGHT = {
    "lora with bias": (roberta, peft.LoraConfig(r=4, lora_bias=True, bias="all", **QUERIES)),
    "rank-stabilized dora": (roberta, peft.LoraConfig(r=4, use_rslora=True, use_dora=True, **QUERIES)),
    "lora of convolutions": (resnet, peft.LoraConfig(r=4, target_modules=["convolution"])),
    "dora of convolutions": (resnet, peft.LoraConfig(r=4, target_modules=["convolution"], use_dora=True)),
    "dora with dropout": (roberta, peft.LoraConfig(r=4, use_dora=True, lora_dropout=1e-13, **QUERIES)),
    "dora of Conv1D": (gpt2_lm, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
    "lora of Conv1D": (gpt2_lm, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)),
    "norms": (roberta, peft.LNTuningConfig(target_modules=["LayerNorm"])),
    "prefix": (gpt2_lm, peft.PrefixTuningConfig(**PROMPT)),
    "prompt": (gpt2_lm, peft.PromptTuningConfig(**PROMPT)),
    "prompt of an encoder": (roberta, peft.PromptTuningConfig(**PROMPT | dict(task_type="SEQ_CLS"))),
    "prompt of an encoder-decoder": (t5_lm, peft.PromptTuningConfig(**PROMPT | dict(task_type="SEQ_2_SEQ_LM"))),
    "p-tuning": (gpt2_lm, peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8)),
    "p-tuning by recurrence": (
        gpt2_lm,
        peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8, encoder_reparameterization_type="LSTM"),
    ),
    "lora of opt": (opt_lm, peft.LoraConfig(r=4, **OF_TOKENS)),
    "dora of opt": (opt_lm, peft.LoraConfig(r=4, use_dora=True, **OF_TOKENS)),
    "ia3 of opt": (opt_lm, peft.IA3Config(feedforward_modules=["fc2"], **OF_TOKENS)),
    "ia3": (roberta, peft.IA3Config(feedforward_modules=["value"], **QUERIES)),
    "vera": (roberta, peft.VeraConfig(r=4, **QUERIES)),
    "adalora": (roberta, peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, **QUERIES)),
    "fourier": (roberta, peft.FourierFTConfig(n_frequency=10, **QUERIES)),
    "hra": (roberta, peft.HRAConfig(r=4, **QUERIES)),
    "delora": (roberta, peft.DeloraConfig(r=4, **QUERIES)),
    "waveft": (roberta, peft.WaveFTConfig(n_frequency=10, **QUERIES)),
    "lora of embeddings": (roberta, peft.LoraConfig(r=4, **TOKENS)),
}
ADAPTERS_RIGHT_OR_REFUSED = {
    "dora of embeddings": (roberta, peft.LoraConfig(r=4, use_dora=True, **TOKENS)),
    "new tokens": (qwen2_lm, peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 4])),
    "oft": (roberta, peft.OFTConfig(r=4, oft_block_size=0, **QUERIES)),
    "randlora": (roberta, peft.RandLoraConfig(r=4, **QUERIES)),
    "c3a": (roberta, peft.C3AConfig(block_size=4, **QUERIES)),
    "loha": (roberta, peft.LoHaConfig(r=4, **QUERIES)),
    "vblora": (roberta, peft.VBLoRAConfig(num_vectors=4, vector_length=4, topk=2, **QUERIES)),
}
BATCHES = [6, LENGTH, DECODER_LENGTH]


def of(kind, config, options):
    torch.manual_seed(0)
    return moved(kind(config(**options)).double().train())


def adapted(base, config):
    torch.manual_seed(0)
    return moved(peft.get_peft_model(base(), config).double().train())


def on_batch(model, batch):
    inputs, labels = batch_for(model, batch=batch)
    return lambda index: losses_of(model, *rows(inputs, labels, index))


def assert_right_or_refused_by_name(model, batch):
    losses = on_batch(model, batch)
    gradients = gradients_of_each(model, losses, batch)
    names = [name for name, _ in [*model.named_parameters(), *model.named_modules()] if name]
    refusal = None
    try:
        assert_matches(model, losses, gradients)
    except ValueError as error:
        refusal = str(error)
    # Of several that differ in the numbers of their layers, a pattern is named.
    assert refusal is None or any(fnmatch.filter(names, quoted) for quoted in re.findall(r"'([^']+)'", refusal)), refusal


@pytest.mark.parametrize("batch", further(BATCHES, quick=[LENGTH]))
@pytest.mark.parametrize("name", RIGHT)
def test_an_architecture_is_right(name, batch):
    model = of(*RIGHT[name])
    # Gemma's norms compute in float32, in which autograd adds up the terms of their gradients.
    tolerance = dict(rtol=1e-5, atol=1e-6) if name == "gemma3" else {}
    assert_equals_loop(model, on_batch(model, batch), batch, tolerance=tolerance)


def test_a_checkpointed_layer_with_parameters_of_its_own_is_right():
    """BEiT's layers scale what they add; computed again, they must find the copies of these scales."""
    model = of(hf.BeitForImageClassification, hf.BeitConfig, IMAGE | dict(layer_scale_init_value=0.5))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert any(module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing"))
    assert_equals_loop(model, on_batch(model, 6), 6)


@pytest.mark.parametrize("batch", further(BATCHES, quick=[LENGTH]))
@pytest.mark.parametrize("name", RIGHT_OR_REFUSED)
def test_an_architecture_is_right_or_refused(name, batch):
    assert_right_or_refused_by_name(of(*RIGHT_OR_REFUSED[name]), batch)


@pytest.mark.parametrize("batch", further(BATCHES, quick=[LENGTH]))
@pytest.mark.parametrize("name", NO_BARE_PARAMETERS)
def test_what_is_left_of_a_refused_one_is_right_or_refused(name, batch):
    model = of(*RIGHT_OR_REFUSED[name])
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in parameter_name for part in NO_BARE_PARAMETERS[name]))
    assert_right_or_refused_by_name(model, batch)


# PEFT says this of every layer that is not a matrix.
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("batch", further(BATCHES, quick=[LENGTH]))
@pytest.mark.parametrize("name", ADAPTERS_RIGHT)
def test_an_adapter_is_right(name, batch):
    model = adapted(*ADAPTERS_RIGHT[name])
    assert_equals_loop(model, on_batch(model, batch), batch)


@pytest.mark.parametrize("batch", further(BATCHES, quick=[LENGTH]))
@pytest.mark.parametrize("name", ADAPTERS_RIGHT_OR_REFUSED)
def test_an_adapter_is_right_or_refused(name, batch):
    assert_right_or_refused_by_name(adapted(*ADAPTERS_RIGHT_OR_REFUSED[name]), batch)


@pytest.mark.parametrize(("name", "code"), [("loha", "layer-without-rule"), ("vblora", "shared-parameters")])
def test_one_that_is_refused_is_not_only_told_to_freeze_what_it_trains(name, code):
    model = adapted(*ADAPTERS_RIGHT_OR_REFUSED[name])
    assert_refused(code, model, on_batch(model, 6), 6, match="LoRA")
