"""The report of a run is one page of what the run has published, and needs nothing else."""

from html.parser import HTMLParser

import pytest

from doppler_hf.cli import main
from doppler_hf.cli.report import REPORT_NAME, epsilons_of, newest_checkpoint
from doppler_hf.privacy import PrivacyLedger
from tests.support.trainers import trainer_of

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


@pytest.fixture
def folder(tmp_path):
    trainer = trainer_of(
        tmp_path, noise_multiplier=None, target_epsilon=3.0, low_pass_filter="first-order-v1", noise_shape="banded:bands=2",
        max_steps=6, save_strategy="steps", save_steps=3, logging_steps=1, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer.train()
    return tmp_path / "out"


def test_a_run_is_reported_on_one_page(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"The report is in {folder / REPORT_NAME}.\n"
    ledger, page = PrivacyLedger.load(folder), Wellformed()
    page.feed((folder / REPORT_NAME).read_text("utf-8"))
    assert not page.open
    assert not page.addresses  # no other file, no network
    words = " ".join(" ".join(page.words).split())
    assert f"Trained with ({ledger.epsilon():.4g}, {ledger.statement.target_delta:.3g})-differential privacy" in words
    assert ledger.head in words
    for title in ("ε", "loss", "eval_loss", "grad_norm", "learning_rate", "|H|² of the filter"):
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
    assert main(["report", str(folder)]) == 0
    page = Wellformed()
    page.feed((folder / REPORT_NAME).read_text("utf-8"))
    assert "grad_norm" in page.words
    assert "loss" not in page.words
    assert str(tmp_path) not in " ".join(page.words)


def test_epsilon_grows_to_what_the_ledger_says_over_all_runs(folder):
    ledger = PrivacyLedger.load(folder)
    steps, epsilons = zip(*epsilons_of(ledger), strict=True)
    assert steps == (0, 1, 2, 3, 4, 5, 6)
    assert epsilons[0] == 0.0
    assert list(epsilons) == sorted(epsilons)
    assert epsilons[-1] == ledger.epsilon()


def test_a_run_that_was_not_private_says_so(tmp_path):
    trainer_of(tmp_path, noise_multiplier=0.0, max_steps=1, save_strategy="no").train()
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Not differentially private" in (tmp_path / "out" / REPORT_NAME).read_text("utf-8")


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
