"""The quick start does what the README shows."""

import pytest

from doppler_hf.privacy import PrivacyLedger
from scripts import quickstart


@pytest.mark.slow
def test_quickstart_prints_one_table_and_draws_the_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quickstart.main()
    printed = capsys.readouterr().out
    assert printed.count("┏") == 1
    ledgers = sorted((tmp_path / "out" / "quickstart").glob("*/privacy_ledger.json"))
    assert len(ledgers) == 6
    for ledger in ledgers:
        written = PrivacyLedger.load(ledger)
        assert written.private
        assert 1.99 < written.epsilon() <= 2.0
    assert (tmp_path / "out" / "quickstart" / "learning_curves.png").stat().st_size > 10_000
