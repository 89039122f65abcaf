"""`doppler-hf verify MERGED --base BASE --adapter FOLDER` computes the merge again."""

import json
import re
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from doppler_hf.cli import main
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.run.weights.merged_model import _is_equal as is_equal
from doppler_hf.run.weights.merged_model import merge_mismatches
from tests.support.ledgers import said
from tests.support.refusals import refused
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
    assert "with this adapter merged into it, except for rounding." in output


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


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_layers_that_are_left_out_or_added_are_noticed(folders, capsys):
    """Of a model of fewer layers, all tensors that are there may be right."""
    tiny_bert(num_hidden_layers=2).save_pretrained(folders / "deeper")
    for base, dropped in (("base", "deeper"), ("deeper", "base")):
        torch.manual_seed(0)
        whole = BertForSequenceClassification.from_pretrained(folders / base)
        other = BertForSequenceClassification.from_pretrained(folders / dropped)
        other.load_state_dict(whole.state_dict(), strict=False)
        other.save_pretrained(folders / "other-depth")
        merged(folders, base="other-depth")
        assert verify(folders, base=base) == 1
        output = said(capsys)
        assert output.startswith("NOT VERIFIED")
        assert re.search(r"tensors (of|in) .* (are missing in|are not in) .*, such as bert\.encoder\.layer\.1\.", output)
        assert re.search("num_hidden_layers=., and that of .* has .,", output)


def test_a_configuration_that_computes_something_else_is_noticed(folders, capsys):
    merged(folders)
    path = folders / "merged" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    # The training may have been without dropout.
    trained = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "initializer_range": 0.5}
    path.write_text(json.dumps(config | trained), "utf-8")
    assert verify(folders) == 0
    capsys.readouterr()
    path.write_text(json.dumps(config | {"hidden_act": "relu", "id2label": {"0": "no", "1": "yes"}}), "utf-8")
    assert verify(folders) == 1
    output = said(capsys)
    assert "has hidden_act='relu', and that of" in output
    assert "id2label" not in output


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
        assert "--base and --adapter must be given together" in capsys.readouterr().err
    shutil.copy(folders / "out" / LEDGER_NAME, tmp_path)
    assert main(["verify", str(folders / "merged"), "--base", str(folders / "base"), "--adapter", str(tmp_path)]) == 1
    assert f"There is no adapter in {tmp_path}." in said(capsys)


def test_verifying_the_merged_model_alone_points_to_this(folders, capsys):
    shutil.copy(folders / "out" / LEDGER_NAME, merged(folders))
    assert main(["verify", str(folders / "merged")]) == 1
    assert f"run doppler-hf verify {folders / 'merged'} --base BASE --adapter FOLDER" in said(capsys)
    (folders / "merged" / LEDGER_NAME).unlink()


# --- what a merge leaves alone, and what is no merge ---


def next_values(model):
    """Every value moves to the next one of bfloat16, as little as a step of training may move it."""
    for value in model.parameters():
        value.copy_((value.float() * (1 + 0.0055 * torch.randn_like(value.float()).sign())).bfloat16())


def one_value(model):
    model.bert.embeddings.word_embeddings.weight[3, 3] *= 1 + 2**-7


def smaller_vocabulary(model):
    model.resize_token_embeddings(model.config.vocab_size - 4)


def larger_vocabulary(model):
    model.resize_token_embeddings(model.config.vocab_size + 4)


@pytest.mark.parametrize(
    ("dtype", "change", "words"),
    [
        (torch.bfloat16, next_values, "Merge again"),
        (torch.bfloat16, one_value, "word_embeddings.weight. Merge again"),
        (torch.float32, smaller_vocabulary, "tokens were added or removed after the merge"),
        (torch.float32, larger_vocabulary, "tokens were added or removed after the merge"),
    ],
)
def test_a_small_change_after_the_merge_is_not_verified(folders, capsys, dtype, change, words):
    merged(folders, dtype=dtype, change=change)
    assert verify(folders) == 1
    assert words in said(capsys)


def test_a_weight_file_that_nothing_was_compared_with_is_not_verified(folders, capsys):
    path = merged(folders) / "pytorch_model.bin"
    torch.save({}, path)
    assert verify(folders) == 1
    assert "pytorch_model.bin" in said(capsys)
    path.unlink()
    assert verify(folders) == 0


@pytest.mark.parametrize("saved", [torch.float32, *thorough(torch.float16)])
def test_a_merge_in_bfloat16_may_be_saved_in_another_precision(folders, saved):
    merged(folders, dtype=torch.bfloat16, saved=saved)
    assert verify(folders) == 0


def test_a_base_with_a_head_of_another_size(tmp_path):
    tiny_bert(num_labels=3).save_pretrained(tmp_path / "base")
    options = dict(num_labels=2, ignore_mismatched_sizes=True)
    model = BertForSequenceClassification.from_pretrained(tmp_path / "base", **options)
    trainer = trainer_of(tmp_path, model=get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["query"])))
    trainer.train()
    trainer.save_model()
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert verify(tmp_path) == 0


def test_models_that_cannot_be_compared_are_named(folders, tmp_path, capsys):
    merged(folders)
    tiny_bert(hidden_size=32).save_pretrained(tmp_path / "wide")
    for model, base, words in (
        (folders / "merged", "/nowhere/base", "The model /nowhere/base cannot be loaded"),
        ("/nowhere/merged", folders / "base", "The model /nowhere/merged cannot be loaded"),
        (folders / "merged", tmp_path / "wide", "has a different size than the merged model"),
    ):
        assert main(["verify", str(model), "--base", str(base), "--adapter", str(folders / "out")]) == 2
        assert words in capsys.readouterr().err


def test_a_model_without_its_class_and_an_adapter_of_other_layers_are_named(folders, capsys):
    path = merged(folders) / "config.json"
    path.write_text(path.read_text().replace("BertForSequenceClassification", "OfTheUsersOwn"))
    assert verify(folders) == 2
    assert "names no model class of Transformers" in capsys.readouterr().err
    merged(folders)
    tiny_bert(intermediate_size=8, hidden_size=16).save_pretrained(folders / "narrow")
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["intermediate.dense"])
    get_peft_model(tiny_bert(), config).save_pretrained(folders / "other")
    (folders / "other" / LEDGER_NAME).write_bytes((folders / "out" / LEDGER_NAME).read_bytes())
    with refused("adapter-does-not-fit", match="Give the model on which it was trained as --base"):
        merge_mismatches(folders / "merged", base=str(folders / "narrow"), adapter=folders / "other")
    assert verify(folders) == 0  # as advised


def test_a_quantized_model_is_named(folders, capsys):
    path = merged(folders) / "config.json"
    path.write_text(path.read_text().replace("{", '{"quantization_config": {"load_in_8bit": true},', 1))
    assert verify(folders) == 2
    assert "is quantized" in capsys.readouterr().err
    merged(folders)
