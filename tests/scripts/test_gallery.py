"""The notebooks of the gallery are their scripts, and the scripts run on local folders."""

import json
import os
import runpy
import time

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from doppler_hf.privacy import PrivacyLedger
from scripts.gallery import GALLERY, cells_of, notebook_of
from tests.support.tiny import tiny_bert

SCRIPTS = sorted(GALLERY.glob("*.py"))
WORDS = ["[PAD]", "[UNK]", "good", "bad", "the", "food", "film", "was"]


def texts_and_labels(count, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(2, size=count).tolist()
    return [" ".join([WORDS[2 + label], *generator.choice(WORDS[4:], 5)]) for label in labels], labels


def save_tokenizer(folder):
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(folder)


def text_classification(model, data):
    tiny_bert().save_pretrained(model)
    save_tokenizer(model)
    for split, count in (("train", 300), ("validation", 40)):
        texts, labels = texts_and_labels(count, count)
        Dataset.from_dict({"sentence": texts, "label": labels}).to_parquet(data / f"{split}.parquet")


def language_model(model, data):
    size = dict(n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=len(WORDS))
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).save_pretrained(model)
    save_tokenizer(model)
    for split, count in (("train", 300), ("test", 40)):
        Dataset.from_dict({"text": texts_and_labels(count, count)[0]}).to_parquet(data / f"{split}.parquet")


def image_classification(model, data):
    size = dict(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ViTForImageClassification(ViTConfig(**size, num_labels=2)).save_pretrained(model)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(model)
    features = Features({"img": Image(), "label": ClassLabel(names=["dark", "light"])})
    for split, count in (("train", 200), ("test", 40)):
        generator = np.random.default_rng(count)
        labels = generator.integers(2, size=count).tolist()
        images = [generator.integers(100 * label, 100 * label + 100, size=(8, 8, 3), dtype=np.uint8) for label in labels]
        Dataset.from_dict({"img": images, "label": labels}, features=features).to_parquet(data / f"{split}.parquet")


def test_the_notebooks_are_their_scripts():
    assert [script.stem for script in SCRIPTS] == ["image_classification", "language_model", "text_classification"]
    for script in SCRIPTS:
        text = script.read_text("utf-8")
        written = script.with_suffix(".ipynb").read_text("utf-8")
        assert written == notebook_of(text), f"{script.stem} has changed. Run python -m scripts.gallery."
        cells = json.loads(written)["cells"]
        assert ["".join(cell["source"]) for cell in cells] == [cell for _, cell in cells_of(text)]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        assert "# %%" not in code
        compile(code, script.stem, "exec")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")  # PEFT looks for the base on the hub
@pytest.mark.filterwarnings("ignore:Some weights of:UserWarning")
def test_a_script_of_the_gallery_runs_on_local_folders(script, tmp_path, monkeypatch):
    model, data = tmp_path / "model", tmp_path / "data"
    data.mkdir()
    globals()[script.stem](model, data)
    monkeypatch.setitem(os.environ, "GALLERY_MODEL", str(model))
    monkeypatch.setitem(os.environ, "GALLERY_DATA", str(data))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    names = runpy.run_path(str(script))
    assert time.monotonic() - start < 60
    out = tmp_path / script.stem.replace("_", "-")
    ledger = PrivacyLedger.load(out)
    assert ledger.private
    assert ledger.epsilon() <= names["args"].target_epsilon
    assert (out / "README.md").read_text("utf-8").count("## Differential privacy\n") == 1
