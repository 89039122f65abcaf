"""Audit a training run: train with canaries, attack the run, and compare the proven ε with the claimed ε.

Secret coins decide which canaries are in the training set. An attack scores the canaries, and the scores give a lower bound
on ε, which holds with the given confidence. If the bound is above the claim, the run has a defect, and the exit code is 1. A
bound below the claim proves nothing. Each canary is a Dirac canary: it has a weight of its own, which the attacker sees at
every step. This is the strongest attack, for any model.

With --text-canaries a causal language model is audited instead, with or without privacy: does it repeat what is in its
texts? Random codes are in 1, 10 or 100 rows. The table shows the rank of each code among 1,000 codes, and which codes greedy
generation repeats. The script's first training is audited.

The audited run uses a temporary folder and writes only privacy_audit.json into output_dir. Fields of a recipe may follow it
as flags. Options of this command come before --script, and the script's own arguments after it. The audit runs in place of
the script's `DopplerTrainer.train()`.

  doppler-hf audit recipes/image/digits-eps8.yaml --num_train_epochs 5 --canaries 1000
  doppler-hf audit --canaries 1000 --script my_train.py --learning_rate 1e-3
  doppler-hf audit --text-canaries 100 --script scripts/synthesize.py RECIPE --output_dir out/audit
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from doppler_hf.audit import AuditResult, AuditTrainer, TextAuditResult, audit_texts
from doppler_hf.audit.audited_run import discarded_run, hidden_prints
from doppler_hf.cli import script
from doppler_hf.cli.flags import whole_number
from doppler_hf.errors import Refusal, page
from doppler_hf.trainer import DopplerTrainer

_BEGINS: Final = (
    "Audit: trains once with {:,} canaries, in a temporary folder. What the run prints is not shown, and neither are its "
    "warnings, which each training shows. An audit that is interrupted cannot be continued: start it again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf audit`."""
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--canaries", type=whole_number, default=1000, metavar="M", help="how many canaries (default: %(default)s)"
    )
    kinds.add_argument(
        "--text-canaries", type=whole_number, metavar="M", help="how many canaries made of text, for a causal language model"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence of the bound (default: %(default)s)"
    )
    script.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train, attack, and print the outcome."""

    def audit(trainer: DopplerTrainer) -> tuple[AuditResult, Path]:
        # A temporary folder is used, so that nobody takes the model with canaries, or its ledger, for the real ones.
        with tempfile.TemporaryDirectory() as folder:
            auditor = auditor_of(trainer, num_canaries=args.canaries, folder=folder)
            print(_BEGINS.format(args.canaries))
            with hidden_prints():
                result = auditor.audit(confidence=args.confidence)
        return result, result.save(Path(str(trainer.args.output_dir)))

    def look_for_texts(trainer: DopplerTrainer) -> tuple[TextAuditResult, Path]:
        print(_BEGINS.format(args.text_canaries))
        found = audit_texts(trainer, num_canaries=args.text_canaries, confidence=args.confidence)
        return found, found.save(Path(str(trainer.args.output_dir)))

    console = Console()
    if args.text_canaries is None:
        result, path = script.use_trainer(args, audit)
    else:
        found, path = script.use_trainer(args, look_for_texts, is_baseline_run=False)
        console.print(table_of_texts(found))
        result = found.membership
    console.print(table_of(result))
    console.print(verdict(result), soft_wrap=True)
    console.print(
        f"The score of each canary, and whether it was in the training set, were written to {path}.",
        markup=False,
        soft_wrap=True,
    )
    return 1 if result.contradicts_claim else 0


def auditor_of(trainer: DopplerTrainer, *, num_canaries: int, folder: str) -> AuditTrainer:
    """Return a trainer with canaries for the same model, data, collator, loss and arguments, with `folder` as output_dir.

    Raises:
        ValueError: If the trainer's class has an `__init__` of its own, or the trainer cannot be audited.
    """
    kind = type(trainer)
    if kind.__init__ is not DopplerTrainer.__init__:
        raise Refusal(
            "trainer-of-your-own",
            f"{kind.__name__} has its own __init__, so this command cannot construct it again for the audit. Audit it in "
            f"Python: define class Audited(AuditTrainer, {kind.__name__}), and call audit() of its trainer "
            f"({page('trust/audits')}).",
        )
    audited = type(f"AuditOf{kind.__name__}", (AuditTrainer, kind), {})
    auditor: AuditTrainer = audited(
        model=trainer.model,
        args=discarded_run(trainer.args, folder=folder),
        num_canaries=num_canaries,
        train_dataset=trainer.train_dataset,
        data_collator=trainer.data_collator,
        processing_class=trainer.processing_class,
    )
    return auditor


def table_of_texts(result: TextAuditResult) -> Table:
    """Return what the model makes of canaries, by the number of rows that they are in."""
    table = Table("insertions", "canaries", "median rank", "best rank", "repeated word for word")
    table.title = f"Canaries in the texts, ranked among {result.codes:,} codes"
    for insertions in sorted({each.insertions for each in result.canaries}):
        some = [each for each in result.canaries if each.insertions == insertions]
        ranks = [each.rank for each in some]
        repeated = sum(each.is_repeated for each in some)
        figures = f"{len(some):,}", f"{np.median(ranks):,.0f}", f"{min(ranks):,}", f"{repeated:,}"
        table.add_row(f"{insertions:,}" if insertions else "0 (left out)", *figures)
    return table


def table_of(result: AuditResult) -> Table:
    """Return the claim and the outcome as a table."""
    canaries = len(result.scores)
    rows = (
        ("claimed ε", "∞, no privacy" if math.isinf(result.claimed_epsilon) else f"{result.claimed_epsilon:.4g}"),
        *((f"audited ε, {method}", f"at least {epsilon:.4g}") for method, epsilon in result.lower_bounds.items()),
        ("δ", f"{result.delta:.3g}"),
        ("confidence", f"{result.confidence:g}"),
        ("canaries", f"{canaries:,}, {int(result.included.sum()):,} of them in the training set"),
        ("guessed right", f"{result.right_guesses:,} of {canaries:,} ({result.right_guesses / canaries:.1%})"),
    )
    table = Table(title="Privacy audit", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def verdict(result: AuditResult) -> str:
    """Return the outcome in a sentence or two."""
    if result.contradicts_claim:
        return (
            f"THE CLAIM IS WRONG: this run leaks at least ε = {result.lower_bound:.4g}, but claims "
            f"{result.claimed_epsilon:.4g} (confidence {result.confidence:g})."
        )
    if math.isinf(result.claimed_epsilon):
        return f"This run claims no privacy. The attack proves an ε of at least {result.lower_bound:.4g}."
    return (
        f"No defect found: the attack proves an ε of at least {result.lower_bound:.4g}, and the run claims "
        f"{result.claimed_epsilon:.4g}. The run may still leak what this attack does not measure."
    )
