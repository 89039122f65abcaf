"""The card says what the ledger says, and writing it touches nothing else in the file."""

import pytest

from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from doppler_hf.privacy.accounting.attack import percent, trade_off
from doppler_hf.run.model_card import complete_card, privacy_section, renew_section
from tests.support.ledgers import after, all_events, statement
from tests.support.trainers import arguments

CARD = (
    "---\nlicense: mit\n---\n\n# A model\n\n"
    "- learning_rate: None\n- optimizer: Transformers'\n- seed: 42\n\n## Usage\n\nσ | ε\n"
)


def rows(section):
    """The table's rows as a dictionary."""
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [line.replace("\\|", "¦").strip("|").split("|") for line in lines]
    assert all(len(cell) == 2 for cell in cells)
    return {name.strip(): value.strip() for name, value in cells}


# Of a ledger of all events: the second begins a round of its own, and ended a step before its plan.
TWO_RUNS = [Releases(1.0, 0.05, 7), Releases(1.0, 0.05, 4)]


def test_the_section_says_what_the_ledger_says():
    ledger = all_events(train_loss="raw", target_epsilon=8.0)
    section = privacy_section(ledger)
    table = rows(section)
    epsilon = get_total_epsilon(TWO_RUNS, delta=1e-5)
    assert {name: row for name, row in table.items() if name.startswith("ε by")} == {"ε by pld": f"{epsilon:.4g}"}
    assert f"Trained with ({ledger.epsilon():.4g}, 1e-05)-differential privacy for one record, by the pld" in section
    best = trade_off(TWO_RUNS)
    rates = {"1 %": percent(best.true_positive_rate(0.01)), "0.1 %": percent(best.true_positive_rate(0.001))}
    for false, true in rates.items():
        assert table[f"any attack with {false} false positives"] == f"at most {true} true positives"
    assert f"recognises a training record with a probability of at most {rates['1 %']};" in section
    assert table["ε covers"] == "one record"
    assert table["neighbouring data sets"] == "add or remove one record"
    assert table["number of records N"] == "1,000 (public, not protected)"
    assert table["target ε"] == "8"
    assert table["restarts"] == "at step 6"
    assert table["steps"] == "10 of 10 planned"
    assert table["noise multiplier σ"] == "1"
    for steps in (7, 4):
        assert table[f"ε computed for {steps} steps"] == "σ₀ = 1, sample rate q = 0.05"
    assert table["clip norm C"] == "1 (automatic, flat)"
    assert table["noise source"] == "a test"
    assert "NOT PRIVATE" in table["training loss"]
    assert "opacus " in table["software"]
    for line in ledger.not_covered:
        assert f"\n- {line}\n" in section
    assert all(choice in section for choice in ("best checkpoint", "early stopping", "hyper-parameter search"))
    assert f"\n    {ledger.head}\n" in section
    assert "`doppler-hf verify`" in section
    assert section.startswith("## Differential privacy\n")


@pytest.mark.parametrize(
    ("terms", "why"),
    [(dict(private=False), "no noise, noise or draws"), (dict(target_delta=1e-3), "δ ≥ 1/N, with which one")],
)
def test_what_is_not_private_is_not_called_so(terms, why):
    section = privacy_section(after(PrivacyLedger.open(statement(**terms)), 2))
    assert f"**Not differentially private**: {why}" in section
    assert "Trained with" not in section
    assert "attack" not in section
    assert (rows(section)["ε by pld"] == "inf") == (terms == dict(private=False))


def test_the_section_ends_the_card_and_nothing_but_rate_and_optimizer_changes(tmp_path):
    path, ledger = tmp_path / "README.md", all_events(private=False)
    path.write_text(CARD)
    complete_card(path, arguments(tmp_path), ledger=ledger, words={"rate": "0.0125 (as given)", "filter": "none (auto)"})
    lines = "- learning_rate: 0.0125 (as given)\n- optimizer: adam_bc, of doppler_hf; filter: none (auto)"
    card = CARD.replace("- learning_rate: None\n- optimizer: Transformers'", lines)
    expected = card + "\n" + privacy_section(ledger)
    assert path.read_text() == expected
    path.write_text(expected + "\n### Framework versions\n")  # as PEFT does
    renew_section(path, ledger)
    assert path.read_text() == card + "\n### Framework versions\n\n" + privacy_section(ledger)
    renew_section(path, None)
    assert path.read_text() == card + "\n### Framework versions\n"
