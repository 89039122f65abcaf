"""The values and names of flags: whole numbers such as 5e3, and what a flag is called that has another name in training."""

import argparse
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from doppler_hf.filters.grammar import did_you_mean

# Name of a training argument, as a flag → the flags of these commands that set the same. A command has at most one of them.
_OF_TRAINING: Final[Mapping[str, Sequence[str]]] = {
    "--target-epsilon": ["--epsilon"],
    "--target-delta": ["--delta"],
    "--num-train-epochs": ["--epochs"],
    "--per-device-train-batch-size": ["--micro-batch", "--batch-size"],
    "--per-sample-max-grad-norm": ["--max-grad-norm"],
    "--max-length": ["--length"],
    "--max-seq-length": ["--length"],
    "--model-name-or-path": ["--model"],
    "--lora-rank": ["--lora-r"],
}
# No count of a training is larger. Up to here, a number with a point is exact, and sizes of tensors do not overflow.
_LARGEST: Final = 10**15


def whole_number(text: str) -> int:
    """Return a whole number, which may be written as 5000, 5e3 or 5000.0.

    Example:
        >>> whole_number("5e3"), whole_number("-1")
        (5000, -1)
    """
    number: float
    try:
        number = int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
    if number != number // 1 or abs(number) >= _LARGEST:
        raise argparse.ArgumentTypeError(f"expected a whole number below {_LARGEST:.0e}, as 5000 or 5e3; got {text!r}")
    return int(number)


def hint(unknown: Sequence[str], flags: Collection[str]) -> str:
    """Return ' (did you mean …?)' for the first unknown flag that is like one of `flags`, or '' if none is."""
    for word in unknown:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--"):
            same = next((flag for flag in _OF_TRAINING.get(name, ()) if flag in flags), None)
            if found := did_you_mean(name, flags) if same is None else f" (did you mean {same!r}?)":
                return found
    return ""
