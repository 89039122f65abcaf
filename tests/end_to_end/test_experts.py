"""Adapters of attention and of fused experts, and all weights of a mixture, through a trainer, saved and read again."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from doppler_hf.run.digests import parameters_digest
from tests.support import chat
from tests.support.chat import END, PAD, VOCABULARY, arguments_of, chat_tokenizer
from tests.support.tiers import further, thorough

pytest.importorskip("trl", reason="the extra trl is not installed")

from doppler_hf import DopplerSFTConfig, DopplerSFTTrainer

SIZES = dict(
    vocab_size=len(VOCABULARY), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=96, pad_token_id=PAD, bos_token_id=None, eos_token_id=END,
)  # fmt: skip
EXPERTS = [["experts.gate_up_proj", "experts.down_proj"], ["experts.gate_up_proj"], None]  # none: all weights


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def qwen3_moe():
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8)
    return Qwen3MoeForCausalLM(config)


def made(build):
    torch.manual_seed(0)
    return build()


@pytest.mark.parametrize("build", [mixtral, *thorough(qwen3_moe)])
@pytest.mark.parametrize("experts", further(EXPERTS, quick=EXPERTS[1:2]))
def test_a_mixture_trains_and_is_read_again(tmp_path, build, experts):
    trainer = DopplerSFTTrainer(
        model=made(build),
        args=arguments_of(tmp_path, cls=DopplerSFTConfig, bf16=False, learning_rate=1e-2, router_aux_loss_coef=0.0),
        train_dataset=chat.prompts(),
        processing_class=chat_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=experts) if experts else None,
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    trainer.save_model()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert any("experts" in name for name in changed)
    saved = PeftModel.from_pretrained(made(build), tmp_path) if experts else AutoModelForCausalLM.from_pretrained(tmp_path)
    assert parameters_digest(saved) == parameters_digest(trainer.model)  # by which the ledger knows it
    ids = torch.randint(len(VOCABULARY), (3, 10), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, again = (model.eval()(input_ids=ids).logits for model in (trainer.model, saved))
    assert torch.equal(again, ours)


@pytest.mark.parametrize("experts", EXPERTS[:2], ids=["nested", "one"])
def test_adapters_of_experts_are_recognised_when_they_are_merged(tmp_path, monkeypatch, experts):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def trained(name, model, **config):
        trainer = DopplerSFTTrainer(
            model=model,
            args=arguments_of(
                tmp_path / name, cls=DopplerSFTConfig, bf16=False, learning_rate=1e-2, router_aux_loss_coef=0.0
            ),
            train_dataset=chat.prompts(),
            processing_class=chat_tokenizer(),
            peft_config=LoraConfig(r=2, **config),
        )
        trainer.train()
        trainer.save_model()
        return trainer.privacy.ledger

    first = trained("first/out", made(mixtral), target_modules=[], target_parameters=experts)
    for precision in (torch.float32, torch.bfloat16):
        merged = PeftModel.from_pretrained(made(mixtral), tmp_path / "first/out").merge_and_unload()
        second = trained(f"{precision}/out", merged.to(precision).float(), target_modules=["q_proj"])
        assert first.name in second.earlier_trainings
