"""Check a privacy ledger: that nobody has edited it, and that its ε follows from what was released.

Checked are the schema, the chain of hashes, whether the ledgers of the checkpoints beside it are earlier states of it, and
every ε in it: recomputed from noise multiplier, sample rate and steps, by every accountant. The exit code is 1 if any of
this fails, if ε is above its target, or if the training was not private.

A chain shows every edit except two: a tail that was cut off, and a file that was written anew as a whole. Against these,
note the last hash (the head) where nobody can change it, and give it as --head. And no file can show that the training did
what it says.

  doppler-hf verify out/
  doppler-hf verify out/checkpoint-500/privacy_ledger.json --head 5f1d… (64 digits)
"""

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, get_args

from rich.console import Console
from rich.table import Table

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Accountant, Releases, get_total_epsilon
from doppler_hf.privacy.ledger.file import package_versions
from doppler_hf.privacy.ledger.record import Claim

# The same code on another machine adds up in another order.
_SAME_VERSIONS_TOLERANCE: Final = 1e-6
# Another version may bound ε on another grid, or at other orders. Such bounds are within a percent of what they bound (the
# tests of the accountants hold them to that), so that a larger difference is none of versions.
_OTHER_VERSIONS_TOLERANCE: Final = 1e-2
_ACCOUNTING_PACKAGES: Final = ("doppler_hf", "opacus", "dp-accounting")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf verify`."""
    parser.add_argument("path", type=Path, metavar="PATH", help=f"a folder with {LEDGER_NAME}, or the file itself")
    parser.add_argument("--head", metavar="HASH", help="the last hash, as published elsewhere: 64 hexadecimal digits")


def run(args: argparse.Namespace) -> int:
    """Check, print, and say in one line whether it holds."""
    path = args.path / LEDGER_NAME if args.path.is_dir() else args.path
    if not path.exists():
        raise ValueError(f"There is no {LEDGER_NAME} at {args.path}. Give the output folder of a private run.")
    if args.head is not None and not re.fullmatch("[0-9a-fA-F]{64}", args.head):
        # Fewer digits could be hit by trial.
        raise ValueError(f"head must be all 64 hexadecimal digits of the hash, got {args.head!r}.")
    console = Console()
    try:
        ledger = PrivacyLedger.load(path)
    except ValueError as error:
        console.print(f"NOT VERIFIED: {error}", markup=False, soft_wrap=True)
        return 1
    mismatches = [
        *epsilon_mismatches(ledger),
        *budget_mismatches(ledger),
        *relative_mismatches(ledger, path.parent),
        *([] if args.head is None else head_mismatches(ledger, args.head)),
    ]
    console.print(terms_table(ledger))
    console.print(epsilon_table(ledger))
    console.print(
        "Not covered by ε:", *(f"  - {line}" for line in ledger.not_covered), sep="\n", markup=False, soft_wrap=True
    )
    console.print(f"The head is {ledger.head}", soft_wrap=True)
    if args.head is None:
        console.print("Without --head, it goes unnoticed if the ledger was cut off, or written anew as a whole.")
    for mismatch in mismatches:
        console.print(f"- {mismatch}", markup=False, soft_wrap=True)
    if mismatches:
        console.print(f"NOT VERIFIED: {len(mismatches)} of the checks failed.")
        return 1
    console.print(f"VERIFIED: {guarantee_in_words(ledger)}", markup=False, soft_wrap=True)
    return 0


def epsilon_mismatches(ledger: PrivacyLedger) -> list[str]:
    """Return where an ε of the ledger is not the one that follows from what was released."""
    found = []
    for claim in ledger.claims:
        for name, stated in claim.epsilons.items():
            recomputed = recompute(claim.history, name, private=claim.private, delta=ledger.statement.target_delta)
            if not math.isclose(stated, recomputed, rel_tol=tolerance(claim.versions)):
                found.append(
                    f"Entry {claim.entry} ({ledger.entries[claim.entry]['event']}) states ε = {stated:.8g} by {name}; what "
                    f"was released until then costs {recomputed:.8g}."
                )
    return found


def recompute(history: list[Releases], accountant: Accountant, *, private: bool, delta: float) -> float:
    """Return ε of `history`; infinity where something was not private, NaN where the accountant cannot tell."""
    if not private:
        return math.inf
    try:
        return get_total_epsilon(history, delta=delta, accountant=accountant)
    except ValueError:  # A ledger that no run could have written.
        return math.nan


def tolerance(versions: Mapping[str, str]) -> float:
    """Return how far apart two computations of the same ε may be, relative; one of them with these `versions`."""
    own = package_versions()
    same = all(versions[name] == own[name] for name in _ACCOUNTING_PACKAGES)
    return _SAME_VERSIONS_TOLERANCE if same else _OTHER_VERSIONS_TOLERANCE


def budget_mismatches(ledger: PrivacyLedger) -> list[str]:
    """Return whether the training was not private, or cost more than it was to."""
    if not ledger.private:
        return ["The training was not private: it had no noise, or noise or draws that can be reproduced."]
    statement = ledger.statement
    spent = recompute(ledger.history, statement.accountant, private=True, delta=statement.target_delta)
    slack = 1.0 + tolerance(ledger.runs[-1].versions)
    if statement.target_epsilon is not None and not spent <= slack * statement.target_epsilon:
        return [f"The target was ε = {statement.target_epsilon:g}, and what was released costs {spent:.8g}."]
    return []


def relative_mismatches(ledger: PrivacyLedger, folder: Path) -> list[str]:
    """Return which checkpoints in `folder` have a ledger that is no earlier state of this one, or of one set aside."""
    family = [ledger]
    for aside in sorted(folder.glob(f"{Path(LEDGER_NAME).stem}.*{Path(LEDGER_NAME).suffix}")):
        try:
            family.append(PrivacyLedger.load(aside))
        except ValueError:
            continue  # Whatever was set aside here, no checkpoint goes by it.
    found = []
    for path in sorted(folder.glob(f"checkpoint-*/{LEDGER_NAME}")):
        try:
            checkpoint = PrivacyLedger.load(path)
        except ValueError as error:
            found.append(str(error))
            continue
        if not any(checkpoint.is_prefix_of(other) for other in family):
            found.append(
                f"{path} is no earlier state of the ledger in {folder}: one is of another run, or the latter was cut off."
            )
    return found


def head_mismatches(ledger: PrivacyLedger, head: str) -> list[str]:
    """Return whether the ledger ends otherwise than the one whose head was published."""
    if ledger.head == head.lower():
        return []
    later = any(entry["hash"] == head.lower() for entry in ledger.entries)
    what = "the ledger has gone on since" if later else "this is another ledger, or its tail was cut off"
    return [f"The head is {ledger.head}, not {head.lower()}: {what}."]


def terms_table(ledger: PrivacyLedger) -> Table:
    """Lay out what the guarantee rests on, and what was run."""
    statement, last = ledger.statement, ledger.runs[-1]
    first = ledger.entries[0]
    end = "closed" if last.is_closed else f"not closed: at least {last.steps_released:,} of them were run"
    table = Table(title="Privacy ledger", show_header=False)
    for row in (
        ("mechanism", first["mechanism"]),
        ("neighbouring relation", first["neighbouring_relation"]),
        ("unit of privacy", statement.unit_in_words),
        ("units N", f"{statement.num_units:,} ({first['role_of_num_units']})"),
        ("steps planned", f"{statement.steps_planned:,}"),
        ("steps reserved", f"{last.steps_reserved:,}"),
        ("steps counted", f"{ledger.steps_run:,} ({end})"),
        ("restarts", ", ".join(f"at step {step:,}" for step in ledger.restarts) or "none"),
        *((f"σ, q of {steps:,} steps", f"{sigma:.6g}, {rate:.6g}") for sigma, rate, steps in ledger.history),
        ("clip norm C", f"{statement.per_sample_max_grad_norm:g} ({statement.clipping}, {statement.clipping_granularity})"),
        ("training loss", statement.train_loss_in_words),
        ("noise source", statement.noise_source),
        ("δ", f"{statement.target_delta:.4g}"),
        ("target ε", "none" if statement.target_epsilon is None else f"{statement.target_epsilon:g}"),
        ("opened", f"{first['time']}, by doppler_hf {first['versions']['doppler_hf']}"),
    ):
        table.add_row(*row)
    return table


def epsilon_table(ledger: PrivacyLedger) -> Table:
    """Lay out the last ε that was stated beside the one recomputed, and what the whole count costs."""
    table = Table("accountant", "ε stated", "recomputed", "of all steps counted", title="ε")
    claim: Claim | None = ledger.claims[-1] if ledger.claims else None
    delta = ledger.statement.target_delta
    for name in get_args(Accountant):
        stated, recomputed = "–", "–"
        if claim is not None and name in claim.epsilons:
            stated = f"{claim.epsilons[name]:.6g}"
            recomputed = f"{recompute(claim.history, name, private=claim.private, delta=delta):.6g}"
        total = recompute(ledger.history, name, private=ledger.private, delta=delta)
        table.add_row(name, stated, recomputed, "–" if math.isnan(total) else f"{total:.6g}")
    return table


def guarantee_in_words(ledger: PrivacyLedger) -> str:
    """Return the guarantee of a verified ledger in one line."""
    statement = ledger.statement
    return (
        f"({ledger.epsilon():.4g}, {statement.target_delta:.3g})-differential privacy for {statement.unit_of_privacy} after "
        f"{ledger.steps_run:,} steps, by {statement.accountant}."
    )
