"""The file of a privacy ledger: a chain of entries as JSON, written whole or not at all by one run at a time.

    {"$schema": "urn:doppler-hf:privacy-ledger:12", "format_version": 12, "entries": […]}
    hash_i = SHA-256(canonical JSON of entry i without its hash),    previous_hash_i = hash_{i−1}

Reading refuses content outside the schema. The chain reveals an edited,
missing, inserted or exchanged entry. It does not reveal entries that were cut off at the end, or a chain that was rewritten
as a whole. Against these, publish the last hash (the head) where nobody can change it.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import platform
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from doppler_hf.errors import Refusal
from doppler_hf.version import VERSION

if sys.platform == "win32":
    flock = None
    _EXCLUSIVE = _UNLOCKED = 0
else:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

    _EXCLUSIVE, _UNLOCKED = LOCK_EX | LOCK_NB, LOCK_UN

Entry = dict[str, Any]

# Formats 9 to 11 are read too. Format 11 has no ε in the first entry of a run. Format 10 does not say whether a run
# continues the plan, and has no marks of trained weights. Format 9 has the ε of the steps so far.
FORMAT: Final = 12
SCHEMA: Final = f"urn:doppler-hf:privacy-ledger:{FORMAT}"

LOCK_NAME: Final = "_privacy_ledger.lock"  # Transformers does not upload files with names that begin with "_".
_HELD: Final = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK}  # errors of a lock that another process holds
_PACKAGES: Final = ("torch", "transformers", "opacus", "dp-accounting", "numpy")
# The first entry has this as its previous hash.
ORIGIN: Final = "0" * 64


def digest(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an entry's canonical JSON (sorted keys, no blanks, UTF-8), without its own `hash`."""
    hashed = {name: value for name, value in entry.items() if name != "hash"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate, which JSON allows, must change the hash and not raise an encoding error.
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def now() -> str:
    """Return the present time as entries have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def next_entry(entries: Sequence[Entry], event: str, payload: Mapping[str, Any], *, time: str | None = None) -> Entry:
    """Return an entry of `event` that follows `entries`, with the present time; `payload` holds plain JSON values."""
    entry = {
        "index": len(entries),
        "time": now() if time is None else time,
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
                    f"Entry {index} of the ledger ({entry['event']!r}) was changed or moved: its {name} is "
                    f"{entry[name]!r}, but {value!r} follows from the rest of the file. Restore an unchanged copy.",
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


# The advice for a file that cannot be read, if it has no backup.
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
    write_whole(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file such that after a crash, a power failure or with a full disk, the old or the new file is there."""
    # The name is random, because two runs may write at the same time. It begins like that of the file, since a kill may
    # leave it behind, and `push_to_hub` leaves out names that begin with "_".
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    if not path.parent.exists():
        make_folder(path.parent)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    synchronize_names(path.parent)


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """Make a folder and those above it, which are then there after a power failure, too; `mode` is that of `folder`."""
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    # The folders may be there already, made a moment ago: Transformers makes `output_dir` together with the trainer.
    for each in reversed(folder.absolute().parents):
        with contextlib.suppress(OSError):  # a folder that is another user's need not be readable
            synchronize_names(each)


def synchronize_files(folder: Path) -> None:
    """Let a folder, with all files and folders in it, survive a power failure."""
    for path in folder.rglob("*"):
        if path.is_dir():
            synchronize_names(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    synchronize_names(folder)


def synchronize_names(folder: Path) -> None:
    """Let the names of the files in a folder, which may be new or changed, survive a power failure."""
    if os.name != "posix":  # Elsewhere folders cannot be synchronized.
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class WriterLock:
    """Prevents other runs, in this or another process, from writing to the ledger of a folder; can be entered repeatedly.

    The lock is a file in the folder, which is removed when the lock is released. If a process is killed, the file stays, but
    it is no longer locked, so the next run can use the folder and removes the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._times_entered = 0
        self._release: Callable[[], object] | None = None

    def __enter__(self) -> None:
        if self._times_entered == 0:
            make_folder(self._folder)
            release = _locked(self._folder / LOCK_NAME)
            if release is None:
                raise Refusal(
                    "folder-in-use",
                    f"Another private run is using the folder {self._folder}. Use another output_dir, or wait until that "
                    "run has ended.",
                )
            self._release = release
        self._times_entered += 1

    def __exit__(self, *exception: object) -> None:
        self._times_entered -= 1
        if self._times_entered == 0 and self._release is not None:
            self._release()


def _locked(path: Path) -> Callable[[], object] | None:
    """Lock a file, and return a function that releases and removes it; None if another lock holds the file.

    Removing the file is safe, because the holder removes it while it still has the lock, and because whoever gets the lock
    compares the file that it has locked with the file of that name. Suppose that a process opens the file just before the
    holder removes it. It then gets the lock of a file without a name, while another process can make a new file of that name
    and lock it, too. The comparison fails in the first process, which starts again with the new file. If the comparison
    succeeds, the file keeps its name, since nobody but the holder removes it.
    """
    if flock is None:
        return _locked_by_library(path)
    while True:
        try:
            file, is_new = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            try:
                file, is_new = os.open(path, os.O_RDWR | os.O_NOFOLLOW), False
            except FileNotFoundError:
                continue  # The process that held the lock has just removed the file.
        try:
            flock(file, _EXCLUSIVE)
            if _is_named(file, path):
                return functools.partial(_unlock_and_remove, os.dup(file), path)
        except OSError as error:
            if error.errno in _HELD:
                return None
            if is_new:  # The lock's library would mistake this error for the lock of another process.
                path.unlink(missing_ok=True)
            return _locked_by_library(path)  # Some file systems have no such locks.
        finally:
            os.close(file)


def _is_named(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _unlock_and_remove(file: int, path: Path) -> None:
    try:
        # The file is removed before it is unlocked. A folder that somebody has replaced since may have another run's file.
        if _is_named(file, path):
            path.unlink(missing_ok=True)
    finally:
        # Workers of data loaders have copies of the file, so closing it here would not release the lock.
        flock(file, _UNLOCKED)
        os.close(file)


def _locked_by_library(path: Path) -> Callable[[], object] | None:
    """Lock a file with the library, where the system has no `flock`. The library removes the file where that is safe."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock.release
