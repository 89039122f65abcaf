"""The part of a model card that a run writes: between two comments, of which the second has a digest of each line.

A line with another digest was written by hand.
"""

import hashlib
import re
from typing import Final, NamedTuple

CARD_NAME: Final = "README.md"
BEGIN: Final = "<!-- doppler_hf writes this part again with each save. Write above or below it: that text is kept. -->"
END: Final = "<!-- doppler_hf: end of this part "
PART: Final = re.compile(rf"^{re.escape(BEGIN)}\n(.*?)^{re.escape(END)}([0-9a-f ]*)-->\n?", re.MULTILINE | re.DOTALL)
HEAD: Final = re.compile(r"^    ([0-9a-f]{64})$")  # The head of the ledger needs no digest to be recognised.
_OF_PEFT: Final = re.compile(r"^- PEFT \S+$")  # PEFT adds this line wherever it sees another version.


class CardPart(NamedTuple):
    """What a card has between the two comments."""

    heads: list[str]  # of ledgers
    by_hand: list[str]  # the lines that no run wrote


def marked(part: str) -> str:
    """Return a part between its two comments, of which the second has a digest of each line."""
    lines = [digest(line) for line in part.splitlines() if line.strip() and not HEAD.match(line)]
    return f"{BEGIN}\n\n{part.strip()}\n\n{END}{' '.join(dict.fromkeys(lines))} -->\n"


def digest(line: str) -> str:
    """Return by which a line of a part is known again, whatever blanks an editor leaves at its end."""
    return hashlib.sha256(line.rstrip().encode()).hexdigest()[:8]


def is_of_peft(line: str) -> bool:
    """Return whether PEFT adds such a line to a card."""
    return bool(_OF_PEFT.match(line))


def read_part(found: re.Match[str]) -> CardPart:
    """Return the content of a part that `PART` has found."""
    known = set(found[2].split())
    lines = [line for line in found[1].splitlines() if line.strip() and not is_of_peft(line)]
    heads = [head[1] for line in lines if (head := HEAD.match(line))]
    return CardPart(heads, [line for line in lines if digest(line) not in known and not HEAD.match(line)])
