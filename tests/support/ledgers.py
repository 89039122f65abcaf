"""Statements and ledgers for tests."""

import json

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger, PrivacyStatement
from doppler_hf.privacy.ledger.file import ORIGIN, digest, write_entries
from doppler_hf.privacy.ledger.record import ModelDigests

MODEL = ModelDigests(parameters=64 * "b", buffers=64 * "c")


def statement(**overrides):
    values = dict(
        num_units=1000, unit_of_privacy="one example", max_examples_per_unit=None, expected_batch_size=50, sample_rate=0.05,
        noise_multiplier=1.0, noise_shape="white", per_sample_max_grad_norm=1.0, clipping="automatic",
        clipping_granularity="flat", augmentation_multiplicity=1,
        clip_unit_mean=False, train_loss="none", per_sample_max_loss=None, loss_noise_multiplier=None, target_delta=1e-5,
        target_epsilon=None, accountant="pld", steps_planned=60, private=True, noise_source="a test",
    )  # fmt: skip
    return PrivacyStatement(**(values | overrides))


def after(ledger, steps):
    """Let the ledger's run do so many steps."""
    for left in range(steps, 0, -1):
        ledger.reserve(at_most=left)
        ledger.record_step()
    return ledger


def all_events(**overrides):
    """A ledger with every event: 6 of 10 steps and a checkpoint, a crash while 7 are reserved, 3 more, and a model."""
    ledger = after(PrivacyLedger.open(statement(steps_planned=10, **overrides)), 6)
    ledger.checkpoint(6)
    ledger.reserve(at_most=4)
    ledger = ledger.resume(statement(steps_planned=10, **overrides), from_step=6)
    after(ledger, 3)
    ledger.close()
    ledger.leave(MODEL)
    ledger.speak_for({"model.safetensors": 64 * "a"}, model=MODEL)
    return ledger


def write(folder, entries):
    """Write entries as they are."""
    write_entries(folder / LEDGER_NAME, entries)


def document_in(folder):
    return json.loads((folder / LEDGER_NAME).read_text("utf-8"))


def said(capsys):
    """What was printed, without the lines of tables."""
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def without_epsilon_of_begun_runs(entries):
    """Return entries without the ε of 'opened' and 'resumed', as before format 12."""
    begins = ("opened", "resumed")
    return [
        {name: value for name, value in entry.items() if name != "planned_epsilon" or entry["event"] not in begins}
        for entry in entries
    ]


def rehashed(entries):
    """Forge a chain: the entries as they are, with hashes that fit."""
    for index, entry in enumerate(entries):
        entry["previous_hash"] = entries[index - 1]["hash"] if index else ORIGIN
        entry["hash"] = digest(entry)
    return entries
