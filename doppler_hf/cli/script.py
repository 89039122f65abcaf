"""Run a training script up to its first training, and give its trainer to `check`, `audit` or `estimate`.

The script is the user's, or that of a recipe. A recipe holds the arguments of a script of the repository, and
`scripts/training/recipe.py` knows which script. The folder `scripts` is not part of the package. It is looked for beside the
package, in the folders above the recipe, and in the current folder and those above it.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

from doppler_hf.cli.flags import hint
from doppler_hf.errors import Refusal
from doppler_hf.trainer import DopplerTrainer

PACKAGE: Final = Path(__file__).resolve().parents[1]
CHOOSES_THE_SCRIPT: Final = Path("scripts/training/recipe.py")
T = TypeVar("T")
_TRUE: Final = frozenset({"true", "yes", "t", "y", "1"})  # as `HfArgumentParser` has them
ERROR_PREFIX: Final = "error: "  # After a mistake, the scripts of the repository exit with this prefix and one line.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two ways to name a training run."""
    parser.add_argument(
        "--script", nargs=argparse.REMAINDER, metavar="FILE", help="your script and its arguments, after the options above"
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="YAML recipe of a private run, in a clone of the repository; its fields may follow as flags",
    )
    parser.set_defaults(fields=[], flags=[*parser._option_string_actions])


def check_source(args: argparse.Namespace) -> None:
    """Refuse words that name no training run, or two. argparse takes the value of an unknown flag for the recipe."""
    if args.script is not None:
        if unknown := [*args.fields, *([] if args.recipe is None else [args.recipe])]:
            raise Refusal(
                "unknown-options",
                f"Unknown options before --script: {' '.join(unknown)}{hint(unknown, args.flags)}. Put the script's own "
                "arguments after the script.",
            )
        if not args.script or not Path(args.script[0]).is_file():
            got = " ".join(args.script) or "nothing"
            raise Refusal("no-script", f"Expected the path of a script after --script; got {got}.")
        return
    if args.recipe is not None and args.recipe.endswith(".py"):
        raise Refusal(
            "script-as-recipe",
            f"{args.recipe} is a Python file, and this command expected a recipe here. Put --script before a Python file, "
            f"and the script's own arguments after it: --script {args.recipe}.",
        )
    if args.recipe is None or not Path(args.recipe).is_file():
        unknown = [word for word in args.fields if word.startswith("-")]
        got = "none" if args.recipe is None else f"{args.recipe}, which is not a file"
        told = f" This command has no flag {unknown[0]}{hint(unknown, args.flags)}." if unknown else ""
        raise Refusal(
            "no-recipe",
            f"Expected the path of a recipe, or --script; got {got}.{told} Give the recipe first, and then its fields as "
            "flags, such as --target_epsilon 3.",
        )


def use_trainer(args: argparse.Namespace, use: Callable[[DopplerTrainer], T], *, is_baseline_run: bool = True) -> T:
    """Run the script that the arguments name up to its first private training, and return what `use` returns.

    Training runs without privacy before it, such as baselines, are carried out. A recipe has only one training run; if that
    is without privacy, `use` gets it and may refuse it. Without `is_baseline_run`, `use` gets the first trainer of a script
    too.
    """
    check_source(args)
    if args.script is None:
        return use_first_trainer(_script_of([args.recipe, *args.fields]), use, is_baseline_run=False)
    return use_first_trainer(args.script, use, is_baseline_run=is_baseline_run)


class _Used(BaseException):
    """Carries the outcome out of a script, past any exception that the script handles."""

    def __init__(self, outcome: Any, error: Exception | None) -> None:
        self.outcome, self.error = outcome, error


def use_first_trainer(words: Sequence[str], use: Callable[[DopplerTrainer], T], *, is_baseline_run: bool) -> T:
    """Run a script with its arguments, and call `use` with its trainer in place of the first training.

    With `is_baseline_run`, training runs without privacy are carried out, and `use` gets the first private trainer.
    """
    train, has_baseline = DopplerTrainer.train, False
    if is_baseline_run and _turns_privacy_off(words):
        raise _without_privacy(words[0])

    def use_instead(trainer: DopplerTrainer, *args: Any, **options: Any) -> Any:
        if is_baseline_run and trainer.args.disable_dp:
            print("This training has no privacy, so it is carried out. The command waits for the first one with privacy.")
            nonlocal has_baseline
            has_baseline = True
            return train(trainer, *args, **options)
        with mock.patch.object(DopplerTrainer, "train", train):  # `use` may train.
            try:
                outcome, error = use(trainer), None
            except Exception as raised:
                outcome, error = None, raised
        raise _Used(outcome, error)

    search = DopplerTrainer.hyperparameter_search

    def refuse_search(trainer: DopplerTrainer, *args: Any, **options: Any) -> Any:
        if is_baseline_run and trainer.args.disable_dp:
            return search(trainer, *args, **options)
        raise Refusal(
            "script-searches",
            f"{words[0]} calls hyperparameter_search, whose trials have random settings. Give this command a script that "
            "calls train() with one setting.",
        )

    with (
        script_environment(words),
        mock.patch.object(DopplerTrainer, "train", use_instead),
        mock.patch.object(DopplerTrainer, "hyperparameter_search", refuse_search),
    ):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except _Used as used:
            if used.error is not None:
                raise used.error from None
            result: T = used.outcome
            return result
        except SystemExit as ended:
            if isinstance(ended.code, str) and ended.code.startswith(ERROR_PREFIX):
                raise Refusal("script-failed", ended.code.removeprefix(ERROR_PREFIX)) from ended
            if ended.code:  # A script that ends well, as by sys.exit(0), has trained nothing that was tested.
                raise
    if has_baseline:
        raise _without_privacy(words[0])
    raise Refusal(
        "script-without-training",
        f"{words[0]} ended without calling DopplerTrainer.train(). Check that its arguments make it train.",
    )


def _without_privacy(path: str) -> Refusal:
    return Refusal(
        "script-without-privacy",
        f"{path} trains without privacy only, because disable_dp is set, and this command needs a training with privacy. "
        "Leave disable_dp out. What a language model repeats without privacy is shown by doppler-hf audit --text-canaries.",
    )


def _turns_privacy_off(words: Sequence[str]) -> bool:
    """Return whether a script gets `--disable_dp`, as `HfArgumentParser` reads it."""
    for word, following in zip(words, (*words[1:], "--"), strict=True):
        name, _, value = word.partition("=")
        if name.replace("-", "_") == "__disable_dp":
            return (value or ("true" if following.startswith("--") else following)).lower() in _TRUE
    return False


@contextmanager
def script_environment(words: Sequence[str]) -> Iterator[None]:
    """Give a script the arguments and the import path that Python would give it."""
    folder = os.path.dirname(os.path.abspath(words[0]))
    with mock.patch.multiple(sys, argv=list(words), path=[folder, *sys.path]):
        yield


def _script_of(words: Sequence[str]) -> list[str]:
    """Return the path of the script for a recipe, and the arguments for it."""
    recipe = Path(words[0]).resolve()
    # The folder beside the package comes first, since its scripts have the package's version.
    places = [PACKAGE.parent, *recipe.parents, Path.cwd(), *Path.cwd().parents]
    clone = next((place for place in places if (place / CHOOSES_THE_SCRIPT).is_file() and _is_clone(place)), None)
    if clone is None:
        raise Refusal(
            "no-clone",
            "A recipe needs the training scripts of this project's repository, but no clone of it was found near "
            f"{words[0]} or the current folder. Call this command in a clone, or give your own training script with "
            "--script.",
        )
    with mock.patch.object(sys, "path", [str(clone), *sys.path]):
        command_of = import_module(CHOOSES_THE_SCRIPT.with_suffix("").as_posix().replace("/", ".")).command_of
        found: list[str] = command_of(words)
    return found


def _is_clone(folder: Path) -> bool:
    return (folder / "doppler_hf" / "trainer.py").is_file()
