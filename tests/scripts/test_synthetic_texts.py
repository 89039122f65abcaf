"""The study of synthetic texts at a tiny size: tables, a picture, canaries that are found without privacy, nothing twice."""

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from scripts import synthesize
from scripts.experiments import bert_writer, synthetic_tables, synthetic_texts, text_canaries, text_distances
from tests.support.folders import SPECIAL_WORDS, WORDS, write_glue, write_gpt2

pytestmark = pytest.mark.usefixtures("own_caches")
SIZES = ["--vocabulary=80", "--public-epochs=1", "--rows=80", "--epochs=1", "--plain-epochs=12", "--samples=20", "--steps=2"]
PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789:.", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
MORE_WORDS = ["label", "text", "positive", "negative", "secret", "code", "of", "is"]


def write_encoder(folder):
    """A BERT encoder with a tokenizer of letters and some words."""
    vocab = [*SPECIAL_WORDS, *PIECES, *WORDS[:-1], *MORE_WORDS]
    tokenizer = BertTokenizerFast(vocab={word: row for row, word in enumerate(vocab)}, model_max_length=64)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.1,  # The head shares the frozen embeddings: if they are small, it is sure of nothing.
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def write_data(folder):
    folder.mkdir()
    for task, train in (("sst2", 240), ("mnli", 100), ("qqp", 100), ("qnli", 100)):
        write_glue(folder / task, task, train=train)
    return folder


@pytest.mark.thorough
def test_a_canary_is_found_without_privacy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(synthetic_texts, "BATCH", 64)
    monkeypatch.setattr(synthetic_texts, "BATCH_WITHOUT_PRIVACY", 8)
    monkeypatch.setattr(synthetic_texts, "RATE_WITHOUT_PRIVACY", 1e-2)
    monkeypatch.setattr(synthetic_texts, "MAX_TOKENS", 60)  # Most words are spelt, and codes come last.
    monkeypatch.setattr(text_canaries, "ALTERNATIVES", 50)
    monkeypatch.setattr(text_canaries, "CANARIES", 1)
    data, encoder, out = write_data(tmp_path / "glue"), write_encoder(tmp_path / "encoder"), tmp_path / "out"
    picture = tmp_path / "picture.png"
    flags = [f"--data-dir={data}", f"--encoder={encoder}", f"--out={out}", f"--picture={picture}", "--seeds", "1", *SIZES]
    synthetic_texts.main(flags)
    printed = capsys.readouterr().out
    found = json.loads((out / "seed-1.json").read_text())
    assert len(found["accuracy"]) == 5
    assert all(0 <= value <= 1 for value in found["accuracy"].values())
    ranks = {
        (name, number): synthetic_tables.values_of_canaries([found], name, "ranks", number)
        for name in synthetic_tables.MODELS
        for number in text_canaries.INSERTIONS
    }
    assert all(1 <= rank <= 51 for each in ranks.values() for rank in each)
    assert max(ranks["no privacy", 100]) <= 3
    assert found["ε = 8"]["positive"] == found["no privacy"]["positive"] == 0.5
    assert sum(found["no privacy"]["words"]) == 20
    assert all(math.isfinite(found[name]["frechet"]) for name in synthetic_tables.TITLES)
    assert "| no privacy | 100 × | " in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    # What was done is not done again.
    monkeypatch.setattr(synthesize, "main", None)
    monkeypatch.setattr(synthetic_texts, "public_model", None)
    synthetic_texts.main(flags)
    assert capsys.readouterr().out == printed


def test_private_texts_have_each_canary_as_often_as_it_says_and_are_short(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic_texts, "MAX_WORDS", 9)
    write_glue(tmp_path / "sst2", "sst2", train=300)
    splits, others = synthetic_texts.write_private_texts(tmp_path / "texts", tmp_path, rows=100, seed=3)
    texts = Dataset.from_parquet(str(tmp_path / "texts" / "train.parquet"))["text"]
    canaries = text_canaries.canaries_of(3)
    assert [texts.count(canary.text) for canary in canaries] == [canary.insertions for canary in canaries]
    assert {canary.insertions for canary in canaries} == {1, 10, 100}
    assert len({canary.start for canary in canaries}) == len({canary.code for canary in canaries}) == 12
    assert len(texts) == 100 + sum(canary.insertions for canary in canaries)
    assert (len(splits["train"]), len(others)) == (100, 100)
    assert max(len(text.split()) for text in [*splits["train"]["sentence"], *others]) == 9


def test_the_writer_has_the_weights_of_the_encoder_and_does_not_look_ahead(tmp_path):
    encoder = write_encoder(tmp_path / "encoder")
    texts = ["the good film", "the bad plot", "the film"]
    tokenizer, rows = bert_writer.cut_tokenizer(str(encoder), texts, size=69)
    whole = AutoTokenizer.from_pretrained(encoder)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    # The most frequent words are kept, and another one is spelt.
    assert pieces[-2:] == ["the", "film"]
    assert whole.convert_tokens_to_ids(pieces) == rows
    assert tokenizer.tokenize("the fine film") == ["the", "f", "##i", "##n", "##e", "film"]
    assert tokenizer.unk_token_id not in tokenizer("any word at all: 0 1 2.")["input_ids"]
    assert tokenizer("film[SEP]")["input_ids"][-1] == tokenizer.eos_token_id

    model = bert_writer.causal_model(str(encoder), tokenizer, rows).eval()
    own, bert = model.bert.state_dict(), AutoModel.from_pretrained(encoder).state_dict()
    for name, weight in own.items():
        expected = bert[name][rows] if "word_embeddings" in name else bert[name]
        torch.testing.assert_close(weight, expected, atol=0, rtol=0)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    ids = torch.tensor([tokenizer("the good film of the")["input_ids"]])
    other = ids.clone()
    other[0, -1] = tokenizer.eos_token_id
    with torch.no_grad():
        first, second = model(ids).logits, model(other).logits
    torch.testing.assert_close(first[:, :-1], second[:, :-1], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first[:, -1], second[:, -1])


@pytest.mark.parametrize("write", [write_gpt2, write_encoder])
def test_losses_are_those_of_the_model_for_each_code_alone(tmp_path, write):
    folder = write(tmp_path / "model")
    if write is write_encoder:
        tokenizer, rows = bert_writer.cut_tokenizer(str(folder), ["the film"], size=80)
        model = bert_writer.causal_model(str(folder), tokenizer, rows).eval()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    codes = ["a b c", "d e f g", "b b b", "c"]
    start = "label: positive\ntext: code of"
    before = tokenizer(start)["input_ids"]
    expected = []
    for code in codes:
        ids = torch.tensor([[*before, *tokenizer(f" {code}", add_special_tokens=False)["input_ids"]]])
        labels = ids.clone()
        labels[:, : len(before)] = -100
        with torch.no_grad():
            expected.append(float(model(ids, labels=labels).loss) * (ids.shape[1] - len(before)))
    found = text_canaries.losses_of(model, tokenizer, start, codes)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0)


def test_the_likeliest_code_has_the_first_place(tmp_path, monkeypatch):
    write_gpt2(tmp_path)
    canaries = text_canaries.canaries_of(1)
    for losses, place in (([1.0, 2.0, 3.0], 1), ([2.0, 1.0, 3.0], 2), ([3.0, 2.0, 1.0], 3)):
        monkeypatch.setattr(text_canaries, "losses_of", lambda *words, losses=losses: losses)
        assert text_canaries.ranks(tmp_path, canaries[:1], label="positive", seed=1) == [place]


def test_the_loss_is_a_mean_over_the_tokens_of_all_texts(tmp_path):
    write_gpt2(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    total = tokens = 0
    for text, label in (("a b", "negative"), ("c d e f", "positive")):
        before = tokenizer(f"label: {label}\ntext:")["input_ids"]
        ids = torch.tensor([[*before, *tokenizer(f" {text}<|endoftext|>")["input_ids"]]])
        labels = ids.clone()
        labels[:, : len(before)] = -100
        number = ids.shape[1] - len(before)
        with torch.no_grad():
            total, tokens = total + float(model(ids, labels=labels).loss) * number, tokens + number
    assert synthetic_texts.loss_per_token(tmp_path, ["a b", "c d e f"], [0, 1]) == pytest.approx(total / tokens, rel=1e-5)


def test_an_embedding_is_the_mean_of_the_tokens_and_does_not_depend_on_the_other_texts(tmp_path):
    encode = text_distances.Encoder(str(write_encoder(tmp_path)))
    texts = ["the good film of a plot is fine", "bad", "the plot"]
    found = encode(texts)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    model, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


def test_the_frechet_distance_of_normal_distributions():
    vectors = np.random.default_rng(0).normal(size=(500, 3))
    assert text_distances.frechet_distance(vectors, vectors) == pytest.approx(0, abs=1e-9)
    assert text_distances.frechet_distance(vectors, vectors + [3.0, 0.0, 4.0]) == pytest.approx(25)
    # For covariances that commute it is the distance of their roots: here each scale is doubled.
    assert text_distances.frechet_distance(vectors, 2 * vectors) == pytest.approx(
        np.trace(np.cov(vectors, rowvar=False)) + np.square(vectors.mean(0)).sum()
    )


def test_the_area_under_the_frontier_is_1_for_equal_texts_and_small_for_different_ones():
    generator = np.random.default_rng(0)
    near, same, far = generator.normal(size=(3, 400, 4)) + np.array([0.0, 0.0, 50.0])[:, None, None]
    areas = [text_distances.frontier_area(near, each, clusters=20, seed=0) for each in (near, same, far)]
    assert areas[0] == pytest.approx(1, abs=1e-6)
    assert 0.8 < areas[1] < 1
    assert areas[2] < 0.05
    half = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])
    assert areas[2] < text_distances.area(*half) < areas[1]
    assert text_distances.area(*half) == pytest.approx(text_distances.area(*half[::-1]))


def test_the_share_of_texts_that_are_nearer_to_the_first_set():
    east, north = np.eye(2, dtype=np.float32)
    both = np.array([[0.8, 0.6], [0.6, 0.8]], dtype=np.float32)
    assert text_distances.share_nearer(both, east[None], north[None]) == 0.5
    assert text_distances.share_nearer(both[:1], east[None], north[None]) == 1
    assert text_distances.share_nearer(both[1:], east[None], north[None]) == 0
    # A text that is in both sets counts half.
    assert text_distances.share_nearer(both, both, both) == 0.5


def test_copies_and_canaries_are_found_in_other_white_space_and_case(tmp_path, monkeypatch):
    folder = write_encoder(tmp_path / "encoder")
    tokenizer, _ = bert_writer.cut_tokenizer(str(folder), ["the film"], size=80)
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(synthetic_texts, "ranks", lambda *_, **__: [1] * 12)
    canary = text_canaries.canaries_of(2)[5]
    texts = ["the film.", f"so {canary.text}", "a plot", "bad"]
    found = synthetic_texts.leaks(tmp_path / "model", texts, ["The  film .", "bad plot"], ["a plot", "good"], seed=2)
    assert found["copies of training texts"] == found["copies of held-out texts"] == 1
    assert {start: times for start, times in found["verbatim"].items() if times} == {canary.start: 1}


def test_lengths_in_words():
    counts = synthetic_texts.lengths_of([" ".join(WORDS), "one two", "three four", "a " * 99])
    assert {length: number for length, number in enumerate(counts) if number} == {8: 1, 2: 2, synthetic_texts.LONGEST: 1}


def test_the_mean_of_several_seeds_has_its_error():
    assert synthetic_tables.with_error([80.0, 82.0, 84.0], 1) == "82.0 ± 1.2"
    assert synthetic_tables.with_error([80.0], 1) == "80.0"
