"""Tiny models of the kinds that people fine-tune, without dropout, each with a batch that fits it and per-example losses.

model = build("llama-lora", attention="eager", checkpointing=False)
inputs, labels = batch_for(model)
losses = losses_of(model, inputs, labels)           # shape (batch,): an example's loss depends on that example alone
"""

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, DECODER_LENGTH, CLASSES, CHOICES, VOCABULARY = 6, 8, 5, 3, 2, 40
IGNORED = -100  # the label of a token that no loss is taken of


def encoder_options(attention):
    return dict(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
        attn_implementation=attention,
    )  # fmt: skip


def decoder_options(attention):
    return dict(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=20, attention_dropout=0.0, pad_token_id=0, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip


def roberta(attention="sdpa"):
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**encoder_options(attention)))


def bert(attention="sdpa"):
    return hf.BertForSequenceClassification(hf.BertConfig(**encoder_options(attention)))


def bert_choice(attention="sdpa"):
    """The model flattens the choices of all examples into one batch."""
    return hf.BertForMultipleChoice(hf.BertConfig(**encoder_options(attention)))


def distilbert(attention="sdpa"):
    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=20, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=CLASSES, attn_implementation=attention,
    )  # fmt: skip
    return hf.DistilBertForSequenceClassification(config)


def gpt2_config(attention):
    return hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=20, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, num_labels=CLASSES, pad_token_id=0, use_cache=False, attn_implementation=attention,
    )  # fmt: skip


def gpt2(attention="sdpa"):
    return hf.GPT2ForSequenceClassification(gpt2_config(attention))


def gpt2_lm(attention="sdpa"):
    return hf.GPT2LMHeadModel(gpt2_config(attention))  # the head is the embedding table


def llama_lm(attention="sdpa"):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder_options(attention), tie_word_embeddings=False))


def qwen2_lm(attention="sdpa"):
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**decoder_options(attention), tie_word_embeddings=True))


def t5_lm(attention="sdpa"):
    """Encoder, decoder and head share one table; a relative bias, looked up once for the batch, is in both stacks."""
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def vit(attention="sdpa", **overrides):
    options = dict(
        image_size=8, patch_size=4, num_channels=3, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.ViTForImageClassification(hf.ViTConfig(**(options | overrides)))


def resnet(attention="sdpa"):
    """GroupNorm stands where BatchNorm was; there is no attention to choose."""
    config = hf.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=CLASSES
    )
    model = hf.ResNetForImageClassification(config)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
    return model


def bit(attention="sdpa"):
    """A ResNet of BiT, whose convolutions standardize their weights; there is no attention to choose."""
    config = hf.BitConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_groups=2, num_labels=CLASSES
    )
    return hf.BitForImageClassification(config)


def with_adapters(model, *, use_dora=False, targets="all-linear"):
    classifier = ["classifier"] if hasattr(model, "classifier") else None
    config = LoraConfig(r=4, target_modules=targets, modules_to_save=classifier, lora_dropout=0.0, use_dora=use_dora)
    return get_peft_model(model, config)


MODELS = {
    "roberta": roberta,
    "bert": bert,
    "bert-choice": bert_choice,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "gpt2-lm": gpt2_lm,
    "llama-lm": llama_lm,
    "qwen2-lm": qwen2_lm,
    "t5-lm": t5_lm,
    "vit": vit,
    "resnet": resnet,
    "bit": bit,
    "roberta-lora": lambda attention: with_adapters(roberta(attention), targets=["query", "value"]),
    "roberta-dora": lambda attention: with_adapters(roberta(attention), targets=["query", "value"], use_dora=True),
    "vit-lora": lambda attention: with_adapters(vit(attention)),
    "vit-dora": lambda attention: with_adapters(vit(attention), use_dora=True),
    "llama-lora": lambda attention: with_adapters(llama_lm(attention)),
    "llama-dora": lambda attention: with_adapters(llama_lm(attention), use_dora=True),
}


def moved(model):
    """Leave the initial values, at which gradients of whole layers are zero (LoRA's A) or too small to be compared."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def build(name, dtype=torch.float64, *, attention="sdpa", checkpointing="off"):
    """Return a model in training mode; `checkpointing` is "off", "non-reentrant" or "reentrant"."""
    torch.manual_seed(0)
    model = moved(MODELS[name](attention).to(dtype).train())
    if checkpointing != "off":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    if checkpointing == "reentrant" and name.endswith(("lora", "dora")):
        # Re-entrant checkpointing trains a block only if its input asks for a gradient; the embeddings are frozen.
        model.enable_input_require_grads()
    return model


def token_ids(batch, length, lengths, generator):
    """Random tokens with a repetition in each row, padded with 0 on the right, and their mask."""
    ids = torch.randint(2, VOCABULARY, (batch, length), generator=generator)
    ids[:, 2] = ids[:, 1]
    mask = (torch.arange(length) < torch.tensor(lengths)[torch.arange(batch) % len(lengths), None]).long()
    return ids * mask, mask


def batch_for(model, dtype=torch.float64, *, batch=BATCH):
    """Return the model's inputs and labels: a class for each example, or tokens where the model predicts those."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
        return {"pixel_values": pixels}, torch.arange(batch) % CLASSES
    if isinstance(model, hf.BertForMultipleChoice):
        ids, mask = token_ids(batch * CHOICES, LENGTH, (LENGTH, 5, 6, LENGTH, 3, 7, 4), generator)
        inputs = {"input_ids": ids.unflatten(0, (-1, CHOICES)), "attention_mask": mask.unflatten(0, (-1, CHOICES))}
        return inputs, torch.arange(batch) % CHOICES
    ids, mask = token_ids(batch, LENGTH, (LENGTH, 5, 6, LENGTH, 3, 7), generator)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        labels, seen = token_ids(batch, DECODER_LENGTH, (4, DECODER_LENGTH, 3), generator)
        inputs["decoder_input_ids"] = F.pad(labels, (1, -1))  # the start token, which is also the padding, comes first
        return inputs, labels.masked_fill(seen == 0, IGNORED)
    if model.get_output_embeddings() is not None:
        return inputs, ids.masked_fill(mask == 0, IGNORED)
    return inputs, torch.arange(batch) % CLASSES


def rows(inputs, labels, index):
    return {name: value[index] for name, value in inputs.items()}, labels[index]


def losses_of(model, inputs, labels):
    """Return one loss per example: its cross-entropy, or the mean of its own tokens' cross-entropies."""
    logits = model(**inputs).logits
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    logits = logits[:, -labels.shape[1] :]  # what comes before is a prompt that is trained
    if not model.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    of_tokens = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return of_tokens.sum(dim=1) / (labels != IGNORED).sum(dim=1)
