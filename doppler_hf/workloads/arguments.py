"""From a recipe and the flags after it to dataclasses: a recipe is a command line written into a file.

`script.py recipe.yaml --learning_rate 1e-3` reads every line `key: value` of the recipe as `--key=value` in front of
the flags, so that one parser gives every value its type and the flag, which comes last, wins. `HfArgumentParser` alone
reads either a YAML file or flags, and leaves `5e-4` (a string to YAML 1.1) and `no` (a boolean) as YAML found them.
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from doppler_hf.extras import MissingExtraError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with the one-line message of an error: neither a mistake in an argument needs a traceback, nor an
    extra that is not installed.

    Meant for the part of a script that reads its arguments, its data and its model. Training stays outside, where a
    `ValueError` is a defect and its traceback is wanted.

    Raises:
        SystemExit: With the message of the `ValueError` or `MissingExtraError` that the block raised.
    """
    try:
        yield
    except (ValueError, MissingExtraError) as error:
        raise SystemExit(f"error: {error}") from error


def parse_args(*dataclass_types: type, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Read an optional recipe and the flags that override it.

    Args:
        dataclass_types: Dataclasses whose fields are the known names.
        argv: The command line without the program's name, optionally with the path of a YAML recipe first; by default
            that of the running program.

    Returns:
        One instance of each of `dataclass_types`, in their order.

    Raises:
        ValueError: For a recipe that cannot be read, and for a name that is no field, with the closest fields.
        SystemExit: From argparse, for a value that has the wrong type or a required field that is nowhere given.

    Example:
        >>> @dataclasses.dataclass
        ... class ScriptArguments:
        ...     task_name: str = "sst2"
        ...     learning_rate: float = 1e-3
        >>> parse_args(ScriptArguments, argv=["--learning_rate", "5e-4"])
        (ScriptArguments(task_name='sst2', learning_rate=0.0005),)
    """
    flags = list(sys.argv[1:] if argv is None else argv)
    fields = [field.name for types in dataclass_types for field in dataclasses.fields(types) if field.init]
    parser = HfArgumentParser(
        dataclass_types,
        # argparse's own usage lists some 150 flags in front of every one-line error.
        usage="%(prog)s [recipe.yaml] [--field value ...]",
        # An abbreviation that is unique today may mean another field after an upgrade of transformers.
        allow_abbrev=False,
    )
    if flags and not flags[0].startswith("-"):
        recipe = Path(flags.pop(0))
        scalars, structured = read_recipe(recipe)
        _refuse([name for name in (*scalars, *structured) if name not in fields], fields, where=f"recipe {recipe}")
        parser.set_defaults(**structured)
        flags = [f"--{name}={value}" for name, value in scalars.items()] + flags

    # Before any dataclass is built: a misspelt flag must not be reported as the absence of the right one.
    _, unknown = parser.parse_known_args(flags)
    # argparse returns a misspelt flag together with its value; a value alone is a stray word.
    names = [word.removeprefix("--").split("=")[0] for word in unknown if word.startswith("--")]
    _refuse(names or unknown, fields, where="command line")
    return tuple(parser.parse_args_into_dataclasses(flags, look_for_args_file=False))


def read_recipe(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read a flat YAML file.

    Args:
        path: The YAML file.

    Returns:
        The scalars, each as the characters that stand in the file, and the rest (lists, mappings and `null`) as YAML
        reads it.

    Raises:
        ValueError: If there is no such file, or it is not a YAML mapping from names to values.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"recipe {path} is not a file; the first argument is a YAML recipe, or a flag that begins with --")
    text = path.read_text(encoding="utf-8")
    try:
        # The base loader resolves nothing: 5e-4, no and 1_000 stay the strings that the parser would see as flags.
        as_written, resolved = yaml.load(text, Loader=yaml.BaseLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if resolved is None:
        return {}, {}
    if not isinstance(resolved, dict):
        raise ValueError(f"recipe {path} holds a {type(resolved).__name__}; write one 'name: value' on each line")
    structured = {str(key): value for key, value in resolved.items() if value is None or isinstance(value, dict | list)}
    return {key: value for key, value in as_written.items() if key not in structured}, structured


def _refuse(unknown: Sequence[str], fields: Sequence[str], *, where: str) -> None:
    if not unknown:
        return
    problems = []
    for name in unknown:
        close = difflib.get_close_matches(name.replace("-", "_"), fields, n=3)
        problems.append(f"{name!r}" + (f" (did you mean {', '.join(close)}?)" if close else ""))
    raise ValueError(f"{where}: no such argument: {'; '.join(problems)}; --help lists them all")
