"""For trainers of TRL's: tiny models, a tokenizer of letters with a chat template, rows of each format, short trainings."""

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from doppler_hf import DopplerTrainingArguments
from tests.support.folders import WORDS
from tests.support.trainers import ON_CPU, weights

LORA = LoraConfig(r=2, target_modules="all-linear")
SPECIAL = ["[PAD]", "<|end|>", "<|user|>", "<|assistant|>"]
STEP_LOGS = {"loss", "grad_norm", "learning_rate", "epoch", "epsilon", "epsilon_planned", "step"}
VOCABULARY = [*map(chr, range(32, 127)), *SPECIAL]
PAD, END = len(VOCABULARY) - 4, len(VOCABULARY) - 3
TEMPLATE = """
{%- for message in messages %}{{ '<|' + message['role'] + '|>' }}
    {%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}
    {%- else %}{{ message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def chat_tokenizer(*merges):
    """Of letters, and of pairs of them that are merged."""
    tokens = [*VOCABULARY, *map("".join, merges)]
    letters = Tokenizer(BPE(vocab={token: row for row, token in enumerate(tokens)}, merges=list(merges)))
    letters.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="[PAD]", eos_token="<|end|>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96, pad_token_id=PAD, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_mixtral():
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return MixtralForCausalLM(MixtralConfig(vocab_size=len(VOCABULARY), num_local_experts=2, **sizes))


def arguments_of(folder, *, cls, **options):
    defaults = dict(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=ON_CPU,
    )  # fmt: skip
    if issubclass(cls, DopplerTrainingArguments) and not {"target_epsilon", "disable_dp"} & options.keys():
        defaults["noise_multiplier"] = 1.0
    return cls(**(defaults | options))


def whole_resumed_and_saved(new_trainer, folder):
    """A trainer that has trained in one go, one that was resumed and has saved its model, and that model, loaded."""
    options = dict(
        noise_seed=1, max_steps=3, save_strategy="steps", save_steps=2, bf16=False, grad_sample_self_check=False,
        learning_rate=1e-2,
    )  # fmt: skip
    whole, resumed = (new_trainer(**options) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed.save_model()
    has_adapters = (folder / "adapter_config.json").exists()
    saved = PeftModel.from_pretrained(tiny_llama(), folder) if has_adapters else AutoModelForCausalLM.from_pretrained(folder)
    return whole, resumed, saved


def assert_trains_privately(trainer, *, evaluated):
    """Train as TRL does by default, and assert that the logs of a step tell nothing of the examples drawn but the loss."""
    assert (trainer.args.bf16, trainer.args.gradient_checkpointing) == (True, True)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), before)
    steps = [logs for logs in trainer.state.log_history if "grad_norm" in logs]
    assert [logs.keys() for logs in steps] == [STEP_LOGS] * 2
    evaluations = [logs for logs in trainer.state.log_history if "eval_loss" in logs]
    assert [evaluated | {"epsilon"} <= logs.keys() for logs in evaluations] == [True, True]
    assert not any("eval_num_tokens" in logs for logs in evaluations)
    assert trainer.privacy.ledger.statement.num_units == 24
    assert trainer.privacy.ledger.private


def exchanges(rows=24):
    """A question and an answer a row, of unequal lengths."""
    generator = np.random.default_rng(0)
    return [tuple(" ".join(generator.choice(WORDS, generator.integers(1, 6))) for _ in range(2)) for _ in range(rows)]


def by(role, text):
    return [{"role": role, "content": text}]


def texts():
    return Dataset.from_list([{"text": f"{question} {answer}"} for question, answer in exchanges()])


def prompts():
    return Dataset.from_list([{"prompt": question, "completion": f" {answer}"} for question, answer in exchanges()])


def questions():
    return Dataset.from_list([{"question": question, "answer": answer} for question, answer in exchanges()])


def conversations(rows=24):
    return Dataset.from_list([{"messages": by("user", q) + by("assistant", a)} for q, a in exchanges(rows)])


def conversational_prompts():
    return Dataset.from_list([{"prompt": by("user", q), "completion": by("assistant", a)} for q, a in exchanges()])


def pairs(rows=24, *, good="good", bad="bad"):
    """A question with an answer of good words and one of bad ones, of unequal lengths."""
    generator = np.random.default_rng(1)
    answers = [[" ".join([word] * generator.integers(1, 6)) for word in (good, bad)] for _ in range(rows)]
    return [(question, *of_both) for (question, _), of_both in zip(exchanges(rows), answers, strict=True)]


def preferences(rows=24):
    return Dataset.from_list([{"prompt": q, "chosen": f" {a}", "rejected": f" {b}"} for q, a, b in pairs(rows)])


def implicit_preferences():
    return Dataset.from_list([{"chosen": f"{q} {a}", "rejected": f"{q} {b}"} for q, a, b in pairs()])


def conversational_preferences():
    return Dataset.from_list(
        [{"prompt": by("user", q), "chosen": by("assistant", a), "rejected": by("assistant", b)} for q, a, b in pairs()]
    )
