"""The script that a recipe is for: `doppler-hf check`, `audit` and `estimate` run it up to its training.

A recipe does not name its script. Of the scripts for classifiers, images and texts, it is the only one that has all of the
recipe's arguments. The other scripts are named with --script, and take the recipe as their first argument.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from doppler_hf.errors import Refusal
from doppler_hf.training_args import DopplerTrainingArguments
from scripts import causal_lm, glue, image_classification
from scripts.training.arguments import read_recipe
from scripts.training.lora import LoraArguments

# Name of a script → its module and its arguments. The other scripts have most of these arguments, or need further packages.
KINDS: Final[dict[str, tuple[ModuleType, type]]] = {
    "glue": (glue, glue.GlueArguments),
    "causal_lm": (causal_lm, causal_lm.CausalLMArguments),
    "image_classification": (image_classification, image_classification.ImageArguments),
}
COMMON: Final = (LoraArguments, DopplerTrainingArguments)


def command_of(argv: Sequence[str]) -> list[str]:
    """Return the path of the script for an optional recipe and the flags after it, and the words that it takes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workload", choices=["glue", "causal_lm", "images"])  # a former way to name the script
    chosen, flags = parser.parse_known_args(argv)
    if chosen.workload is None:
        kind = _kind_of(flags)
    else:
        kind = "image_classification" if chosen.workload == "images" else chosen.workload
        warnings.warn(
            f"--workload is going away. Write --script scripts/{kind}.py and then the recipe.", FutureWarning, stacklevel=2
        )
    script, _ = KINDS[kind]
    return [str(script.__file__), *flags]


def _kind_of(argv: Sequence[str]) -> str:
    """Return the name of the only script that has every argument of this command line."""
    names = [word.removeprefix("--").split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    if argv and not argv[0].startswith("-"):
        scalars, structured = read_recipe(Path(argv[0]))
        names = [*scalars, *structured, *names]

    known = {
        kind: {field.name for each in (arguments, *COMMON) for field in dataclasses.fields(each)}
        for kind, (_, arguments) in KINDS.items()
    }

    def has(fields: Collection[str], name: str) -> bool:
        return name in fields or name.removeprefix("no_") in fields  # the flag --no_NAME sets NAME to false

    fitting = [kind for kind, fields in known.items() if all(has(fields, name) for name in names)]
    # A guess between several could train another model than was meant.
    if len(fitting) != 1:
        found = f"{' and '.join(fitting)} alike" if fitting else f"none of {', '.join(KINDS)}"
        stray = [name for name in names if not any(has(fields, name) for fields in known.values())]
        found += f", and none of them has {', '.join(stray)}" if stray else ""
        raise Refusal(
            "script-not-clear",
            f"Recipe and flags fit {found}. Name the script, and give it the recipe: --script scripts/NAME.py RECIPE.",
        )
    return fitting[0]
