"""The quick start does what the README shows."""

import pytest

from doppler_hf.privacy import PrivacyLedger
from scripts import quickstart


@pytest.mark.slow
def test_quickstart_prints_one_table_and_draws_the_curves(tmp_path, monkeypatch, capsys):
    """On the digits that stand in for MNIST where there is no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "load", lambda dataset_dir: ("digits", quickstart.load_images("digits")))
    quickstart.main([])
    printed = capsys.readouterr().out
    assert printed.count("┏") == 1
    assert "Both are the same method here" in printed
    ledgers = sorted((tmp_path / "out" / "quickstart").glob("*/privacy_ledger.json"))
    assert len(ledgers) == 4
    for ledger in ledgers:
        written = PrivacyLedger.load(ledger)
        assert written.private
        assert 2.98 < written.epsilon() <= 3.0
    assert (tmp_path / "out" / "quickstart" / "learning_curves.png").stat().st_size > 10_000


def test_without_a_hub_digits_stand_in_and_a_wrong_folder_is_an_error(tmp_path, monkeypatch, capsys):
    def no_hub(name, dataset_dir):
        raise ValueError("ylecun/mnist cannot be reached.")

    loaded = quickstart.load_images
    monkeypatch.setattr(
        quickstart, "load_images", lambda name, folder=None: loaded(name) if name == "digits" else no_hub(name, folder)
    )
    name, splits = quickstart.load(None)
    assert name == "digits"
    assert "cannot be reached" in capsys.readouterr().out
    assert quickstart.examples(splits["test"])[0]["inputs"].shape == (1, 28, 28)
    with pytest.raises(ValueError, match="cannot be reached"):
        quickstart.load(str(tmp_path))
