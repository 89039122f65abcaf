"""What a ledger says of the files in its folder: which weights it covers, what is wrong, and what nobody has checked."""

import contextlib
import json
import re
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.ledger import ledgers_in
from doppler_hf.privacy.ledger.weights import (
    copies_below,
    hashes,
    is_index,
    is_lfs_pointer,
    missing_shards,
    other_weights,
    unknown_files,
    weight_files,
)
from doppler_hf.run.saving.card_part import CARD_NAME, PART, read_part

_STATE: Final = "trainer_state.json"


class CheckedFiles(NamedTuple):
    """What was found in a folder.

    Attributes:
        weights: The files with weights in the folder itself, whether the ledger covers them or not.
        copies: The files in its subfolders that are copies of weights which the run has saved.
        mismatches: A line for each contradiction, empty if there is none.
        notes: A line for what was not checked, or says something else without being wrong.
        unchecked: Files that seem to hold weights, of which the ledger says nothing; those of incomplete checkpoints too.
        step: The step of the checkpoint whose weights these are, if the ledger tells it.
        incomplete: Checkpoints whose writing was interrupted, and whose weights no ledger covers.
    """

    weights: list[str]
    copies: list[str]
    mismatches: list[str]
    notes: list[str]
    unchecked: list[str]
    step: int | None
    incomplete: list[str]


def checked_files(folder: Path, *, ledger: PrivacyLedger) -> CheckedFiles:
    """Return what a ledger says of the weights in its folder, in its checkpoints, and of the model card."""
    checkpoints = sorted(path for path in folder.glob("checkpoint-*") if path.is_dir())
    family = [ledger, *ledgers_in(folder).values()]
    copies = copies_below(folder, saved=ledger.saved)
    unchecked = [name for name in other_weights(folder) if name not in copies]
    found = {name: value for name, value in hashes(folder).items() if name not in copies}
    wrong = {checkpoint: _weight_mismatches(checkpoint, hashes(checkpoint), family) for checkpoint in checkpoints}
    incomplete = [each for each, lines in wrong.items() if lines and _is_incomplete(each, ledger=ledger)]
    notes = [*_card_notes(folder, ledger)]
    if copies:
        notes.append(f"Copies of weights that the run has saved: {', '.join(copies)}.")
    if unchecked:
        notes.append(
            f"Not checked: {', '.join(unchecked)}. The ledger says nothing of weights in other folders and formats. Verify "
            "them with the ledger of their run, or do not publish them with this one."
        )
    if incomplete:
        notes.append(
            f"Incomplete, ignored: {', '.join(each.name for each in incomplete)}. The run was probably stopped while it "
            "wrote there. What is there is not verified, and no run resumes from it. It changes nothing in ε, which the "
            "ledger states for all steps. Remove it before you publish this folder."
        )
    return CheckedFiles(
        weights=[name for name in found if not is_index(name)],
        copies=copies,
        mismatches=[
            *_checkpoint_mismatches(checkpoints, family),
            *_weight_mismatches(folder, found, [ledger]),
            *(line for checkpoint, lines in wrong.items() if checkpoint not in incomplete for line in lines),
        ],
        notes=notes,
        unchecked=[*unchecked, *(f"{each.name}/{name}" for each in incomplete for name in weight_files(each))],
        step=step_of_weights(ledger, found) if found else None,
        incomplete=[each.name for each in incomplete],
    )


def _is_incomplete(checkpoint: Path, *, ledger: PrivacyLedger) -> bool:
    """Return whether the writing of a checkpoint was interrupted before the ledger noted its weights.

    Transformers writes the trainer's state last. Its absence alone would let somebody exchange the weights of a checkpoint
    that the run has noted.
    """
    try:
        json.loads((checkpoint / _STATE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return re.fullmatch(r"checkpoint-\d+", checkpoint.name) is not None and checkpoint.name not in _noted(ledger)
    return False


def _noted(ledger: PrivacyLedger) -> set[str]:
    """Return the names of the checkpoints that a ledger has noted and that no later run of it replaces."""
    steps: set[int] = set()
    for entry in ledger.entries:
        if entry["event"] == "resumed":  # the run writes the checkpoints after its first step again
            steps = {step for step in steps if step <= entry["from_step"]}
        elif entry["event"] == "checkpoint":
            steps.add(entry["step"])
    return {f"checkpoint-{step}" for step in steps}


def step_of_weights(ledger: PrivacyLedger, found: Mapping[str, str]) -> int | None:
    """Return the step of the checkpoint that was saved with these files (name → SHA-256), or None if it is not certain.

    The files of a checkpoint are noted directly after it. If a run has saved weights at other times too, no step is certain,
    since files that are known already are not noted again.
    """
    step, last = None, ""
    for before, entry in pairwise(ledger.entries):
        last = before["event"] if before["event"] not in ("left", "saved") else last
        if entry["event"] != "saved":
            continue
        if before["event"] != "checkpoint" and last != "closed":
            return None
        if step is None and before["event"] == "checkpoint" and not unknown_files(found, saved=[entry["weights"]]):
            step = int(before["step"])
    return step


def _checkpoint_mismatches(checkpoints: list[Path], family: list[PrivacyLedger]) -> list[str]:
    """Return a line for each checkpoint whose ledger is not an earlier state of the folder's or of one set aside."""
    found = []
    for path in (each / LEDGER_NAME for each in checkpoints):
        if not path.exists():
            continue
        try:
            checkpoint = PrivacyLedger.load(path)
        except ValueError as error:
            found.append(str(error))
            continue
        if not any(checkpoint.is_prefix_of(other) for other in family):
            found.append(
                f"{path} is not an earlier state of the ledger in {path.parent.parent}: the two come from different runs, "
                "or entries at the end of the ledger in that folder were cut off."
            )
    return found


def _weight_mismatches(folder: Path, found: Mapping[str, str], family: list[PrivacyLedger]) -> list[str]:
    """Return a line if weights in a folder are not weights that a run of the family has saved, or not all of them."""
    saved = [files for ledger in family for files in ledger.saved]
    unknown = unknown_files(found, saved=saved)
    pointers = [name for name in unknown if is_lfs_pointer(folder / name)]
    if pointers:
        return [
            f"Git has not fetched these weights: {', '.join(pointers)} in {folder} only point to them. Run git lfs pull "
            "there, or download the files."
        ]
    if not unknown:
        missing = missing_shards(found, saved=saved)
        what = f"These parts of the model are missing in {folder}: {', '.join(missing)}. Put them back."
        return [what] if missing else []
    line = (
        f"The run of this ledger did not save these weights: {', '.join(unknown)} in {folder}. They were changed or "
        "converted, come from another run, or were not written to the end. Put back the weights that were saved with the "
        "ledger, and move other weights away."
    )
    if any(name.startswith("adapter_model.") for files in saved for name in files):
        line += (
            " If they are the adapter of this run merged into its base, run "
            f"doppler-hf verify {folder} --base BASE --adapter FOLDER, where FOLDER is the output folder of the run."
        )
    return [line]


def _card_notes(folder: Path, ledger: PrivacyLedger) -> list[str]:
    """Return a line for each way in which the model card's part on privacy is not what a run of the ledger wrote."""
    text = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (folder / CARD_NAME).read_text("utf-8")
    notes = []
    for part in map(read_part, PART.finditer(text)):
        for head in part.heads:
            if head == ledger.head:
                continue
            was_before = any(entry["hash"] == head for entry in ledger.entries)
            why = "is older than the ledger, which had entries added" if was_before else "is of another ledger"
            notes.append(
                f"{CARD_NAME} {why}: it names the last hash {head[:8]}…. What is said here holds. Let trainer.save_model() "
                "write the card again."
            )
        if part.by_hand:
            lines = "; ".join(textwrap.shorten(line, 100, placeholder=" …") for line in part.by_hand)
            notes.append(
                f"In {CARD_NAME}, these lines of the part that the run wrote are by hand, or of another run: {lines}"
            )
    return notes
