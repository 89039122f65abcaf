"""Without privacy the gradient of a batch in four micro-batches is that of the batch at once, for every kind of model."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from doppler_hf import DopplerTrainer, DopplerTrainingArguments

_SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SURE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2: dict[str, Any] = {
    "vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
_IMAGES: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_labels": 2}
_MODELS = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**_SIZES, **_SURE)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**_SIZES, **_SURE, max_position_embeddings=20)),
    "vit": lambda: ViTForImageClassification(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                                       intermediate_size=24, **_SURE, **_IMAGES)),
    "gpt2 classifier": lambda: GPT2ForSequenceClassification(GPT2Config(**_GPT2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "llama classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**_SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**_T5)),
}  # fmt: skip


class _OwnLosses(DopplerTrainer):
    def compute_per_sample_loss(self, model: Any, inputs: Any) -> Any:
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


class _OwnMean(DopplerTrainer):
    """Written as if there were no pieces, as many are."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def _rows(model: Any) -> Dataset:
    chance = torch.Generator().manual_seed(0)
    labels = [place % 2 for place in range(8)]
    if isinstance(model, ViTForImageClassification):
        return Dataset.from_dict({"pixel_values": torch.randn(8, 3, 8, 8, generator=chance).tolist(), "labels": labels})
    tokens = torch.randint(3, 30, (8, 6), generator=chance).tolist()
    is_of_tokens = isinstance(model, GPT2LMHeadModel | LlamaForCausalLM | T5ForConditionalGeneration)
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens if is_of_tokens else labels})


def _change(name: str, folder: Any, *, pieces: int, cls: type = DopplerTrainer) -> tuple[torch.Tensor, float]:
    """Return the gradient of one step of SGD, and the loss that was logged."""
    torch.manual_seed(0)
    model = _MODELS[name]()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    args = DopplerTrainingArguments(
        output_dir=str(folder), disable_dp=True, per_device_train_batch_size=8 // pieces, gradient_accumulation_steps=pieces,
        max_steps=1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, report_to="none",
        use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = cls(model=model, args=args, train_dataset=_rows(model))
    trainer.train()
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return before - after, next(log["loss"] for log in trainer.state.log_history if "loss" in log)


@pytest.mark.parametrize(
    ("name", "cls"),
    [*((name, DopplerTrainer) for name in _MODELS), ("bert", _OwnLosses), ("llama classifier", _OwnMean)],
)
def test_the_gradient_in_four_micro_batches_is_that_of_one(name: str, cls: type, tmp_path: Any) -> None:
    whole, loss = _change(name, tmp_path, pieces=1, cls=cls)
    cut, loss_of_cut = _change(name, tmp_path, pieces=4, cls=cls)
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max()) + 1e-7)
    assert loss_of_cut == pytest.approx(loss, rel=1e-3)


def test_a_model_whose_first_micro_batch_has_no_label_is_found_out_later(tmp_path: Any) -> None:
    """Its loss there is NaN, or 0 for some classes, which says nothing about a division."""
    torch.manual_seed(0)
    model = _MODELS["llama"]()
    args = DopplerTrainingArguments(
        output_dir=str(tmp_path), disable_dp=True, gradient_accumulation_steps=2, per_device_train_batch_size=2, max_steps=1,
        report_to="none", use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trainer = DopplerTrainer(model=model, args=args, train_dataset=_rows(model))
    trainer.current_gradient_accumulation_steps = 2
    tokens = torch.randint(3, 30, (2, 6))
    items = torch.tensor(10)
    trainer.note_who_divides(model, {"input_ids": tokens, "labels": torch.full_like(tokens, -100)}, items)
    assert not trainer._is_division_known
    trainer.note_who_divides(model, {"input_ids": tokens, "labels": tokens}, items)
    assert trainer._is_division_known
    assert trainer.model_accepts_loss_kwargs  # Llama divides by itself
