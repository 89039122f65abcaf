"""A list of entries to which one can only add: every entry carries the hash of the one before.

    hash_i = SHA-256(canonical JSON of entry i without its hash),   previous_hash_i = hash_{i−1}

so an edited, missing, inserted or exchanged entry shows. What does not show is a tail that was cut off, or a chain that was
written anew as a whole: for that, the last hash (the head) has to be published where nobody can change it. This file knows
nothing of what the entries say.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

Entry = dict[str, Any]

# What the first entry names as its predecessor.
ORIGIN: Final = "0" * 64


def digest(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an entry's canonical JSON (sorted keys, no blanks, UTF-8), its own `hash` left out."""
    hashed = {name: value for name, value in entry.items() if name != "hash"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate, which JSON can spell, must end in another hash and not in an encoding error.
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def next_entry(entries: Sequence[Entry], event: str, payload: Mapping[str, Any]) -> Entry:
    """Return the entry that says `event` after `entries`; `payload` holds plain JSON values."""
    entry = {
        "index": len(entries),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": event,
        **payload,
        "previous_hash": entries[-1]["hash"] if entries else ORIGIN,
    }
    return {**entry, "hash": digest(entry)}


def check(entries: Sequence[Entry]) -> None:
    """Check that every entry is as it was written, and where it was written.

    Raises:
        ValueError: The first entry that is not, with both values.
    """
    for index, entry in enumerate(entries):
        expected = {
            "index": index,
            "previous_hash": entries[index - 1]["hash"] if index else ORIGIN,
            "hash": digest(entry),
        }
        for name, value in expected.items():
            if entry[name] != value:
                raise ValueError(
                    f"Entry {index} ({entry['event']!r}) is not as it was written, or not where it was written: its {name} "
                    f"is {entry[name]!r} and should be {value!r}. Take the file from a copy that nobody has changed."
                )
