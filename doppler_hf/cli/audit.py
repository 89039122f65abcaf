"""Audit a training: train it with canaries, attack the run, and compare the proven ε with the claimed ε.

Secret coins decide which canaries are in the training set. An attack scores the canaries, and the scores give a lower bound
on ε, which holds with the given confidence. A bound above the claim shows a defect, and the exit code is 1. A bound below it
proves nothing. The canaries are Dirac canaries, a gradient of their own for each, seen white-box: the strongest attack, for
any model.

The run uses a temporary folder and writes only privacy_audit.json into the training's output_dir. After a recipe any of its
fields may follow as a flag. Options come before --script, and the script's own arguments after it. The audit replaces its
`DopplerTrainer.train()`.

  doppler-hf audit recipes/image/digits-eps8.yaml --num_train_epochs 5 --canaries 1000
  doppler-hf audit --canaries 1000 --script my_train.py --learning_rate 1e-3
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from doppler_hf.audit import AuditResult, AuditTrainer
from doppler_hf.cli import script
from doppler_hf.errors import Refusal, page
from doppler_hf.trainer import DopplerTrainer

# An audited model is discarded: it is neither evaluated nor saved nor reported.
DISCARDED: Final[dict[str, Any]] = {
    "eval_strategy": IntervalStrategy.NO,
    "eval_on_start": False,
    "save_strategy": SaveStrategy.NO,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": [],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf audit`."""
    parser.add_argument("--canaries", type=int, default=1000, metavar="M", help="how many canaries (default: %(default)s)")
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence of the bound (default: %(default)s)"
    )
    script.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train, attack, and print the outcome."""

    def audit(trainer: DopplerTrainer) -> tuple[AuditResult, Path]:
        # Elsewhere: a model with canaries, and its ledger, must not be taken for those of a training.
        with tempfile.TemporaryDirectory() as folder:
            auditor = auditor_of(trainer, num_canaries=args.canaries, folder=folder)
            result = auditor.audit(confidence=args.confidence)
        return result, result.save(Path(str(trainer.args.output_dir)))

    result, path = script.use_trainer(args, audit)
    console = Console()
    console.print(table_of(result))
    console.print(verdict(result), soft_wrap=True)
    console.print(f"Scores and coins are in {path}.", markup=False, soft_wrap=True)
    return 1 if result.contradicts_claim else 0


def auditor_of(trainer: DopplerTrainer, *, num_canaries: int, folder: str) -> AuditTrainer:
    """Return a trainer with canaries for the same model, data, collator, loss and arguments, which writes into a folder."""
    kind = type(trainer)
    if kind.__init__ is not DopplerTrainer.__init__:
        raise Refusal(
            "trainer-of-your-own",
            f"Expected a trainer that is made as DopplerTrainer is; got {kind.__name__}, which has an __init__ of its own. "
            f"Audit it in Python, with class Audited(AuditTrainer, {kind.__name__}): {page('trust/audits')}.",
        )
    args = copy.copy(trainer.args)
    for name, value in {**DISCARDED, "output_dir": folder}.items():
        setattr(args, name, value)
    audited = type(f"AuditOf{kind.__name__}", (AuditTrainer, kind), {})
    auditor: AuditTrainer = audited(
        model=trainer.model,
        args=args,
        num_canaries=num_canaries,
        train_dataset=trainer.train_dataset,
        data_collator=trainer.data_collator,
        processing_class=trainer.processing_class,
    )
    return auditor


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
