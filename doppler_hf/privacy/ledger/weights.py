"""The files of a model's weights in a folder, and their SHA-256, which a ledger records.

Files are those from which transformers and PEFT read PyTorch weights, and the indices of sharded ones;
the configuration beside them is not covered.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

# PEFT saves every adapter except the default one into its own folder.
_PATTERNS: Final = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json",
    "*/adapter_model.safetensors", "*/adapter_model.bin",
)  # fmt: skip
_NO_WEIGHTS: Final = ("training_args.bin",)

Stamp = tuple[int, int, int]


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the weight files of a folder by their names in it, without those of its checkpoints."""
    paths = sorted(path for pattern in _PATTERNS for path in folder.glob(pattern) if path.name not in _NO_WEIGHTS)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in names.items() if not name.startswith("checkpoint-")}


def stamps(folder: Path) -> dict[str, Stamp]:
    """Return inode, size and time of change of every weight file, which show later whether it was written again."""
    found = {name: path.stat() for name, path in weight_files(folder).items()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def hashes(folder: Path, *, unless_as: Mapping[str, Stamp] | None = None) -> dict[str, str]:
    """Return the SHA-256 of every weight file, or of those written since the stamps `unless_as` were taken."""
    now = stamps(folder)
    before = {} if unless_as is None else unless_as
    written = [name for name in now if name not in before or before[name] != now[name]]
    found = {}
    for name in written:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def unknown_files(found: Mapping[str, str], *, saved: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the files in `found` that do not belong to the best matching set of saved files."""
    # Sets are compared as a whole, so that shards of two checkpoints do not pass as one model.
    of_sets = ([name for name, value in found.items() if files.get(name) != value] for files in saved)
    return min(of_sets, key=len, default=list(found))
