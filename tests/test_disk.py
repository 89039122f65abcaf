"""A full disk ends a run in an error: ledgers are whole, no step is lost, and half a checkpoint is none.

The limit on the size of a file is the operating system's, and writing fails in the middle of the file that exceeds it, in
Python, safetensors and torch alike. A disk that is really full is made where the system lets us mount one.
"""

import contextlib
import errno
import os

import pytest
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME

from doppler_hf.privacy import PrivacyLedger
from tests.support.ledgers import statement
from tests.support.tiers import thorough
from tests.support.trainers import trainer_of

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


def check_what_is_left(folder, trainer):
    """Check the ledgers that lie there, and go on from what does."""
    out = folder / "out"
    ledger = out / "privacy_ledger.json"
    counted = PrivacyLedger.load(ledger).steps_run if ledger.exists() else 0
    assert counted >= trainer.state.global_step
    for path in out.glob("checkpoint-*/privacy_ledger.json"):
        assert PrivacyLedger.load(path).is_prefix_of(PrivacyLedger.load(ledger))
    assert not list(out.rglob(".privacy_ledger*"))
    whole = [int(path.parent.name.split("-")[1]) for path in out.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    resumed = trainer_of(folder, **OPTIONS)
    try:
        resumed.train(resume_from_checkpoint=True)
    except ValueError as error:
        if "must find a whole checkpoint" not in str(error) and "No valid checkpoint" not in str(error):
            raise
        return
    # Of a checkpoint whose last file was cut off the one before may be taken.
    begun = resumed.privacy.ledger.restarts[-1]
    assert begun in whole
    assert resumed.state.global_step == 4
    assert resumed.privacy.ledger.steps_run == counted + 4 - begun


@pytest.mark.parametrize(
    "place",
    ["privacy_ledger.json", *thorough(TRAINER_STATE_NAME, "optimizer.pt"), "model.safetensors", *thorough("config.json")],
)
@pytest.mark.usefixtures("unchecked_arrays", "capsys")  # which keeps in memory what is printed
def test_a_run_whose_files_are_limited_goes_on_when_they_are_not(tmp_path, place):
    """Each limit is just below the size of another file, of which one more is then written in part."""
    trainer_of(tmp_path / "whole", **OPTIONS).train()
    largest = sizes(tmp_path / "whole" / "out")[f"checkpoint-4/{place}"]
    trainer = trainer_of(tmp_path, rehearse=False, **OPTIONS)
    with pytest.raises((OSError, RuntimeError, SafetensorError)), files_of_at_most(largest - 1):
        trainer.train()
    check_what_is_left(tmp_path, trainer)
