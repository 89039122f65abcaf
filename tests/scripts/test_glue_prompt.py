"""The word in the gap is the masked language model's own, and one gap is in every text."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForMaskedLM,
)

from doppler_hf.workloads.recipe import build, parse_recipe
from scripts.glue_prompt import PROMPT, PROMPTS, Prompter, PromptForSequenceClassification
from tests.support.folders import MASKED_LMS, PROMPT_WORDS, byte_tokenizer, write_glue, write_gpt2, write_masked_lm


@pytest.fixture
def tokenizer(tmp_path):
    return AutoTokenizer.from_pretrained(write_masked_lm(tmp_path / "words", MASKED_LMS["bert"]()))


@pytest.mark.parametrize(
    ("task_name", "sentences", "expected"),
    [
        ("sst2", [" a good film . "], "[CLS] a good film. it was [MASK]. [SEP]"),
        ("cola", ["a good film."], "[CLS] a good film. this is [MASK]. [SEP]"),
        ("qnli", ["is this a film?", "It was a good film."], "[CLS] is this a film? [MASK], it was a good film. [SEP]"),
        ("qqp", ["is this a film?", "Was it?"], "[CLS] is this a film? [MASK], was it? [SEP]"),
        ("sst2", ["a [MASK] film"], "[CLS] a [ mask ] film it was [MASK]. [SEP]"),
    ],
)
def test_a_template_has_one_gap(tokenizer, task_name, sentences, expected):
    prompter = Prompter(task_name, tokenizer, max_length=30)
    found = prompter(*([sentence] for sentence in sentences))
    (row,) = found["input_ids"]
    assert tokenizer.decode(row) == expected
    assert row.count(tokenizer.mask_token_id) == 1
    assert found["attention_mask"] == [[1] * len(row)]


@pytest.mark.parametrize(
    ("task_name", "sentences", "expected"),
    [
        ("sst2", ["bad"], ["<s>", "b", "a", "d", "ĠIt", "Ġwas", "<mask>", ".", "</s>"]),
        ("mnli", ["bad?", "It bad"], ["<s>", "b", "a", "d", "?", "<mask>", ",", "Ġit", "Ġ", "b", "a", "d", "</s>"]),
    ],
)
def test_spaces_and_capital_letters_are_those_of_running_text(task_name, sentences, expected):
    tokenizer = byte_tokenizer()
    prompter = Prompter(task_name, tokenizer, max_length=30)
    (row,) = prompter(*([sentence] for sentence in sentences))["input_ids"]
    assert tokenizer.convert_ids_to_tokens(row) == expected
    words = [f"Ġ{word}" for word in PROMPTS[task_name].words]
    assert tokenizer.convert_ids_to_tokens(prompter.label_token_ids) == words


def test_sentences_are_cut_and_the_template_is_not(tokenizer):
    (row,) = Prompter("mnli", tokenizer, max_length=12)(["a " * 30], ["good " * 4])["input_ids"]
    assert tokenizer.decode(row) == "[CLS] a a a? [MASK], good good good good [SEP]"
    with pytest.raises(ValueError, match="--max_seq_length must be longer than the template, got 5"):
        Prompter("mnli", tokenizer, max_length=5)


@pytest.mark.parametrize("name", MASKED_LMS)
def test_logits_are_those_of_the_words_in_the_gap(tmp_path, name):
    folder = write_masked_lm(tmp_path / name, MASKED_LMS[name]())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompter = Prompter("mnli", tokenizer, max_length=30)
    model = PromptForSequenceClassification.from_masked_lm(folder, prompter=prompter, num_labels=3).eval()
    rows = prompter(["a good film", "bad", "this film"], ["it is", "this was a bad film", "no"])
    batch = tokenizer.pad(rows, return_tensors="pt")
    labels = torch.tensor([0, 1, 2])
    with torch.no_grad():
        output = model(**batch, labels=labels)
        whole = AutoModelForMaskedLM.from_pretrained(folder).eval()(**batch).logits
    words = tokenizer.convert_tokens_to_ids(["yes", "maybe", "no"])
    gaps = [row.index(tokenizer.mask_token_id) for row in rows["input_ids"]]
    expected = torch.stack([whole[row, gap, words] for row, gap in enumerate(gaps)])
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(expected, labels), rtol=1e-5, atol=1e-5)


def test_saves_and_loads_itself_with_its_tied_words(tmp_path):
    folder = write_masked_lm(tmp_path / "bert", MASKED_LMS["bert"]())
    prompter = Prompter("sst2", AutoTokenizer.from_pretrained(folder), max_length=30)
    model = PromptForSequenceClassification.from_masked_lm(folder, prompter=prompter)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1.0)
    model.save_pretrained(tmp_path / "saved")
    loaded = PromptForSequenceClassification.from_masked_lm(tmp_path / "saved", prompter=prompter)
    assert loaded.get_output_embeddings().weight is loaded.masked_lm.get_input_embeddings().weight
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
    for each in (model, loaded):
        assert each.masked_lm.config._attn_implementation == "sdpa"
        each.activation_checkpointing_enable()
        assert each.is_activation_checkpointing


def test_a_model_without_a_pretrained_head_is_refused(tmp_path, tokenizer):
    prompter = Prompter("sst2", tokenizer, max_length=30)
    encoder = write_masked_lm(tmp_path / "encoder", MASKED_LMS["bert"]().bert)
    with pytest.raises(ValueError, match=r"needs a masked language model with its head, got .* without cls\."):
        PromptForSequenceClassification.from_masked_lm(encoder, prompter=prompter)
    with pytest.raises(ValueError, match=r"needs a masked language model, got .*gpt2 of the type 'gpt2'\. Give one such as"):
        PromptForSequenceClassification.from_masked_lm(write_gpt2(tmp_path / "gpt2"), prompter=prompter)
    config = DistilBertConfig(vocab_size=len(PROMPT_WORDS), dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    other = write_masked_lm(tmp_path / "other", DistilBertForMaskedLM(config))
    with pytest.raises(ValueError, match="as RoBERTa and BERT have, got a DistilBertForMaskedLM"):
        PromptForSequenceClassification.from_masked_lm(other, prompter=prompter)


@pytest.mark.usefixtures("own_caches")
def test_a_checkpoint_of_another_head_is_refused(tmp_path):
    """Its layers have other names, and would be new ones."""
    bert, out = write_masked_lm(tmp_path / "bert", MASKED_LMS["bert"]()), tmp_path / "out"
    flags = ["--task_name=mnli", f"--dataset_dir={write_glue(tmp_path / 'mnli', 'mnli')}", "--use_cpu"]
    flags += ["--report_to=none", "--noise_multiplier=1", f"--output_dir={tmp_path / 'run'}"]
    workload, _ = build(PROMPT, argv=[*flags, f"--model_name_or_path={bert}", "--dropout=0.3"])
    assert workload.model.config.num_labels == 3
    assert {module.p for module in workload.model.modules() if isinstance(module, nn.Dropout)} == {0.3}
    workload.model.save_pretrained(out)
    workload.processing_class.save_pretrained(out)
    for pooling in ("model", "mean"):
        with pytest.raises(ValueError, match=r"below its head, got .* or the --pooling or script with which it was trained"):
            parse_recipe([*flags, f"--model_name_or_path={out}", f"--pooling={pooling}"])
    with pytest.raises(ValueError, match=r"^pooling must not be set for a prompt, got 'mean'\. Leave it out"):
        build(PROMPT, argv=[*flags, f"--model_name_or_path={bert}", "--pooling=mean"])
    with pytest.raises(ValueError, match=r"^frozen_layers must not be set for a prompt, got 1\. Leave it out"):
        build(PROMPT, argv=[*flags, f"--model_name_or_path={bert}", "--frozen_layers=1", "--lora_r=2"])
