"""Entries are hashed as stated, none can be edited, taken out, put in or moved, and one writer holds their folder."""

import errno
import hashlib
import sys
import threading

import pytest

from doppler_hf.errors import Refusal
from doppler_hf.privacy.ledger import file
from doppler_hf.privacy.ledger.file import LOCK_NAME, WriterLock, check_chain, digest, next_entry
from tests.support.refusals import refused


def three():
    entries = []
    for event in ("first", "σ = 1", "third"):
        entries.append(next_entry(entries, event, {"value": [1, 2.5, None, True], "a": {"c": 1, "b": 2}}))
    return entries


def test_the_hash_is_sha256_of_the_canonical_json():
    first, second, _ = three()
    text = '{"a":{"b":2,"c":1},"event":"σ = 1","index":1,"previous_hash":"PREVIOUS","time":"TIME","value":[1,2.5,null,true]}'
    text = text.replace("PREVIOUS", first["hash"]).replace("TIME", second["time"])
    assert second["hash"] == hashlib.sha256(text.encode()).hexdigest()
    assert first["previous_hash"] == "0" * 64
    assert digest({"σ": "\ud800"}) == hashlib.sha256(b'{"\xcf\x83":"\xed\xa0\x80"}').hexdigest()


def test_a_chain_as_it_was_written_is_accepted():
    check_chain([])
    check_chain(three())


def edited(entries):
    entries[1]["value"][0] = 1.0  # equal in Python, another number in the file


def hashed_anew(entries):
    entries[1]["event"] = "σ = 2"
    entries[1]["hash"] = digest(entries[1])


@pytest.mark.parametrize(
    ("edit", "entry", "what"),
    [
        (edited, 1, "hash"),
        (hashed_anew, 2, "previous_hash"),
        (lambda entries: entries[2].update(event="Third"), 2, "hash"),
        (lambda entries: entries[1].pop("value"), 1, "hash"),
        (lambda entries: entries.pop(1), 1, "index"),
        (lambda entries: entries.insert(1, entries[1]), 2, "index"),
        (lambda entries: entries[1].update(previous_hash="0" * 64, hash=None), 1, "previous_hash"),
    ],
)
def test_an_edit_is_found_and_named(edit, entry, what):
    entries = three()
    edit(entries)
    with refused("ledger-changed", match=f"Entry {entry} .* {what}"):
        check_chain(entries)


def test_one_writer_holds_a_folder(tmp_path):
    one, other = WriterLock(tmp_path / "out"), WriterLock(tmp_path / "out")
    with one, one:
        with refused("folder-in-use", match="output_dir"), other:
            pass
        with WriterLock(tmp_path / "elsewhere"):
            pass
    with other:
        pass


def test_a_writer_that_fails_holds_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), WriterLock(tmp_path):
        raise KeyboardInterrupt
    with WriterLock(tmp_path):
        pass


def test_a_lock_leaves_no_file(tmp_path):
    folder = tmp_path / "out"
    one = WriterLock(folder)
    with one:
        with one:
            assert (folder / LOCK_NAME).exists()
        assert (folder / LOCK_NAME).exists()  # the run that holds it has only finished saving
        with refused("folder-in-use"), WriterLock(folder):
            pass
        assert (folder / LOCK_NAME).exists()
    assert [*folder.iterdir()] == []
    with pytest.raises(KeyboardInterrupt), one:
        raise KeyboardInterrupt
    assert [*folder.iterdir()] == []


def test_the_lock_file_of_a_killed_process_holds_nothing_and_goes(tmp_path):
    """Versions before 0.4 left the file in each folder, too."""
    (tmp_path / LOCK_NAME).touch()
    with WriterLock(tmp_path):
        pass
    assert [*tmp_path.iterdir()] == []


needs_flock = pytest.mark.skipif(file.flock is None, reason="the library locks where the system has no flock")


@needs_flock
def test_two_writers_never_hold_a_folder_though_the_file_goes_between_opening_and_locking(tmp_path, monkeypatch):
    """A process opens the file, its holder removes it, and a third process makes a new one; then the first locks its own."""
    holder, third = WriterLock(tmp_path), WriterLock(tmp_path)
    holder.__enter__()
    waits = [True]

    def late(number, operation, flock=file.flock):
        if waits.pop() if waits else False:
            holder.__exit__()
            third.__enter__()
        flock(number, operation)

    monkeypatch.setattr(file, "flock", late)
    with refused("folder-in-use"), WriterLock(tmp_path):
        pass
    assert not waits
    third.__exit__()
    assert [*tmp_path.iterdir()] == []


@needs_flock
def test_a_holder_does_not_remove_the_file_of_another_run(tmp_path):
    """Somebody has moved the folder of a run away, and another run uses a new folder of this name."""
    folder = tmp_path / "out"
    one, other = WriterLock(folder), WriterLock(folder)
    one.__enter__()
    folder.rename(tmp_path / "moved")
    other.__enter__()
    one.__exit__()
    with refused("folder-in-use"), WriterLock(folder):
        pass
    other.__exit__()
    assert [*folder.iterdir()] == []


@needs_flock
def test_a_file_system_without_such_locks_has_those_of_the_library(tmp_path, monkeypatch):
    def unknown(number, operation):
        raise OSError(errno.ENOSYS, "no such locks")

    monkeypatch.setattr(file, "flock", unknown)
    with WriterLock(tmp_path), refused("folder-in-use"), WriterLock(tmp_path):
        pass
    with WriterLock(tmp_path):
        pass


def count(folder, number):
    """Raise a number in a file, as nobody may who does not hold the folder."""
    counted = folder / "number"
    for _ in range(number):
        while True:
            try:
                with WriterLock(folder):
                    before = int(counted.read_text())
                    counted.write_text(str(before + 1))
                break
            except Refusal:
                pass


def test_many_that_lock_and_remove_are_never_in_a_folder_together(tmp_path):
    """Locks of threads exclude each other as locks of processes do, since each opens the file for itself."""
    (tmp_path / "number").write_text("0")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count, args=(tmp_path, 100)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert (tmp_path / "number").read_text() == "400"
    assert {path.name for path in tmp_path.iterdir()} == {"number"}
