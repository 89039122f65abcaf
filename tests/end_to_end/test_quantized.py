"""LoRA on a base in 4 or 8 bits of bitsandbytes: it trains, keeps its bytes, is saved and read."""

import pytest
import torch
from peft import LoraConfig, PeftModel, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen2Config

from tests.support import chat
from tests.support.chat import END, PAD, VOCABULARY, arguments_of, chat_tokenizer
from tests.support.printed import flat
from tests.support.refusals import refused
from tests.support.tiers import thorough

pytest.importorskip("trl", reason="the extra trl is not installed")
pytest.importorskip("bitsandbytes", reason="it is not installed")

import bitsandbytes

from doppler_hf import DopplerSFTConfig, DopplerSFTTrainer

IN_4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
IN_8 = dict(load_in_8bit=True, llm_int8_threshold=0.0)
LORA = dict(r=2, target_modules="all-linear")
# Multiples of 64, without which bitsandbytes cannot pack a matrix for a CPU.
SIZES = dict(
    vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=96, pad_token_id=PAD, bos_token_id=None, eos_token_id=END,
)  # fmt: skip


@pytest.fixture(scope="module", params=[LlamaConfig, *thorough(Qwen2Config)], ids=["llama", "qwen2"])
def base(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(request.param(**SIZES)).save_pretrained(folder)
    return folder


def loaded(folder, of_quantization, *, is_kept=True):
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**of_quantization), device_map="cpu", dtype=torch.float32
    )
    if is_kept:
        for module in model.modules():
            module.support_avx512bf16_for_cpu = False
    return model


def trainer_of(folder, model, **options):
    defaults = dict(cls=DopplerSFTConfig, bf16=False, learning_rate=1e-2, use_cpu=True)  # where the base is
    return DopplerSFTTrainer(
        model=model,
        args=arguments_of(folder, **(defaults | options)),
        train_dataset=chat.prompts(),
        eval_dataset=chat.prompts().select(range(4)),
        processing_class=chat_tokenizer(),
        peft_config=LoraConfig(**LORA),
    )


def frozen(model):
    """The base's bytes, with the scales of its blocks, by the names that they have without adapters."""
    state = model.state_dict() if not isinstance(model, PeftModel) else model.get_base_model().state_dict()
    return {name.replace(".base_layer", ""): value.clone() for name, value in state.items() if "lora_" not in name}


def logits(model):
    ids = torch.randint(len(VOCABULARY), (3, 10), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("bits", [4, *thorough(8)])
def test_a_quantized_base_trains_and_keeps_its_bytes(tmp_path, base, bits):
    kind = IN_4 if bits == 4 else IN_8
    model = prepare_model_for_kbit_training(loaded(base, kind))
    before = frozen(model)
    trainer = trainer_of(tmp_path, model, eval_strategy="steps", eval_steps=1)
    untrained = logits(trainer.model)
    trainer.train()
    trainer.save_model()

    after = frozen(trainer.model)
    assert any(value.dtype == (torch.uint8 if bits == 4 else torch.int8) for value in before.values())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.privacy.ledger.private
    assert not torch.equal(logits(trainer.model), untrained)
    again = PeftModel.from_pretrained(loaded(base, kind), tmp_path)
    for name, parameter in again.named_parameters():
        if "lora_" in name:  # TRL computes adapters of such a base in bfloat16; PEFT reads them as float32
            parameter.data = parameter.data.bfloat16()
    assert torch.equal(logits(again), logits(trainer.model))


def test_adapters_are_merged_into_the_whole_base(tmp_path, base, capsys):
    trainer = trainer_of(tmp_path, prepare_model_for_kbit_training(loaded(base, IN_4)))
    trainer.train()
    trainer.save_model()
    assert "The base of the adapter is quantized or sharded. If you merge the adapter" in flat(capsys.readouterr().out)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    expected = logits(adapted)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # Of the base in 4 bits alone is what the rounding of weights changes, which are those of a layer to one in 8 or so.
    rounded = PeftModel.from_pretrained(loaded(base, IN_4), tmp_path)
    assert (logits(rounded) - expected).norm() < 0.5 * expected.norm()


def test_columns_that_one_example_takes_out_of_8_bits_are_refused(tmp_path, base):
    """Such as of LLM.int8() as it is by default: what the rows of others are rounded to changes with it."""
    layer = loaded(base, dict(load_in_8bit=True)).model.layers[0].mlp.up_proj
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    x[1, 0, 3] = 20.0  # of the other example

    def changes(layer):
        with torch.no_grad():
            return not torch.equal(layer.eval()(x.half())[0], layer(x[:1].half())[0])

    assert changes(layer)
    assert not changes(loaded(base, IN_8).model.layers[0].mlp.up_proj)  # the fix
    trainer = trainer_of(tmp_path, prepare_model_for_kbit_training(loaded(base, dict(load_in_8bit=True))))
    with refused("int8-outliers", match=r"llm_int8_threshold=0\.0"):
        trainer.train()


def test_weights_that_an_evaluation_would_rewrite_are_refused(tmp_path, base):
    model = loaded(base, IN_4, is_kept=False)
    for module in model.modules():
        module.support_avx512bf16_for_cpu = isinstance(module, bitsandbytes.nn.Linear4bit)  # as on a newer CPU
    trainer = trainer_of(tmp_path, prepare_model_for_kbit_training(model))
    with refused("weights-rewritten", match="support_avx512bf16_for_cpu"):
        trainer.train()
