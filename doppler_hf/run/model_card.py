"""The *Differential privacy* section of a model card, written from the privacy ledger of the training.

It states only what the ledger states, and how to check that. The optimizer is in another place of the card, among the
hyper-parameters.
"""

import re
from pathlib import Path
from typing import Final

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.terms import terms_in_words
from doppler_hf.run.optimizer import optimizer_in_words
from doppler_hf.training_args import DopplerTrainingArguments

# Comments in Markdown: the text between them is replaced when the section is written again.
_BEGIN: Final = "<!-- differential privacy: begin, written from the privacy ledger -->"
_END: Final = "<!-- differential privacy: end -->"


def privacy_section(ledger: PrivacyLedger) -> str:
    """Return the section in Markdown, from its heading to its last line.

    Example:
        >>> print(privacy_section(PrivacyLedger.load("out")))
    """
    statement = ledger.statement
    if ledger.private:
        claim = (
            f"Trained with ({ledger.epsilon():.4g}, {statement.target_delta:.3g})-differential privacy for "
            f"{statement.unit_of_privacy}, by the {statement.accountant} accountant."
        )
    else:
        claim = "**Not differentially private**: there was no noise, or noise or draws can be reproduced."
    lines = [
        "## Differential privacy",
        "",
        claim,
        "",
        "| | |",
        "|---|---|",
        *("| {} | {} |".format(name, value.replace("|", "\\|")) for name, value in _rows(ledger)),
        "",
        "Not covered by ε:",
        "",
        *(f"- {line}" for line in ledger.not_covered),
        "",
        f"`doppler-hf verify` recomputes this from `{LEDGER_NAME}` beside the model. The last hash of that file is",
        "",
        f"    {ledger.head}",
    ]
    return "\n".join(lines) + "\n"


def _rows(ledger: PrivacyLedger) -> list[tuple[str, str]]:
    last = ledger.runs[-1]
    exact = "" if last.is_closed else ", counted ahead: the training is not closed"
    return [
        *terms_in_words(ledger),
        *((f"ε by {name}", f"{epsilon:.4g}") for name, epsilon in ledger.epsilons().items()),
        ("steps", f"{ledger.steps_run:,} run, {ledger.statement.steps_planned:,} planned{exact}"),
        ("software", ", ".join(f"{name} {version}" for name, version in last.versions.items())),
    ]


def complete_card(path: Path, args: DopplerTrainingArguments, *, ledger: PrivacyLedger, filter_words: str) -> None:
    """Add the optimizer and the section on privacy to a card of the host."""
    weight_filter = "" if args.weight_filter is None else f"; on the weights: {args.weight_filter}"
    optimizer = f"{optimizer_in_words(args)}, of doppler_hf; filter: {filter_words}{weight_filter}"
    # In the place of the optimizer that the host's own arguments name.
    text = re.sub(r"^- optimizer: .*$", lambda _: f"- optimizer: {optimizer}", path.read_text("utf-8"), flags=re.MULTILINE)
    path.write_text(text, "utf-8")
    add_privacy_section(path, ledger)


def add_privacy_section(path: str | Path, ledger: PrivacyLedger) -> None:
    """Write the section into a Markdown file, in the place of an earlier one or else at its end.

    Nothing else in the file changes.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If an earlier section in it has lost its beginning or its end.
    """
    path = Path(path)
    text = path.read_bytes().decode("utf-8")  # which keeps the line ends
    newline = "\r\n" if "\r\n" in text else "\n"
    section = f"{_BEGIN}\n{privacy_section(ledger)}{_END}".replace("\n", newline)
    begin, end = text.find(_BEGIN), text.find(_END)
    if text.count(_BEGIN) != text.count(_END) or text.count(_BEGIN) > 1 or end < begin:
        raise ValueError(
            f"{path} must have the lines {_BEGIN!r} and {_END!r} once each, in this order, or not at all, got "
            f"{text.count(_BEGIN)} and {text.count(_END)} of them. Delete the section with these lines to have it rewritten."
        )
    if begin < 0:
        gap = newline * (0 if not text else 1 if text.endswith(newline) else 2)
        text = f"{text}{gap}{section}{newline}"
    else:
        text = text[:begin] + section + text[end + len(_END) :]
    path.write_bytes(text.encode("utf-8"))
