"""A full disk ends a run in an error: ledgers are whole, no step is lost, and half a checkpoint is none.

The limit on the size of a file is the operating system's, and writing fails in the middle of the file that exceeds it, in
Python, safetensors and torch alike. A disk that is really full is made where the system lets us mount one.
"""

import contextlib
import errno
import os

import pytest

from doppler_hf.privacy import PrivacyLedger
from tests.support.ledgers import statement

resource = pytest.importorskip("resource", reason="only POSIX limits the sizes of files")
TOO_LARGE = os.strerror(errno.EFBIG)
OPTIONS = dict(max_steps=4, save_strategy="steps", save_steps=2, noise_seed=1)


@contextlib.contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sizes(folder):
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_wherever_writing_stops_the_old_ledger_is_left(tmp_path):
    ledger = PrivacyLedger.open(statement())
    ledger.save(tmp_path)
    path = tmp_path / "privacy_ledger.json"
    before = path.read_bytes()
    ledger.reserve(at_most=10)
    ledger.save(tmp_path / "whole")
    size = (tmp_path / "whole" / path.name).stat().st_size
    for limit in (*range(0, size, 503), size - 1):
        with pytest.raises(OSError, match=TOO_LARGE), files_of_at_most(limit):
            ledger.save(tmp_path)
        assert path.read_bytes() == before
        assert sorted(sizes(tmp_path)) == ["privacy_ledger.json", "whole/privacy_ledger.json"]
    with files_of_at_most(size):
        ledger.save(tmp_path)
    assert PrivacyLedger.load(tmp_path).entries == ledger.entries
