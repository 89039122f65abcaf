"""The report of a run is one page of what the run has published, and needs nothing else."""

import json
from html.parser import HTMLParser

import pytest

from doppler_hf.cli import main
from doppler_hf.cli.report import REPORT_NAME, model_in_words, newest_checkpoint
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.accounting.attack import percent
from doppler_hf.run.checkpoints import EVALUATIONS_NAME
from doppler_hf.workloads.metrics import accuracy_from_logits
from tests.support.tiers import thorough
from tests.support.trainers import trained, trainer_of

VOID = {"meta", "br", "img", "link"}


class Wellformed(HTMLParser):
    """Checks that every element is closed, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.words, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(folder):
    """Write the report of a folder, and return it with its text in one line."""
    assert main(["report", str(folder)]) == 0
    page = Wellformed()
    page.feed((folder / REPORT_NAME).read_text("utf-8"))
    return page, " ".join(" ".join(page.words).split())


@pytest.fixture
def folder(tmp_path):
    trainer = trainer_of(
        tmp_path, noise_multiplier=None, target_epsilon=3.0, low_pass_filter="first-order-v1", noise_shape="banded:bands=2",
        max_steps=6, save_strategy="steps", save_steps=3, logging_steps=1, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer.train()
    return tmp_path / "out"


def test_a_run_is_reported_on_one_page(folder, capsys):
    page, words = page_of(folder)
    assert capsys.readouterr().out == f"The report is in {folder / REPORT_NAME}.\n"
    ledger = PrivacyLedger.load(folder)
    assert not page.open
    assert not page.addresses  # no other file, no network
    best = ledger.trade_off()
    found = percent(best.true_positive_rate(0.01))
    assert f"recognises a training record with a probability of at most {found}; guessing" in words
    assert f"{found} at 1 %" in page.words  # in the picture
    assert f"no attack exceeds the advantage, TPR − FPR {percent(best.advantage)} " in words
    assert "model BertForSequenceClassification trained 20" in words
    assert "data 24 training records" in words
    assert f"Trained with ({ledger.epsilon():.4g}, {ledger.statement.target_delta:.3g})-differential privacy" in words
    assert ledger.head in words
    for title in ("loss", "eval_loss", "grad_norm", "learning_rate", "|H|² of the filter"):
        assert title in page.words
    assert all(line in words for line in ledger.not_covered)


@pytest.mark.thorough
def test_the_log_of_another_training_in_the_folder_is_not_shown(tmp_path):
    """One without privacy, of more steps; nor where the folder lies."""
    options = dict(save_strategy="steps", save_steps=2, logging_steps=1)
    trainer_of(tmp_path, disable_dp=True, noise_multiplier=None, max_steps=6, **options).train()
    trainer_of(tmp_path, max_steps=4, report_train_loss="none", **options).train()
    folder = tmp_path / "out"
    assert (folder / "checkpoint-6").is_dir()
    assert newest_checkpoint(folder, PrivacyLedger.load(folder)) == folder / "checkpoint-4"
    page, _ = page_of(folder)
    assert "grad_norm" in page.words
    assert "loss" not in page.words
    assert str(tmp_path) not in " ".join(page.words)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("saves", [dict(save_strategy="steps", save_steps=2), *thorough(dict(save_strategy="no"))])
def test_the_last_evaluation_is_shown_beside_the_majority_class(tmp_path, saves):
    """That at the end of an epoch comes after the last checkpoint. None of another model, or another training."""
    trainer = trained(
        trainer_of(tmp_path, max_steps=2, eval_strategy="epoch", compute_metrics=accuracy_from_logits, **saves)
    )
    folder, labels = tmp_path / "out", trainer.eval_dataset["labels"]
    metrics = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    majority = max(labels.count(0), labels.count(1)) / len(labels)
    shown = f"last evaluation at step 2 loss {metrics['eval_loss']:.4g} accuracy {metrics['eval_accuracy']:.4g} (always the "
    assert f"{shown}most frequent label: {majority:.4g})" in page_of(folder)[1]
    trainer.model.classifier.bias.data[0] += 100.0
    trainer.evaluate()
    assert shown in page_of(folder)[1]
    (folder / EVALUATIONS_NAME).write_text((folder / EVALUATIONS_NAME).read_text().replace('"run_id": "', '"run_id": "0'))
    assert "accuracy" not in page_of(folder)[1]


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("config.json", {"architectures": ["BertModel"]}, "BertModel"),
        ("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "o/bert"}, "LORA adapter of o/bert"),
        ("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "/home/me/bert"}, "LORA adapter of bert"),
        ("other.json", {}, "none is saved here"),
    ],
)
def test_the_model_is_named_and_not_where_it_lay(tmp_path, name, config, words):
    (tmp_path / name).write_text(json.dumps(config))
    assert model_in_words(tmp_path / "nowhere", tmp_path) == words


@pytest.mark.usefixtures("without_pictures")
def test_a_run_that_was_not_private_says_so(tmp_path):
    trainer_of(tmp_path, noise_multiplier=0.0, max_steps=1, save_strategy="no").train()
    _, words = page_of(tmp_path / "out")
    assert "Not differentially private" in words
    assert "attack" not in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "error: FOLDER must have privacy_ledger.json, got nowhere without it. Give the output folder"),
        (["{out}", "--output", "page.pdf"], "error: --output must end in .html, got page.pdf."),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, message):
    trainer_of(tmp_path, max_steps=1, save_strategy="no").train()
    capsys.readouterr()
    assert main(["report", *(word.format(out=tmp_path / "out") for word in words)]) == 2
    assert message in capsys.readouterr().err
