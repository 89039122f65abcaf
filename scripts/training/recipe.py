"""The script that a recipe is for: `doppler-hf check` and `audit` run it up to its training.

A recipe does not name its script. It is the only one that has all of the recipe's arguments.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from doppler_hf.errors import Refusal
from doppler_hf.training_args import DopplerTrainingArguments
from scripts import causal_lm, glue, image_classification
from scripts.training.arguments import read_recipe
from scripts.training.lora import LoraArguments

# The scripts whose arguments tell them apart. Those of TRL have the same ones as each other.
KINDS: Final[dict[str, tuple[ModuleType, type]]] = {
    "glue": (glue, glue.GlueArguments),
    "causal_lm": (causal_lm, causal_lm.CausalLMArguments),
    "images": (image_classification, image_classification.ImageArguments),
}
COMMON: Final = (LoraArguments, DopplerTrainingArguments)


def command_of(argv: Sequence[str]) -> list[str]:
    """Return the path of the script for an optional recipe and the flags after it, and the words that it takes.

    The flag `--workload glue`, `causal_lm` or `images` names the script; by default it is the only one that has all
    arguments.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workload")
    chosen, flags = parser.parse_known_args(argv)
    kind = _kind_of(flags) if chosen.workload is None else chosen.workload
    if kind not in KINDS:
        raise Refusal("unknown-value", f"--workload must be one of {', '.join(KINDS)}, got {kind!r}.")
    script, _ = KINDS[kind]
    return [str(script.__file__), *flags]


def _kind_of(argv: Sequence[str]) -> str:
    """Return the only kind that has every argument of this command line."""
    names = [word.removeprefix("--").split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    if argv and not argv[0].startswith("-"):
        scalars, structured = read_recipe(Path(argv[0]))
        names = [*scalars, *structured, *names]

    def fits(arguments: type) -> bool:
        fields = {field.name for each in (arguments, *COMMON) for field in dataclasses.fields(each)}
        return all({name, name.removeprefix("no_")} & fields for name in names)  # the flag --no_NAME sets NAME to false

    fitting = [kind for kind, (_, arguments) in KINDS.items() if fits(arguments)]
    # A guess between several could train another model than was meant.
    if len(fitting) != 1:
        found = f"several workloads: {', '.join(fitting)}" if fitting else "no workload"
        raise Refusal(
            "workload-not-clear", f"Recipe and flags fit {found}. Choose one of {', '.join(KINDS)} with --workload."
        )
    return fitting[0]
