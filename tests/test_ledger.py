"""The ledger adds up what was spent through restarts, and reads back what it wrote."""

import json
import math

import pytest

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger, get_epsilon
from doppler_hf.privacy.accounting import Releases


def ledger(**overrides):
    values = dict(
        num_examples=1000, expected_batch_size=50, sample_rate=0.05, noise_multiplier=1.0, per_sample_max_grad_norm=1.0,
        clipping="automatic", clipping_granularity="flat", target_delta=1e-5, target_epsilon=None, accountant="prv",
        steps_planned=60, private=True, train_loss_reported=True,
    )  # fmt: skip
    return PrivacyLedger(**(values | overrides))


def after(book, steps):
    for _ in range(steps):
        book.record_step()
    return book


def test_epsilon_is_the_accountants():
    book = after(ledger(), 40)
    mechanism = dict(noise_multiplier=1.0, sample_rate=0.05, delta=1e-5)
    assert book.steps_run == 40
    assert book.history == [Releases(1.0, 0.05, 40)]
    assert book.epsilon() == get_epsilon(**mechanism, steps=40)
    assert book.epsilon(further_steps=20) == get_epsilon(**mechanism, steps=60)


def test_epsilon_is_infinite_when_not_private():
    assert after(ledger(private=False), 3).epsilon() == math.inf


def test_file_reads_back_and_says_what_is_not_covered(tmp_path):
    book = after(ledger(), 7)
    book.save(tmp_path)
    assert PrivacyLedger.load(tmp_path) == book
    written = json.loads((tmp_path / LEDGER_NAME).read_text())
    assert written["steps_run"] == 7
    assert written["epsilon_spent"] == book.epsilon()
    assert any("training loss" in line for line in written["not_covered"])
    assert list(tmp_path.iterdir()) == [tmp_path / LEDGER_NAME]  # no temporary file stays


def test_infinite_epsilon_is_null_in_the_file(tmp_path):
    after(ledger(private=False), 2).save(tmp_path)
    assert json.loads((tmp_path / LEDGER_NAME).read_text())["epsilon_spent"] is None


def test_resuming_counts_the_steps_that_a_crash_undid():
    crashed = after(ledger(), 30)
    resumed = ledger()
    resumed.resume(crashed, from_step=20)
    assert resumed.restarts == [20]
    assert after(resumed, 40).steps_run == 70


def test_another_mechanism_opens_another_entry():
    first = after(ledger(), 30)
    second = ledger(noise_multiplier=2.0)
    second.resume(first, from_step=30)
    assert after(second, 5).history == [Releases(1.0, 0.05, 30), Releases(2.0, 0.05, 5)]


def test_what_was_not_private_once_stays_so():
    resumed = ledger()
    resumed.resume(after(ledger(private=False), 3), from_step=3)
    assert not resumed.private


@pytest.mark.parametrize(
    ("overrides", "from_step", "message"),
    [
        (dict(num_examples=999), 3, "num_examples=999, this one 1000"),
        (dict(target_delta=1e-6), 3, "target_delta=1e-06"),
        ({}, 9, "at step 9, but its ledger counts 3 steps"),
    ],
)
def test_a_ledger_of_something_else_is_refused(overrides, from_step, message):
    with pytest.raises(ValueError, match=message):
        ledger().resume(after(ledger(**overrides), 3), from_step=from_step)


def test_affordable_steps_end_before_the_budget():
    book = after(ledger(target_epsilon=2.0), 10)
    affordable = book.affordable_steps(500)
    assert book.epsilon(further_steps=affordable) <= 2.0 < book.epsilon(further_steps=affordable + 1)
    assert ledger().affordable_steps(500) == 500
    assert after(ledger(target_epsilon=0.5), 100).affordable_steps(10) == 0


@pytest.mark.parametrize("text", ["{", "{}", '{"format_version": 2}'])
def test_what_is_no_ledger_is_refused(tmp_path, text):
    (tmp_path / LEDGER_NAME).write_text(text)
    with pytest.raises(ValueError, match=r"not a privacy ledger|format version 2"):
        PrivacyLedger.load(tmp_path)
