"""Find complete checkpoints, since a run may be killed while it writes one, and read from them.

Transformers writes the trainer's state last. A folder without it is incomplete, and is removed before it is written again.
Transformers does not wait for the disk. After a power failure any file may be cut off; its table of contents shows this.
"""

import json
import os
import re
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from doppler_hf.errors import Refusal
from doppler_hf.filters import LowPassFilter
from doppler_hf.optim.checkpoint import filter_name_of
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.privacy.ledger.ledger import entries_in

_INTERRUPTED = f"no {TRAINER_STATE_NAME}, or a file is cut off"
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written completely."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
        for path in checkpoint.glob("**/*.safetensors"):
            with safe_open(path, framework="pt"):  # opening compares the table of contents with the size of the file
                pass
    except (FileNotFoundError, ValueError, SafetensorError):  # a ValueError says that the state is not JSON or not text
        return False
    # torch writes zip files, which end with their table of contents.
    return all(map(zipfile.is_zipfile, checkpoint.glob("*.pt")))


def step_of_checkpoint(checkpoint: str | None) -> int:
    """Return after how many steps a checkpoint was written, or 0 without a checkpoint or without the trainer's state."""
    if not checkpoint or not (path := Path(checkpoint) / TRAINER_STATE_NAME).exists():
        return 0
    return TrainerState.load_from_json(str(path)).global_step


def filter_of_checkpoint(checkpoint: str | None) -> LowPassFilter | None:
    """Return the fixed filter of a checkpoint's optimizer, or None without a checkpoint or without an optimizer in it."""
    if checkpoint is None or not (path := Path(checkpoint) / OPTIMIZER_NAME).exists():
        return None
    # With mmap the tensors, which are twice the model's size or more, stay on the disk.
    name = filter_name_of(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    return None if name is None else LowPassFilter.parse(name)


def given_checkpoint(resume_from_checkpoint: str | bool | None) -> str | bool | None:
    """Return True or False for these words, which is what a flag or a recipe can hold, and else the argument."""
    words = {"true": True, "last": True, "false": False}
    if isinstance(resume_from_checkpoint, str) and not Path(resume_from_checkpoint).exists():
        return words.get(resume_from_checkpoint.lower(), resume_from_checkpoint)
    return resume_from_checkpoint


def whole_checkpoint(resume_from_checkpoint: str | bool | None, *, output_dir: str) -> str | bool | None:
    """Return the checkpoint to resume from: for True, the last complete one in the output folder, else the argument."""
    if resume_from_checkpoint is True:
        # As in Transformers, folders with other names, such as checkpoint-9-old, do not count.
        checkpoints = [path for path in sort_checkpoints(output_dir) if _NAME.fullmatch(Path(path).name)]
        whole = [checkpoint for checkpoint in checkpoints if is_whole(Path(checkpoint))]
        if not checkpoints:
            raise Refusal(
                "no-checkpoint",
                f"resume_from_checkpoint=True found no checkpoint in {output_dir}. Leave resume_from_checkpoint out to "
                "start a new run, or set output_dir to the folder of the run that you want to resume.",
            )
        if not whole:
            raise Refusal(
                "interrupted-checkpoint",
                f"resume_from_checkpoint=True found no complete checkpoint in {output_dir}. Writing {len(checkpoints)} of "
                f"them was interrupted ({_INTERRUPTED}). To start over, remove the incomplete checkpoints; the ε of both "
                "runs then add up.",
            )
        # One that was saved while something other than the private steps had changed the model has no ledger.
        covered = [checkpoint for checkpoint in whole if (Path(checkpoint) / LEDGER_NAME).exists()]
        # An earlier run in the same folder may have left checkpoints of more steps.
        run = entries_in(Path(output_dir) / LEDGER_NAME)
        own = [each for each in covered if (found := entries_in(Path(each) / LEDGER_NAME)) and found == run[: len(found)]]
        if run and covered and not own:
            raise Refusal(
                "no-checkpoint-of-this-run",
                f"resume_from_checkpoint=True found no checkpoint of the last run in {output_dir}, only {len(covered)} of "
                "an earlier run: the last one ended before it saved its first. Start over without resume_from_checkpoint; "
                "the ε of both runs then add up.",
            )
        return (own or covered or whole)[-1]
    if isinstance(resume_from_checkpoint, str | os.PathLike):
        checkpoint = Path(resume_from_checkpoint)
        # A folder with a different name may hold only a model to start from.
        if _NAME.fullmatch(checkpoint.name) and checkpoint.is_dir() and not is_whole(checkpoint):
            raise Refusal(
                "interrupted-checkpoint",
                f"The checkpoint {checkpoint} is incomplete, because its writing was interrupted ({_INTERRUPTED}). Resume "
                "from an earlier checkpoint, or set resume_from_checkpoint=True for the last complete one.",
            )
    return resume_from_checkpoint
