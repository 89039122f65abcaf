"""A chain of entries: hash_i = SHA-256(canonical JSON of entry i without its hash), previous_hash_i = hash_{i−1}.

This reveals an edited, missing, inserted or exchanged entry. It does not reveal a tail that was cut off, or a chain that was
rewritten: against these, publish the last hash (the head) where it cannot be changed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

Entry = dict[str, Any]

# The previous hash of the first entry.
ORIGIN: Final = "0" * 64


def digest(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an entry's canonical JSON (sorted keys, no blanks, UTF-8), without its own `hash`."""
    hashed = {name: value for name, value in entry.items() if name != "hash"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate, which JSON allows, must give another hash and not an encoding error.
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def next_entry(entries: Sequence[Entry], event: str, payload: Mapping[str, Any]) -> Entry:
    """Return an entry of `event` that follows `entries`; `payload` holds plain JSON values."""
    entry = {
        "index": len(entries),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": event,
        **payload,
        "previous_hash": entries[-1]["hash"] if entries else ORIGIN,
    }
    return {**entry, "hash": digest(entry)}


def check(entries: Sequence[Entry]) -> None:
    """Check that no entry was changed or moved; the error has the first one, with both values."""
    for index, entry in enumerate(entries):
        expected = {"index": index, "previous_hash": entries[index - 1]["hash"] if index else ORIGIN, "hash": digest(entry)}
        for name, value in expected.items():
            if entry[name] != value:
                raise ValueError(
                    f"Entry {index} ({entry['event']!r}) was changed or moved: its {name} must be {value!r}, got "
                    f"{entry[name]!r}. Take the file from an unchanged copy."
                )
