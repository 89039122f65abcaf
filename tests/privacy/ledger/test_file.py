"""Entries are hashed as stated, none can be edited, taken out, put in or moved, and one writer holds their folder."""

import hashlib

import pytest

from doppler_hf.privacy.ledger.file import WriterLock, check_chain, digest, next_entry
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
