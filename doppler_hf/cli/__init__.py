"""The command `doppler-hf`: what one needs before, after and around a private training run.

Each command is a module of this folder with `add_arguments(parser)` and `run(args)`; the first line of its docstring is
its line in `doppler-hf --help`, and the whole docstring what its own `--help` says. `python -m doppler_hf` is the same.

- plan, filter, audit, verify: the commands
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from doppler_hf.cli import audit, filter, plan, verify


class Command(Protocol):
    """What the module of a command offers."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace, /) -> int:
        """Do it, and return the exit code. A `ValueError` is a mistake in the arguments: one line, exit code 2."""


COMMANDS: Final[Mapping[str, Command]] = {
    "plan": plan,
    "filter": filter,
    "audit": audit,
    "verify": verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name, by default those of the running program. `--batch_size` and
            `--batch-size` are the same flag.

    Returns:
        The exit code: 0 for success; 1 for a check that failed; 2 for arguments that cannot be carried out, with one
        line on standard error that says why.
    """
    parser = argparse.ArgumentParser(
        prog="doppler-hf",
        description="Differentially private fine-tuning with DOPPLER: plan a run, and check what it claims.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        assert command.__doc__ is not None
        command.add_arguments(
            commands.add_parser(
                name,
                help=command.__doc__.splitlines()[0],
                description=command.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
        )
    args = parser.parse_args([_hyphenated(word) for word in (sys.argv[1:] if argv is None else argv)])
    try:
        return COMMANDS[args.command].run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _hyphenated(word: str) -> str:
    """Spell a flag with hyphens; its value, and any other word, stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
