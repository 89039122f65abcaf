"""Which checkpoints are whole, since a run may be killed while it writes one; and what a run reads of one.

Transformers writes the trainer's state last. A folder without it is not whole, and is removed before one is written again.
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

_INTERRUPTED = f"no {TRAINER_STATE_NAME}, or a file that is cut off"
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
        for path in checkpoint.glob("**/*.safetensors"):
            with safe_open(path, framework="pt"):  # which compares the table with the size of the file
                pass
    except (FileNotFoundError, ValueError, SafetensorError):  # not JSON, or no text
        return False
    # torch writes zip files, whose table is their end.
    return all(map(zipfile.is_zipfile, checkpoint.glob("*.pt")))


def step_of_checkpoint(checkpoint: str | None) -> int:
    """Return after how many steps a checkpoint was written; 0 without a checkpoint, or one without the trainer's state."""
    if not checkpoint or not (path := Path(checkpoint) / TRAINER_STATE_NAME).exists():
        return 0
    return TrainerState.load_from_json(str(path)).global_step


def filter_of_checkpoint(checkpoint: str | None) -> LowPassFilter | None:
    """Return the fixed filter of a checkpoint's optimizer; None without a checkpoint, or one without an optimizer."""
    if checkpoint is None or not (path := Path(checkpoint) / OPTIMIZER_NAME).exists():
        return None
    # Its tensors, twice the model's size or more, stay on the disk.
    name = filter_name_of(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    return None if name is None else LowPassFilter.parse(name)


def whole_checkpoint(resume_from_checkpoint: str | bool | None, *, output_dir: str) -> str | bool | None:
    """Return what to resume from: of an output folder the last whole checkpoint, else the argument of `Trainer.train`."""
    if resume_from_checkpoint is True:
        # As Transformers: no folder of another name, such as checkpoint-9-old.
        checkpoints = [path for path in sort_checkpoints(output_dir) if _NAME.fullmatch(Path(path).name)]
        whole = [checkpoint for checkpoint in checkpoints if is_whole(Path(checkpoint))]
        if checkpoints and not whole:
            raise Refusal(
                "interrupted-checkpoint",
                f"resume_from_checkpoint=True must find a whole checkpoint in {output_dir}, got {len(checkpoints)} whose "
                f"writing was interrupted ({_INTERRUPTED}). Remove them to begin anew. The ε of both runs add up.",
            )
        return whole[-1] if whole else True
    if isinstance(resume_from_checkpoint, str | os.PathLike):
        checkpoint = Path(resume_from_checkpoint)
        # A folder of another name may hold a model alone, to begin from.
        if _NAME.fullmatch(checkpoint.name) and checkpoint.is_dir() and not is_whole(checkpoint):
            raise Refusal(
                "interrupted-checkpoint",
                f"resume_from_checkpoint must be a whole checkpoint, got {checkpoint}, whose writing was interrupted "
                f"({_INTERRUPTED}). Give an earlier one, or True for the last that is whole.",
            )
    return resume_from_checkpoint
