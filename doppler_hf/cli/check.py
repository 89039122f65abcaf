"""Check a training run: can one record change an update more than the proof allows?

The guarantee assumes that one record (or user) moves the clipped sum of a step by at most C, whatever the other records are.
The trainer of a recipe or of your script makes pairs of batches that differ in one record, with its own data, collator,
model, loss and accumulation. The check compares the sums that reach the mechanism. The exit code is 1 if a distance is above
C, or if the record changes the contributions of the others. No weight moves and no ε is spent. Dropout is off, and the
collator must not be random.

The distances are not private: with automatic clipping they show the gradient norm of a record. They are printed, but written
to no file.

  doppler-hf check recipes/image/digits-eps8.yaml --pairs 32
  doppler-hf check --pairs 32 --script my_train.py --learning_rate 1e-3

Options of this command come before --script, and the script's own arguments after it. The check runs in place of the
script's `DopplerTrainer.train()`.
"""

import argparse

from rich.console import Console
from rich.table import Table

from doppler_hf.audit.neighbours import NeighbourResult, neighbour_distances
from doppler_hf.cli import script
from doppler_hf.cli.flags import whole_number
from doppler_hf.trainer import DopplerTrainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf check`."""
    parser.add_argument(
        "--pairs", type=whole_number, default=16, metavar="N", help="pairs of batches (default: %(default)s)"
    )
    parser.add_argument(
        "--draw-size", type=whole_number, metavar="N", help="records in a batch besides the tested one (default: up to 32)"
    )
    script.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Make the pairs, compare them, and print the outcome."""
    console = Console()

    def check(trainer: DopplerTrainer) -> NeighbourResult:
        console.print(f"Comparing {args.pairs} pairs of batches …")
        return neighbour_distances(trainer, pairs=args.pairs, draw_size=args.draw_size)

    result = script.use_trainer(args, check)
    console.print(table_of(result))
    console.print(verdict(result), soft_wrap=True)
    # Privacy: the figures go to the screen and into no file, since distances and couplings are computed from examples,
    # without noise.
    console.print(
        "These figures are computed from training records without noise, so ε does not cover them. Do not publish them.",
        soft_wrap=True,
    )
    return 1 if result.contradicts_claim else 0


def table_of(result: NeighbourResult) -> Table:
    """Return the outcome as a table."""
    table = Table(title="Neighbour test", show_header=False)
    for row in (
        ("pairs of batches", f"{len(result.distances):,}"),
        (
            f"{result.noun}s in a batch",
            f"{result.draw_size:,} and one more (a batch of the run: {result.expected_batch_size:,})",
        ),
        (f"one {result.noun} moves the sum by", f"at most {result.distances.max():.6f} C (allowed: 1 C)"),
        (
            f"it moves the other {result.noun}s by",
            f"at most {result.couplings.max():.2g} C (allowed: {result.allowed_coupling:.2g} C)",
        ),
    ):
        table.add_row(*row)
    return table


def verdict(result: NeighbourResult) -> str:
    """Return the outcome in a sentence or two."""
    who = result.noun
    if not result.contradicts_claim:
        found = f"No defect found: no tested {who} moved the sum by more than C. Others that were not tested may do so."
        coarse = f"The model rounds coarsely, so this test can miss {who}s that move others. Repeat it in float32."
        mode = (
            "In training mode the model draws numbers that could not be held fixed for each row, so it was compared in "
            "evaluation mode. What its layers do in training mode alone is tested when a training starts, and not here."
        )
        said = [found, *([coarse] if result.rounds_coarsely else []), *([] if result.is_of_training else [mode])]
        return " ".join(said)
    if result.distances.max() <= 1.0 + result.tolerance and result.extrapolated.max() <= 1.0 + result.tolerance:
        return (
            f"THE CLAIM IS WRONG: one {who} changes the contributions of other {who}s by up to "
            f"{result.couplings.max():.4g} C. The proof assumes that it changes its own contribution only. Let the loss of "
            "each record depend on that record alone."
        )
    return (
        f"THE CLAIM IS WRONG: one {who} moves the sum by {result.distances.max():.4g} C, and in a whole batch by up to "
        f"{result.extrapolated.max():.4g} C. The ε in the ledger assumes at most 1 C."
    )
