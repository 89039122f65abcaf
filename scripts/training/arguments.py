"""From a recipe and the flags after it to dataclasses: a recipe is a command line written into a file.

`script.py recipe.yaml --learning_rate 1e-3` reads every line `key: value` of the recipe as `--key=value` in front of the
flags. So one parser gives every value its type, and a flag, which comes later, overrides the recipe. What a flag leaves
without effect, as `--dataset_dir` the name on the hub, is left out of the recipe. `HfArgumentParser` alone reads either a
YAML file or flags, and takes `5e-4` for a string and `no` for a boolean, as YAML 1.1 does.
"""

import dataclasses
import difflib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from doppler_hf.errors import Failure, Refusal
from doppler_hf.extras import MissingExtraError
from doppler_hf.training_args.checks import NoEffectError

logger = logging.getLogger(__name__)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with the one-line message of a mistake in an argument, an extra that is not installed, or a `Failure`.

    Use it for the part of a script that reads its arguments, its data and its model. Leave training outside, where a
    `ValueError` is a defect that needs its traceback.
    """
    try:
        yield
    except (ValueError, MissingExtraError, Failure) as error:
        raise SystemExit(f"error: {error}") from error


def refuse_unused_fields(args: Any, *names: str, beside: str) -> None:
    """Refuse fields of a dataclass that are set and have no effect beside another."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in names and value != field.default:
            fix = f"Leave {field.name} out, or change {beside}"
            raise NoEffectError(field.name, value, beside=beside, because=repr(getattr(args, beside)), fix=fix)


def parse_args(*dataclass_types: type, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Read an optional recipe, the path of a YAML file, and the flags that override it, by default the running program's.

    Returns:
        One instance of each of `dataclass_types`, in their order; Transformers' `do_train` and `do_eval` are on by default.
    """
    flags = list(sys.argv[1:] if argv is None else argv)
    fields = [field.name for types in dataclass_types for field in dataclasses.fields(types) if field.init]
    scalars: dict[str, str] = {}
    structured: dict[str, Any] = {}
    if flags and not flags[0].startswith("-"):
        recipe = Path(flags.pop(0))
        scalars, structured = read_recipe(recipe)
        _refuse([name for name in (*scalars, *structured) if name not in fields], fields, where=f"The recipe {recipe}")
    given = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in flags if word.startswith("--")}

    def parsed() -> tuple[Any, ...]:
        parser = HfArgumentParser(
            dataclass_types,
            # argparse's own usage would list some 150 flags before every one-line error.
            usage="%(prog)s [recipe.yaml] [--field value ...]",
            # An abbreviation that is unique today may mean another field after an upgrade of transformers.
            allow_abbrev=False,
        )
        # A script trains and evaluates unless it is told not to.
        parser.set_defaults(**{name: True for name in ("do_train", "do_eval") if name in fields}, **structured)
        words = [*(f"--{name}={value}" for name, value in scalars.items()), *flags]
        # Before any dataclass is built: a misspelt flag must not be reported as a missing one.
        _, unknown = parser.parse_known_args(words)
        # argparse returns a misspelt flag together with its value; a value alone is a stray word.
        names = [word.removeprefix("--").split("=")[0] for word in unknown if word.startswith("--")]
        _refuse(names or unknown, fields, where="The command line")
        return tuple(parser.parse_args_into_dataclasses(words, look_for_args_file=False))

    found = None
    while found is None:
        try:
            found = parsed()
        except NoEffectError as error:
            # A flag such as --disable_dp overrules what the recipe says beside it.
            of_recipe = next((kind for kind in (scalars, structured) if error.name in kind), None)
            if of_recipe is None or error.name in given or error.beside not in given:
                raise
            value = of_recipe.pop(error.name)
            logger.warning("%s=%s of the recipe is left out: it has no effect with --%s.", error.name, value, error.beside)
    if any(getattr(args, "do_predict", False) for args in found):
        raise Refusal("no-effect", "do_predict=True has no effect: only labelled examples are read. Leave it out.")
    return found


def read_recipe(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the scalars of a flat YAML file, each as it is written, and lists and mappings as YAML does."""
    import yaml

    if not path.is_file():
        raise Refusal(
            "recipe-not-yaml",
            f"The recipe must be a YAML file, got {path}. Give a path that exists, or begin a flag with --.",
        )
    text = path.read_text(encoding="utf-8")
    try:
        # The base loader resolves nothing: 5e-4, no and 1_000 stay strings, as they would be on the command line.
        as_written, resolved = yaml.load(text, Loader=yaml.BaseLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Refusal(
            "recipe-not-yaml",
            f"The recipe {path} is not YAML ({' '.join(str(error).split())}). Write one 'name: value' on each line. For a "
            "training script of your own, give --script in its place.",
        ) from error
    if resolved is None:
        return {}, {}
    if not isinstance(resolved, dict):
        kind = type(resolved).__name__
        raise Refusal(
            "recipe-not-yaml", f"The recipe {path} must be a mapping, got {kind}. Write one 'name: value' on each line."
        )
    for key, value in resolved.items():
        # A parser would take the word for a string, and Transformers compare no value with a number.
        if value in (None, "None", "null"):
            raise Refusal(
                "recipe-without-value", f"{key} in the recipe {path} must have a value, got {value!r}. Leave it out."
            )
    structured = {str(key): value for key, value in resolved.items() if isinstance(value, dict | list)}
    return {key: value for key, value in as_written.items() if key not in structured}, structured


def _refuse(unknown: Sequence[str], fields: Sequence[str], *, where: str) -> None:
    close = {name: difflib.get_close_matches(name.replace("-", "_"), fields, n=3) for name in unknown}
    if close:
        told = (f"{name!r}" + (f" (did you mean {', '.join(near)}?)" if near else "") for name, near in close.items())
        raise Refusal(
            "unknown-arguments", f"{where} has unknown arguments: {', '.join(told)}. Run with --help for a list of all."
        )
