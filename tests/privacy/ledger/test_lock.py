"""One writer holds a folder, however often it enters."""

import pytest

from doppler_hf.privacy.ledger.file import WriterLock


def test_one_writer_holds_a_folder(tmp_path):
    one, other = WriterLock(tmp_path / "out"), WriterLock(tmp_path / "out")
    with one, one:
        with pytest.raises(ValueError, match=r"out is the folder of another private run, .*Use another output_dir"), other:
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
