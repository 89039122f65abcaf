"""From a recipe to model and data, wherever the package is installed: `parse_recipe`.

A recipe does not name its kind of workload. The kind is the only one that has all of its arguments.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.workloads import glue, images, language_model
from doppler_hf.workloads.arguments import parse_args, read_recipe
from doppler_hf.workloads.lora import LoraArguments
from doppler_hf.workloads.workload import Workload

# Its own arguments, and what builds it from these, the adapters' and the trainer's.
Kind = tuple[type, Callable[[Any, LoraArguments, DopplerTrainingArguments], Workload]]
KINDS: dict[str, Kind] = {
    "glue": (glue.GlueArguments, glue.build),
    "causal_lm": (language_model.CausalLMArguments, language_model.build),
    "images": (images.ImageArguments, images.build),
}
COMMON = (LoraArguments, DopplerTrainingArguments)


def parse_recipe(argv: Sequence[str]) -> tuple[Workload, DopplerTrainingArguments]:
    """Read an optional recipe and the flags that override it, and build the model and the data that they describe.

    The flag `--workload glue`, `causal_lm` or `images` sets the kind; by default it is the only one that has all arguments.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workload")
    chosen, flags = parser.parse_known_args(argv)
    kind = _kind_of(flags) if chosen.workload is None else chosen.workload
    if kind not in KINDS:
        raise ValueError(f"--workload must be one of {', '.join(KINDS)}, got {kind!r}.")
    return build(KINDS[kind], argv=flags)


def build(kind: Kind, *, argv: Sequence[str] | None) -> tuple[Workload, DopplerTrainingArguments]:
    """Read and build as `parse_recipe` does, for one kind. The default of `argv` is that of the running program."""
    arguments, build_kind = kind
    args, lora_args, training_args = parse_args(arguments, *COMMON, argv=argv)
    return build_kind(args, lora_args, training_args), training_args


def _kind_of(argv: Sequence[str]) -> str:
    """Return the only kind that has every argument of this command line."""
    names = [word.removeprefix("--").split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    if argv and not argv[0].startswith("-"):
        scalars, structured = read_recipe(Path(argv[0]))
        names = [*scalars, *structured, *names]

    def fits(arguments: type) -> bool:
        fields = {field.name for each in (arguments, *COMMON) for field in dataclasses.fields(each)}
        return all({name, name.removeprefix("no_")} & fields for name in names)  # the flag --no_NAME sets NAME to false

    fitting = [kind for kind, (arguments, _) in KINDS.items() if fits(arguments)]
    # A guess between several could train another model than was meant.
    if len(fitting) != 1:
        found = f"several workloads: {', '.join(fitting)}" if fitting else "no workload"
        raise ValueError(f"Recipe and flags fit {found}. Choose one of {', '.join(KINDS)} with --workload.")
    return fitting[0]
