"""`doppler-hf verify MERGED --base BASE --adapter FOLDER` computes the merge again."""

import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from doppler_hf.cli import main
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.run.merged_model import _is_equal as is_equal
from tests.support.ledgers import said
from tests.support.tiers import thorough
from tests.support.tiny import tiny_bert
from tests.support.trainers import trainer_of

# The reader of a folder that PEFT looks for on the hub.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, and a private run's adapter for it, with a trained head."""
    root = tmp_path_factory.mktemp("merged")
    tiny_bert().save_pretrained(root / "base")
    base = BertForSequenceClassification.from_pretrained(root / "base")
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    trainer = trainer_of(root, model=model, learning_rate=0.1)
    trainer.train()
    trainer.save_model()
    return root


def merged(folders, *, base="base", dtype=torch.float32, saved=None, change=None):
    """Merge as a user does, and return the folder."""
    model = BertForSequenceClassification.from_pretrained(folders / base, dtype=dtype)
    model = PeftModel.from_pretrained(model, folders / "out").merge_and_unload()
    if saved is not None:
        model = model.to(saved)
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folders / "merged")
    return folders / "merged"


def verify(folders, *, base="base"):
    return main(["verify", str(folders / "merged"), "--base", str(folders / base), "--adapter", str(folders / "out")])


@pytest.mark.parametrize(
    ("dtype", "saved"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        *thorough((torch.float32, torch.bfloat16), (torch.float32, torch.float16)),
    ],
)
def test_a_merged_model_is_its_base_with_the_adapter(folders, capsys, dtype, saved):
    merged(folders, dtype=dtype, saved=saved)
    assert verify(folders) == 0
    output = said(capsys)
    assert output.startswith("VERIFIED: (")
    assert "merged is " in output
    assert "with this adapter merged into it, up to rounding." in output


def larger(name, by):
    return lambda model: model.get_parameter(name).mul_(1 + by)


@pytest.mark.parametrize(
    ("dtype", "change", "named"),
    [
        (torch.float32, larger("bert.encoder.layer.0.attention.self.query.weight", 1e-3), "query.weight"),
        (torch.float32, larger("bert.embeddings.word_embeddings.weight", 1e-4), "word_embeddings.weight"),
        (torch.bfloat16, larger("bert.encoder.layer.0.attention.self.value.weight", 0.2), "value.weight"),
        (torch.bfloat16, larger("bert.embeddings.LayerNorm.weight", 0.03), "LayerNorm.weight"),
        *thorough(
            (torch.float32, larger("classifier.weight", 1e-3), "classifier.weight"),
            (torch.bfloat16, larger("bert.embeddings.word_embeddings.weight", 0.05), "word_embeddings.weight"),
        ),
    ],
)
def test_a_model_that_was_changed_after_the_merge_is_not_verified(folders, capsys, dtype, change, named):
    merged(folders, dtype=dtype, change=change)
    assert verify(folders) == 1
    output = said(capsys)
    assert output.startswith("NOT VERIFIED")
    assert f"{named}. Merge again from the saved adapter" in output


def test_a_base_without_its_adapter_is_noticed_though_the_merge_changes_less_than_rounding():
    torch.manual_seed(0)
    base = (0.04 * torch.randn(768, 768)).bfloat16()
    expected = (base.float() + 1e-4 * torch.randn(768, 768)).bfloat16()
    assert 0 < float((expected.float() - base.float()).norm() / base.float().norm()) < 4e-3
    assert is_equal(expected, expected, base)
    for other in (base, 1.05 * expected, (base.float() + 2 * (expected.float() - base.float())).bfloat16()):
        assert not is_equal(other, expected, base)
    in_float32 = base.float() + 1e-4 * torch.randn(768, 768)
    assert is_equal(in_float32.bfloat16(), (base + (in_float32 - base.float()).bfloat16()), base)


def test_another_base_or_no_merge_is_not_verified(folders, capsys):
    torch.manual_seed(5)
    BertForSequenceClassification(tiny_bert().config).save_pretrained(folders / "other")
    merged(folders, base="other")
    assert verify(folders) == 1
    assert verify(folders, base="other") == 0
    merged(folders, change=lambda model: model.load_state_dict(tiny_bert().state_dict()))
    assert verify(folders) == 1


def test_a_causal_model_with_a_larger_vocabulary(tmp_path, capsys):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    trainer = trainer_of(tmp_path, model=get_peft_model(model, config), collator=blocks)
    trainer.train()
    trainer.save_model()
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert verify(tmp_path) == 0
    assert said(capsys).rpartition("VERIFIED: (")[0].count("NOT") == 0


def blocks(rows):
    tokens = torch.tensor([(row["input_ids"] * 3)[:8] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


def test_what_is_missing_is_said(folders, tmp_path, capsys):
    merged(folders)
    for options in (["--base", "base"], ["--adapter", str(folders / "out")]):
        assert main(["verify", str(folders / "merged"), *options]) == 2
        assert "--base and --adapter belong together" in capsys.readouterr().err
    shutil.copy(folders / "out" / LEDGER_NAME, tmp_path)
    assert main(["verify", str(folders / "merged"), "--base", str(folders / "base"), "--adapter", str(tmp_path)]) == 1
    assert f"There is no adapter in {tmp_path}." in said(capsys)


def test_verifying_the_merged_model_alone_points_to_this(folders, capsys):
    shutil.copy(folders / "out" / LEDGER_NAME, merged(folders))
    assert main(["verify", str(folders / "merged")]) == 1
    assert f"run doppler-hf verify {folders / 'merged'} --base BASE --adapter FOLDER" in said(capsys)
    (folders / "merged" / LEDGER_NAME).unlink()
