"""Layers that are computed once give the whole model's logits, from a file that only the same model and data read again."""

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import BertTokenizerFast, DataCollatorWithPadding, MPNetConfig, MPNetModel

from doppler_hf.mean_pooling import MeanPoolingForSequenceClassification
from scripts import glue
from scripts.training import frozen_layers
from scripts.training.frozen_layers import freeze_lowest
from tests.support.folders import SPECIAL_WORDS, WORDS, write_bert, write_glue
from tests.support.refusals import refused
from tests.support.scripts import made_by

VOCAB = {word: row for row, word in enumerate([*SPECIAL_WORDS, *WORDS])}


def write_mpnet(folder):
    BertTokenizerFast(vocab=VOCAB).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    MPNetModel(MPNetConfig(vocab_size=len(VOCAB), pad_token_id=0, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(params=["bert", "mpnet"])
def folder(request, tmp_path):
    torch.manual_seed(0)
    return write_mpnet(tmp_path / "mpnet") if request.param == "mpnet" else write_bert(tmp_path / "bert", 3)


@pytest.fixture
def tokenizer(folder):
    return BertTokenizerFast.from_pretrained(folder)


def texts(tokenizer, *sentences):
    return {"train": Dataset.from_dict({**tokenizer(list(sentences)), "label": [0] * len(sentences)})}


def loaded(folder, **entries):
    torch.manual_seed(1)
    return MeanPoolingForSequenceClassification.from_encoder(folder, num_labels=2, **entries).eval()


def logits(model, tokenizer, data):
    batch = DataCollatorWithPadding(tokenizer)([*data])
    batch.pop("labels")
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-5), (True, 2**-8)])
def test_the_logits_are_the_whole_models(folder, tokenizer, tmp_path, bf16, tolerance):
    splits = texts(tokenizer, "good film", "the plot the film a bad poor bad plot", "fine", "bad")
    expected = logits(loaded(folder), tokenizer, splits["train"])
    model = loaded(folder)
    rows = freeze_lowest(model, 2, splits, tokenizer, bf16=bf16, folder=tmp_path / "kept")
    torch.testing.assert_close(logits(model, tokenizer, rows["train"]), expected, atol=tolerance, rtol=0)
    assert expected.std(dim=0).min() > 5 * tolerance  # the texts differ by more than the error
    assert [len(row) for row in rows["train"]["input_ids"]] == [len(row) for row in splits["train"]["input_ids"]]


def test_each_text_is_computed_alone_and_as_long_as_it_is(folder, tokenizer, tmp_path):
    """In a batch it would be rounded by what is beside it, which shows in models of real size only."""
    model, seen = loaded(folder), []
    splits = texts(tokenizer, "good", "the plot the film a bad poor bad plot", "fine film")
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    freeze_lowest(model, 2, splits, tokenizer, bf16=False, folder=tmp_path / "kept")
    assert seen == [[row] for row in splits["train"]["input_ids"]]


def test_only_another_model_or_text_is_computed(folder, tokenizer, tmp_path, monkeypatch):
    computed = []
    write = frozen_layers._write_outputs
    monkeypatch.setattr(frozen_layers, "_write_outputs", lambda *args, **more: computed.append(1) or write(*args, **more))

    def freeze(model, splits, layers=1, bf16=False):
        freeze_lowest(model, layers, splits, tokenizer, bf16=bf16, folder=tmp_path / "kept")
        return len(computed)

    splits = texts(tokenizer, "good film", "the plot")
    assert [freeze(loaded(folder), splits) for _ in range(2)] == [1, 1]
    other = loaded(folder)
    other.classifier.weight.data.zero_()
    other.encoder.encoder.layer[1].output.dense.weight.data.zero_()
    assert freeze(other, splits) == 1  # what is not frozen does not enter
    other = loaded(folder)
    other.encoder.encoder.layer[0].output.dense.weight.data.zero_()
    assert freeze(other, splits) == 2
    assert freeze(loaded(folder), texts(tokenizer, "good film", "a plot")) == 3
    assert freeze(loaded(folder), splits, layers=2) == 4
    assert freeze(loaded(folder), splits, bf16=True) == 5
    assert len([*(tmp_path / "kept").iterdir()]) == 5


@pytest.mark.usefixtures("own_caches")
def test_adapters_are_trained_and_load_onto_the_whole_model(folder, tokenizer, tmp_path):
    flags = [
        "--task_name=sst2", f"--model_name_or_path={folder}", f"--dataset_dir={write_glue(tmp_path / 'sst2', 'sst2')}",
        "--pooling=mean", "--num_hidden_layers=2", "--lora_r=2", "--lora_target_modules=all-linear",
        f"--output_dir={tmp_path / 'out'}", "--use_cpu", "--report_to=none", "--noise_multiplier=1", "--max_steps=1",
        "--seed=1",
    ]  # fmt: skip
    trainer, _ = made_by(glue, *flags, "--frozen_layers=1")
    trainer.train()
    trainer.save_model()
    assert len([*trainer.model.get_base_model().encoder.encoder.layer]) == 1  # of three: one is frozen, and one left out
    whole = PeftModel.from_pretrained(loaded(folder, num_hidden_layers=2), tmp_path / "out").eval()
    plain, _ = made_by(glue, *flags)
    expected = logits(whole, tokenizer, plain.eval_dataset)
    found = logits(trainer.model.eval(), tokenizer, trainer.eval_dataset)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    untrained = loaded(folder, num_hidden_layers=2)
    assert not torch.equal(expected, logits(untrained, tokenizer, plain.eval_dataset))


def test_what_cannot_be_frozen(folder, tokenizer, tmp_path):
    flags = ["--task_name=sst2", f"--model_name_or_path={folder}", "--use_cpu", "--report_to=none", "--noise_multiplier=1"]
    with pytest.raises(SystemExit, match=r"^error: frozen_layers=1 needs lora_r"):
        glue.main([*flags, f"--output_dir={tmp_path}", "--frozen_layers=1"])
    with refused("out-of-range", match=r"3 for a \w+ with 3"):
        freeze_lowest(loaded(folder), 3, texts(tokenizer, "good"), tokenizer, bf16=False, folder=tmp_path)
