"""The card says what the ledger says, and writing it touches nothing else in the file."""

import pytest

from doppler_hf.privacy import PrivacyLedger, get_epsilon
from doppler_hf.run.model_card import add_privacy_section, privacy_section
from tests.support.ledgers import after, all_events, statement

CARD = "---\nlicense: mit\n---\n\n# A model\n\n## Differential privacy\n\nOur own words.\n\n## Usage\n\nσ | ε\n"


def rows(section):
    """The table's rows as a dictionary."""
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [line.replace("\\|", "¦").strip("|").split("|") for line in lines]
    assert all(len(cell) == 2 for cell in cells)
    return {name.strip(): value.strip() for name, value in cells}


def test_the_section_says_what_the_ledger_says():
    ledger = all_events(train_loss="raw", target_epsilon=8.0)
    section = privacy_section(ledger)
    table = rows(section)
    for name in ("prv", "rdp", "pld"):
        epsilon = get_epsilon(noise_multiplier=1.0, sample_rate=0.05, steps=10, delta=1e-5, accountant=name)
        assert table[f"ε by {name}"] == f"{epsilon:.4g}"
    assert f"Trained with ({ledger.epsilon():.4g}, 1e-05)-differential privacy for one example, by the prv" in section
    assert table["unit of privacy"] == "one example"
    assert table["neighbouring data sets"] == "add or remove one unit"
    assert table["number of units N"] == "1,000 (public, not protected)"
    assert table["target ε"] == "8"
    assert table["restarts"] == "at step 6"
    assert table["steps"] == "10 run, 10 planned"
    assert table["noise multiplier σ, sampling rate q of 10 steps"] == "1, 0.05"
    assert table["clip norm C"] == "1 (automatic, flat)"
    assert table["noise source"] == "a test"
    assert "NOT PRIVATE" in table["training loss"]
    assert "opacus " in table["software"]
    for line in ledger.not_covered:
        assert f"\n- {line}\n" in section
    assert f"\n    {ledger.head}\n" in section
    assert "`doppler-hf verify`" in section
    assert section.startswith("## Differential privacy\n")


def test_what_is_not_private_is_not_called_so():
    section = privacy_section(after(PrivacyLedger.open(statement(private=False)), 2))
    assert "**Not differentially private**" in section
    assert "Trained with" not in section
    assert rows(section)["ε by prv"] == "inf"


def test_units_with_a_cap_and_a_private_loss_are_described():
    terms = dict(train_loss="private", per_sample_max_loss=4.0, loss_noise_multiplier=3.0)
    units = dict(unit_of_privacy="all examples with the same 'user|id'", max_examples_per_unit=7)
    table = rows(privacy_section(after(PrivacyLedger.open(statement(**terms, **units)), 2)))
    assert table["unit of privacy"] == "all examples with the same 'user¦id', at most 7 of them in a draw"
    assert table["training loss"] == "private: clipped to 4, noise multiplier 3"
    assert "counted ahead" in table["steps"]


@pytest.mark.parametrize("card", [CARD, CARD.rstrip("\n"), "", CARD.replace("\n", "\r\n")])
def test_the_section_is_added_replaced_and_repeated_without_a_trace(tmp_path, card):
    path, ledger = tmp_path / "README.md", all_events(private=False)
    path.write_bytes(card.encode())
    add_privacy_section(path, ledger)
    once = path.read_bytes().decode()
    newline = "\r\n" if "\r\n" in card else "\n"
    section = privacy_section(ledger).replace("\n", newline)
    assert once.startswith(card)
    assert once.count(section) == 1
    assert once.endswith(newline)
    assert "\n" not in once.replace(newline, "")
    add_privacy_section(path, ledger)
    assert path.read_bytes().decode() == once
    # Somebody wrote on below it; a later run has another ledger.
    path.write_bytes((once + "The end." + newline).encode())
    later = all_events(private=False)
    add_privacy_section(str(path), later)
    expected = once.replace(section, privacy_section(later).replace("\n", newline))
    assert path.read_bytes().decode() == expected + "The end." + newline
    assert ledger.head not in path.read_text()


@pytest.mark.parametrize("kept", [0, 1])
def test_a_section_that_lost_an_end_is_refused_and_the_file_left_alone(tmp_path, kept):
    path, ledger = tmp_path / "README.md", all_events(private=False)
    path.write_text("")
    add_privacy_section(path, ledger)
    frame = [line for line in path.read_text().splitlines() if line.startswith("<!--")]
    for text in (frame[kept], "\n".join(reversed(frame)), "\n".join(2 * frame)):
        path.write_text(text)
        with pytest.raises(ValueError, match="Delete the section"):
            add_privacy_section(path, ledger)
        assert path.read_text() == text


def test_a_missing_card_is_not_made_up(tmp_path):
    with pytest.raises(FileNotFoundError):
        add_privacy_section(tmp_path / "README.md", all_events(private=False))
