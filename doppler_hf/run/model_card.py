"""Write the *Differential privacy* section of a model card from the privacy ledger of the run.

The section states only what the ledger states, and how to check it. The optimizer is in another part of the card, among the
hyper-parameters. Transformers writes a card when it is asked to, and PEFT writes one whenever it saves an adapter.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.terms import account_in_words, claim_in_words
from doppler_hf.run.optimizer import optimizer_in_words
from doppler_hf.training_args import DopplerTrainingArguments

CARD_NAME: Final = "README.md"
HEADING: Final = "## Differential privacy"


def privacy_section(ledger: PrivacyLedger) -> str:
    """Return the section in Markdown, from its heading to its last line."""
    lines = [
        HEADING,
        "",
        claim_in_words(ledger).replace("Not differentially private", "**Not differentially private**"),
        "",
        "| | |",
        "|---|---|",
        *("| {} | {} |".format(name, value.replace("|", "\\|")) for name, value in account_in_words(ledger)),
        "",
        "Not covered by ε:",
        "",
        *(f"- {line}" for line in ledger.not_covered),
        "",
        f"`doppler-hf verify` recomputes this from `{LEDGER_NAME}` next to the model. The last hash of that file is",
        "",
        f"    {ledger.head}",
    ]
    return "\n".join(lines) + "\n"


def with_columns_in_one_order(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a trainer's logs in which all evaluations have the same names in the same order, with "" for missing values."""
    names = dict.fromkeys(name for row in log_history if "eval_loss" in row for name in row)
    return [{name: row.get(name, "") for name in names} if "eval_loss" in row else row for row in log_history]


def renew_section(path: Path, ledger: PrivacyLedger | None) -> None:
    """Replace the privacy section of a card by the section of a ledger at its end; without a ledger, only remove it."""
    text = path.read_text("utf-8")
    kept = re.sub(rf"^{HEADING}\n.*?(?=^#|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).rstrip() + "\n"
    if ledger is not None or HEADING in text:
        path.write_text(kept if ledger is None else f"{kept}\n{privacy_section(ledger)}", "utf-8")


def complete_card(path: Path, args: DopplerTrainingArguments, *, ledger: PrivacyLedger, words: Mapping[str, str]) -> None:
    """Complete a card that Transformers has just written: learning rate, optimizer, a heading for ε, and privacy."""
    optimizer = f"{optimizer_in_words(args)}, of doppler_hf; filter: {words['filter']}"
    # These lines replace the values of Transformers' own arguments.
    text = path.read_text("utf-8")
    for line in (f"- learning_rate: {words['rate']}", f"- optimizer: {optimizer}"):
        text = "\n".join(line if each.startswith(line[: line.index(":") + 1]) else each for each in text.split("\n"))
    # Transformers' table of evaluations heads a column by what follows the first "_" in its name, and "epsilon" has none.
    text = re.sub(r"^(\| Training Loss \|.*\| ) ", r"\1ε", text, flags=re.MULTILINE)
    path.write_text(text, "utf-8")
    renew_section(path, ledger)
