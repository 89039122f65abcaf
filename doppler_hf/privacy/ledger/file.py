"""The file of a privacy ledger: a chain of entries as JSON, written whole or not at all by one run at a time.

    {"$schema": "urn:doppler-hf:privacy-ledger:11", "format_version": 11, "entries": […]}
    hash_i = SHA-256(canonical JSON of entry i without its hash),    previous_hash_i = hash_{i−1}

Reading refuses content outside the schema. The chain reveals an edited,
missing, inserted or exchanged entry. It does not reveal entries that were cut off at the end, or a chain that was rewritten
as a whole. Against these, publish the last hash (the head) where nobody can change it.
"""

import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from doppler_hf.errors import Refusal
from doppler_hf.version import VERSION

Entry = dict[str, Any]

# Formats 10 and 9 are read too. Format 10 does not say whether a run continues the plan, and has no marks of trained
# weights. Format 9 has the ε of the steps so far.
FORMAT: Final = 11
SCHEMA: Final = f"urn:doppler-hf:privacy-ledger:{FORMAT}"

LOCK_NAME: Final = "_privacy_ledger.lock"  # Transformers does not upload files with names that begin with "_".
_PACKAGES: Final = ("torch", "transformers", "opacus", "dp-accounting", "numpy")
# The first entry has this as its previous hash.
ORIGIN: Final = "0" * 64


def digest(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an entry's canonical JSON (sorted keys, no blanks, UTF-8), without its own `hash`."""
    hashed = {name: value for name, value in entry.items() if name != "hash"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate, which JSON allows, must change the hash and not raise an encoding error.
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


def check_chain(entries: Sequence[Entry]) -> None:
    """Check that no entry was changed or moved; the error names the first such entry and both values."""
    for index, entry in enumerate(entries):
        expected = {"index": index, "previous_hash": entries[index - 1]["hash"] if index else ORIGIN, "hash": digest(entry)}
        for name, value in expected.items():
            if entry[name] != value:
                raise Refusal(
                    "ledger-changed",
                    f"Entry {index} ({entry['event']!r}) was changed or moved: its {name} is {entry[name]!r}, but "
                    f"{value!r} follows from the rest of the file. Restore the file from an unchanged copy.",
                )


_version = functools.cache(
    importlib.metadata.version
)  # The result is cached, because each call reads the whole description of a package.


def package_versions() -> dict[str, str]:
    """Return the versions of the packages for noise, clipping and accounting."""
    of_others = {name: _version(name) for name in _PACKAGES}
    return {"doppler_hf": VERSION} | of_others | {"python": platform.python_version()}


@functools.cache
def schema_validator() -> Any:
    """Return the validator of `ledger.schema.json`."""
    schema = json.loads(importlib.resources.files(__package__).joinpath("ledger.schema.json").read_text("utf-8"))
    return Draft202012Validator(schema)


# What to do about a file that cannot be read, if it has no backup.
_WITHOUT_BACKUP: Final = (
    "If there is none, copy the ledger from the folder of the latest checkpoint, which lacks the steps after it. Without "
    "any copy, move the file away, and the next run begins a new ledger. ε that was spent but is missing from the ledger "
    "still counts."
)


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of the file, checked against the schema and as a chain."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise Refusal(
            "not-a-ledger",
            f"This file is not a privacy ledger, because it is not valid JSON: {reason}. Restore the file from a "
            f"backup. {_WITHOUT_BACKUP}",
        ) from error
    mismatch = best_match(schema_validator().iter_errors(document))
    if mismatch is not None:
        raise Refusal(
            "not-a-ledger",
            f"This is not a privacy ledger of format {FORMAT}: at {mismatch.json_path}, {mismatch.message}. Restore the "
            f"file from a backup. {_WITHOUT_BACKUP}",
        )
    entries: list[Entry] = document["entries"]
    check_chain(entries)
    return entries


def is_earlier_state(path: Path, entries: Sequence[Entry]) -> bool:
    """Return whether the file has the first of `entries`, or all; a comparison alone keeps frequent saving cheap."""
    try:
        there = json.loads(path.read_text("utf-8"))["entries"]
        return bool(there == entries[: len(there)])
    except (ValueError, KeyError, TypeError):  # The file is damaged, or is not a ledger.
        return False


def write_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Write the file such that after a crash, or with a full disk, either the old or the new file is there."""
    document = {"$schema": SCHEMA, "format_version": FORMAT, "entries": list(entries)}
    temporary = path.with_name(
        f".{path.name}.{secrets.token_hex(4)}"
    )  # The name is random, because two runs may write at the same time.
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # The new name must survive a power failure too. Elsewhere folders cannot be synchronized.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class WriterLock:
    """Prevents other runs, in this or another process, from writing to the ledger of a folder; can be entered repeatedly."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._lock = FileLock(self._folder / LOCK_NAME, thread_local=False)

    def __enter__(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Refusal(
                "folder-in-use",
                f"Another private run is using the folder {self._folder}. Use another output_dir, or wait until that run "
                "has ended.",
            ) from None

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
