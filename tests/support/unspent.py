"""What a refusal before the first step leaves: no ledger, in the run or on disk."""

from pathlib import Path

import pytest

from doppler_hf.errors import Refusal


def refusal_unspent(trainer, code):
    """Train, and return the message of a refusal with this code that has spent nothing."""
    with pytest.raises(Refusal) as refused:
        trainer.train()
    assert refused.value.code == code, str(refused.value)
    assert_unspent(trainer)
    return str(refused.value)


def assert_unspent(trainer):
    assert trainer.privacy.ledger is None
    assert not list(Path(trainer.args.output_dir).rglob("privacy_ledger.json"))
