"""The command `doppler-hf`: tools for before and after a private training run.

Each command is a module of this folder with `add_arguments(parser)` and `run(args)`, imported when it is chosen: some need
torch, and most do not. Its docstring is its own `--help`, and the first line of that is its line in `doppler-hf --help`.
`run` returns the exit code. A parser whose defaults have `fields` takes words that are none of its own, the fields of a
recipe. `python -m doppler_hf` is the same command.

- plan, estimate, filter, audit, check, verify: the commands
- script: a training script up to its training, for check and audit
- random_model: a model of random weights, for estimate
- planned_runs: what a run would cost, and its alternatives, for plan
- plots: pictures, for filter and plan
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

from doppler_hf.deprecated import words_of_today
from doppler_hf.extras import MissingExtraError
from doppler_hf.version import VERSION

COMMANDS: Final[Mapping[str, str]] = {
    "plan": "Plan a private run: its ε, the noise in its gradients, and alternatives of equal ε.",
    "estimate": "Estimate a private run's peak memory and time per step before training.",
    "filter": "Show low-pass filters: their figures and coefficients as tables, their responses as a picture.",
    "audit": "Audit a training: train it with canaries, attack the run, and compare the proven ε with the claimed ε.",
    "check": "Check a training: can one record change an update more than the proof allows?",
    "verify": "Check a privacy ledger: nobody edited it, and its ε follows from the recorded steps.",
}
"""Name → its line in the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name, by default those of the running program. `--batch_size` and
            `--batch-size` are the same flag.

    Returns:
        The exit code: 0 for success, 1 for a check that failed, 2 for arguments that are refused (one line on standard error
        says why), 130 for an interruption from the keyboard.
    """
    parser = argparse.ArgumentParser(
        prog="doppler-hf",
        description="Differentially private fine-tuning with DOPPLER: plan a run, and check what it claims.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"doppler_hf {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    given = list(sys.argv[1:] if argv is None else argv)
    # What follows --script are the words of a script that is not ours.
    ours = given.index("--script") if "--script" in given else len(given)
    try:
        of_today, warned = words_of_today([*map(_hyphenated, given[:ours])])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for warning in warned:
        print(f"warning: {warning}", file=sys.stderr)
    words = [*of_today, *given[ours:]]
    # No flag before the command takes a value, so that the first name of a command is the one that argparse will take.
    chosen = next((word for word in words if word in COMMANDS), None)
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
        # By the parser of the command, whose usage names the flags that there are.
        commands.choices[chosen].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(args.run(args))
    except (ValueError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 and the number of the signal, as shells have it


def _hyphenated(word: str) -> str:
    """Return a flag with hyphens for underscores. Its value, and any other word, stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
