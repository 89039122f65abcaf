"""Audit a recipe: train it with canaries, attack the run, and compare the proven ε with the claimed ε.

Secret coins decide which canaries are in the training set. An attack scores the canaries, and the scores give a lower bound
on ε, which holds with the given confidence. A bound above the claim shows a defect, and the exit code is 1. A bound below it
proves nothing. The canaries are Dirac canaries, a gradient of their own for each, seen white-box: the strongest attack, for
any model.

The run uses a temporary folder and writes only privacy_audit.json into the recipe's output_dir. After the recipe any of its
fields may follow as a flag.

  doppler-hf audit recipes/image/digits-eps8.yaml --num_train_epochs 5 --canaries 1000
"""

import argparse
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from doppler_hf.audit import AuditResult, AuditTrainer
from doppler_hf.workloads.recipe import parse_recipe

# An audited model is discarded: it is neither evaluated nor saved nor reported.
OVERRIDES: Final = (
    "--eval-strategy=no",
    "--save-strategy=no",
    "--load-best-model-at-end=False",
    "--push-to-hub=False",
    "--report-to=none",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf audit`."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML recipe of a private run; its fields may follow as flags")
    parser.add_argument("--canaries", type=int, default=1000, metavar="M", help="how many canaries (default: %(default)s)")
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence of the bound (default: %(default)s)"
    )
    parser.set_defaults(fields=[])


def run(args: argparse.Namespace) -> int:
    """Train, attack, and print the outcome."""
    workload, training_args = parse_recipe([args.recipe, *args.fields, *OVERRIDES])
    output_dir = Path(training_args.output_dir)
    # Elsewhere: a model with canaries, and its ledger, must not be taken for those of a training.
    with tempfile.TemporaryDirectory() as folder:
        training_args.output_dir = folder
        trainer = AuditTrainer(
            model=workload.model,
            args=training_args,
            num_canaries=args.canaries,
            train_dataset=workload.train_dataset,
            data_collator=workload.data_collator,
            processing_class=workload.processing_class,
        )
        result = trainer.audit(confidence=args.confidence)
    path = result.save(output_dir)
    console = Console()
    console.print(table_of(result))
    console.print(verdict(result), soft_wrap=True)
    console.print(f"Scores and coins are in {path}.", markup=False, soft_wrap=True)
    return 1 if result.contradicts_claim else 0


def table_of(result: AuditResult) -> Table:
    """Return the claim and the outcome as a table."""
    canaries = len(result.scores)
    rows = (
        ("claimed ε", f"{result.claimed_epsilon:.4g}"),
        *((f"audited ε, {method}", f"at least {epsilon:.4g}") for method, epsilon in result.lower_bounds.items()),
        ("δ", f"{result.delta:.3g}"),
        ("confidence", f"{result.confidence:g}"),
        ("canaries", f"{canaries:,}, {int(result.included.sum()):,} of them in"),
        ("guessed right", f"{result.right_guesses:,}, {result.right_guesses / canaries:.1%}"),
    )
    table = Table(title="Privacy audit", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def verdict(result: AuditResult) -> str:
    """Return the outcome in one sentence."""
    if result.contradicts_claim:
        return (
            f"THE CLAIM IS WRONG: this run leaks at least ε = {result.lower_bound:.4g}, and claims "
            f"{result.claimed_epsilon:.4g} (confidence {result.confidence:g})."
        )
    return (
        f"No defect found: ε of at least {result.lower_bound:.4g} is proven, {result.claimed_epsilon:.4g} is claimed. The "
        "run may still leak what this attack does not measure."
    )
