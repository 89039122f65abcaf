"""The files of a model's weights in a folder, and their SHA-256, which a ledger records.

Files are those from which transformers and PEFT read PyTorch weights, and the indices of sharded ones;
the configuration beside them is not covered.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

# PEFT saves every adapter except the default one into its own folder.
_PATTERNS: Final = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json",
    "*/adapter_model.safetensors", "*/adapter_model.bin",
)  # fmt: skip
_NO_WEIGHTS: Final = ("training_args.bin",)

_OF_SHARDED: Final = re.compile(r"-\d{5}-of-\d{5}\.|\.index\.json$")
# In what else weights are kept: formats that no ledger knows, and folders beside the model.
_OTHER_FORMATS: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".keras", ".tflite"
)  # fmt: skip
_LFS: Final = b"version https://git-lfs"

Stamp = tuple[int, int, int]


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the weight files of a folder by their names in it, without those of its checkpoints."""
    paths = sorted(path for pattern in _PATTERNS for path in folder.glob(pattern) if path.name not in _NO_WEIGHTS)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in names.items() if not name.startswith("checkpoint-")}


def is_index(name: str) -> bool:
    """Return whether a weight file is the index of a sharded model, which has no weights itself."""
    return name.endswith(".index.json")


def other_weights(folder: Path) -> list[str]:
    """Return the files below a folder that seem to hold weights, but are none of its weight files or of its checkpoints."""
    known = weight_files(folder)
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix in _OTHER_FORMATS and path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if name.as_posix() not in known
        and name.name not in _NO_WEIGHTS
        and not name.parts[0].startswith("checkpoint-")
        and not any(part.startswith(".") for part in name.parts)
    )


def copies_below(folder: Path, *, saved: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the files in the subfolders of a folder that are, with those beside them, a model as it was saved."""
    below = {*other_weights(folder), *(name for name in weight_files(folder) if "/" in name)}
    found: set[str] = set()
    for parent in sorted({parent for name in below for parent in (folder / name).parents if parent.is_relative_to(folder)}):
        names = {name: (parent / name).relative_to(folder).as_posix() for name in weight_files(parent)}
        # Only files with the names of saved ones are read, which may be large.
        if parent == folder or found.issuperset(names.values()) or not any(names.keys() <= files.keys() for files in saved):
            continue
        of_parent = hashes(parent)
        if not unknown_files(of_parent, saved=saved) and not missing_shards(of_parent, saved=saved):
            found.update(names.values())
    return sorted(found)


def is_lfs_pointer(path: Path) -> bool:
    """Return whether Git LFS has not yet fetched a file, and a few lines stand in its place."""
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS


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


def missing_shards(found: Mapping[str, str], *, saved: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the files that are missing of a sharded model, if some of its files were found as they were saved."""
    if not any(map(_OF_SHARDED.search, found)):
        return []
    of_sets = (
        [name for name in files if name not in found and _OF_SHARDED.search(name)]
        for files in saved
        if all(files.get(name) == value for name, value in found.items())
    )
    return min(of_sets, key=len, default=[])


def unknown_files(found: Mapping[str, str], *, saved: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the files in `found` that do not belong to the best matching set of saved files."""
    # Sets are compared as a whole, so that shards of two checkpoints do not pass as one model.
    of_sets = ([name for name, value in found.items() if files.get(name) != value] for files in saved)
    return min(of_sets, key=len, default=list(found))
