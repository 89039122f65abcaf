"""The command `doppler-hf`: tools for before and after a private training run.

Each command is a module of this folder with `add_arguments(parser)` and `run(args)`. It is imported when it is chosen,
because some commands need torch and most do not. The module's docstring is the command's `--help`, and the docstring's first
line is the command's line in `doppler-hf --help`. `run` returns the exit code. A parser whose defaults have `fields` accepts
words that are not its own flags: the fields of a recipe. `python -m doppler_hf` is the same command.

- plan, estimate, filter, audit, check, verify: the commands
- flags: the values and names of flags, for all commands
- checked_files: what a ledger says of the files in its folder, for verify
- script: runs a training script up to its training, for check, audit and estimate
- random_model: a model with random weights, for estimate and plan
- lora: the description of adapters, for random_model
- measured_run: a few steps of a script's training, for estimate
- planned_runs: the cost of a run and of its alternatives, for plan
- plots: pictures of filters and plans, for filter and plan
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

from doppler_hf.deprecated import without_deprecated_words
from doppler_hf.extras import MissingExtraError
from doppler_hf.version import VERSION

COMMANDS: Final[Mapping[str, str]] = {
    "plan": "Plan a private run: its ε, the noise in its gradients, and alternatives of equal ε.",
    "estimate": "Estimate a private run's peak memory and time per step before training.",
    "filter": "Show low-pass filters: their figures and coefficients as tables, their responses as a picture.",
    "audit": "Audit a training run: train with canaries, attack the run, and compare the proven ε with the claimed ε.",
    "check": "Check a training run: can one record change an update more than the proof allows?",
    "verify": "Check a privacy ledger: nobody edited it, and its ε follows from the recorded steps.",
}
"""Name → its line in the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name; by default `sys.argv[1:]`. `--batch_size` and `--batch-size` are the same
            flag.

    Returns:
        The exit code: 0 for success, 1 for a failed check, 2 for invalid arguments (one line on standard error says why),
        130 for an interruption from the keyboard, 141 if the reader of the output has stopped, as `head` does.
    """
    try:
        try:
            return _run(argv)
        finally:  # Flush here: an error when Python ends would print a traceback. This also runs after --help, which exits.
            sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # Nothing is then left to be written when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # Shells report SIGPIPE with this code.


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="doppler-hf",
        description="Differentially private fine-tuning with DOPPLER: plan a run, and check what it claims.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"doppler_hf {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    given = list(sys.argv[1:] if argv is None else argv)
    # The words after --script belong to the user's script.
    ours = given.index("--script") if "--script" in given else len(given)
    try:
        of_today, warned = without_deprecated_words([*map(_hyphenated, given[:ours])])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for warning in warned:
        print(f"warning: {warning}", file=sys.stderr)
    words = [*of_today, *given[ours:]]
    # No flag before the command takes a value, so that the first command's name is the one that argparse will choose.
    chosen = next((word for word in words if word in COMMANDS), None)
    if words and words[0].startswith("-") and words[0] not in parser._option_string_actions:
        # argparse would take the flag's value for the command.
        parser.error(f"the command comes before its flags: write doppler-hf {chosen or 'COMMAND'} {words[0]} …")
    for name, line in COMMANDS.items():
        command = commands.add_parser(
            name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name == chosen:
            module = import_module(f"{__name__}.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(words)
    if "fields" in args:
        args.fields = unknown
    elif unknown:
        assert chosen is not None, "argparse requires a command"
        # The command's own parser reports the error, because its usage line names the existing flags.
        from doppler_hf.cli.flags import hint

        own = commands.choices[chosen]
        own.error(f"unrecognized arguments: {' '.join(unknown)}{hint(unknown, own._option_string_actions)}")
    try:
        return int(args.run(args))
    except (ValueError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # Shells report 128 plus the number of the signal.


def _hyphenated(word: str) -> str:
    """Return a flag with hyphens in place of underscores; its value, and any other word, stays unchanged."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
