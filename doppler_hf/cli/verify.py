"""Check a privacy ledger: that it was not edited, and that its ε follows from what was released.

The command checks the schema and the chain of hashes, that the ledgers of the checkpoints are earlier states of this ledger,
and that the weights next to it are weights that the run saved. It computes every ε again from noise multiplier, sample rate
and steps, with the accountant that the ledger names. The exit code is 1 if any of this fails, if ε is above its target, or
if the run was not private.

The chain reveals every edit except two: entries cut off at the end, and a file that was rewritten as a whole. Against these,
keep the last hash (the head) in a place that nobody can change, and give it as --head. No file can prove that the training
run did what the file says.

To check a model that was made by merging an adapter into its base, give the output folder of the private run, where the
ledger is, as --adapter, and the base model as --base. The merge is computed again.

  doppler-hf verify out/
  doppler-hf verify merged/ --base BASE --adapter out/
  doppler-hf verify out/checkpoint-500/privacy_ledger.json --head 5f1d… (64 digits)
"""

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from doppler_hf.cli.checked_files import CheckedFiles, checked_files
from doppler_hf.errors import Refusal
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.accounting.accounting import INTERRUPTED_SEARCH, get_total_epsilon
from doppler_hf.privacy.accounting.selection import epsilon_with
from doppler_hf.privacy.ledger.file import package_versions
from doppler_hf.privacy.ledger.ledger import SEARCH_NOTE_NAME, entries_in, ledger_files, ledgers_in
from doppler_hf.privacy.ledger.statement import noun_of
from doppler_hf.privacy.ledger.terms import (
    HOW_COMPUTED,
    attacks_in_words,
    earlier_in_words,
    early_stop_in_words,
    meaning_in_words,
    not_covered_in_words,
    parts_in_words,
    stated_in_words,
    terms_in_words,
    total_of,
    total_rows,
    unbegun_in_words,
    unit_in_words,
    why_not_private,
)
from doppler_hf.privacy.ledger.weights import weight_files

# The same code may add numbers in a different order on another machine.
_SAME_VERSIONS_TOLERANCE: Final = 1e-6
# Another version may bound ε on another grid, and its bound may be up to one percent lower.
_OTHER_VERSIONS_TOLERANCE: Final = 1e-2
# Below so many columns, as on a phone, two columns side by side would break every word.
_NARROW: Final = 64
# The verdicts: with weights beside the ledger, without any, and if a check has failed.
VERIFIED, LEDGER_ONLY, NOT_VERIFIED = "verified", "ledger only", "not verified"
_ACCOUNTING_PACKAGES: Final = ("doppler_hf", "dp-accounting", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doppler-hf verify`."""
    parser.add_argument("path", type=Path, metavar="PATH", help=f"a folder with {LEDGER_NAME}, or the file itself")
    parser.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="PATH is a model into which the adapter in this folder was merged"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="with --adapter: the model into which it was merged, a folder or hub id"
    )
    parser.add_argument("--head", metavar="HASH", help="the last hash, as you published it: 64 hexadecimal digits")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Check the ledger, and print whether it holds."""
    if (args.base is None) != (args.adapter is None):
        raise Refusal(
            "half-of-a-pair",
            "--base and --adapter must be given together. To verify a merged model, run doppler-hf verify MERGED --base "
            "BASE --adapter FOLDER.",
        )
    given = args.path if args.adapter is None else args.adapter
    path = given / LEDGER_NAME if given.is_dir() else given
    if not path.exists() and (path.parent / SEARCH_NOTE_NAME).exists():
        raise Refusal(
            "search-not-ended",
            f"{given} has no {LEDGER_NAME}: a hyperparameter search was begun there and has not ended. Its ε counts all the "
            "same. To continue it before the date on which you publish, make the same call of hyperparameter_search again.",
        )
    if not path.exists():
        has_weights = given.is_dir() and weight_files(given)
        aside = ledger_files(given) if given.is_dir() else []
        raise Refusal(
            "no-ledger",
            f"There is no {LEDGER_NAME} at {given}. "
            + (
                f"A ledger was set aside there, as {aside[-1].name}, because it does not cover the weights that were saved "
                f"later. To check what its run has spent: doppler-hf verify {aside[-1]}."
                if aside
                else "Give the output folder of a private run."
            )
            + (
                " If an adapter was merged into this model, run doppler-hf verify MERGED --base BASE --adapter FOLDER, "
                "where FOLDER is the output folder of the run."
                if has_weights and not aside
                else ""
            ),
        )
    if path.name != LEDGER_NAME and not entries_in(path) and path not in ledger_files(path.parent):
        raise Refusal(
            "not-a-ledger-file",
            f"{given} is not a ledger. Give its folder, {path.parent}, if {LEDGER_NAME} is in it.",
        )
    if args.head is not None and not re.fullmatch("[0-9a-fA-F]{64}", args.head):
        # A forger could find a ledger that matches fewer digits by trial and error.
        raise Refusal(
            "not-a-head", f"--head must be the complete last hash of the ledger, 64 hexadecimal digits; got {args.head!r}."
        )
    console = Console()
    try:
        ledger = PrivacyLedger.load(path)
    except ValueError as error:
        why = f"{error} If the model is not yours, ask its publisher for an unchanged file."
        if args.json:
            print(json.dumps({"verdict": NOT_VERIFIED, "failures": [why]}, ensure_ascii=False))
        else:
            console.print(f"NOT VERIFIED: {why}", markup=False, soft_wrap=True)
        return 1
    checked = check(ledger, path.parent, args)
    if args.json:
        print(json.dumps(as_json(ledger, checked), ensure_ascii=False, indent=2))
    else:
        show(console, ledger, checked, args)
    return 1 if checked.mismatches else 0


class Checked(NamedTuple):
    """The outcome of all checks.

    Attributes:
        files: What was found of the files beside the ledger.
        mismatches: A line for each check that failed.
        notes: What else is to be known, a line each.
        others: The ledgers of other training runs in the folder; None for one that cannot be read.
    """

    files: CheckedFiles
    mismatches: list[str]
    notes: list[str]
    others: Mapping[Path, PrivacyLedger | None]

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        return NOT_VERIFIED if self.mismatches else VERIFIED if self.files.weights else LEDGER_ONLY


def check(ledger: PrivacyLedger, folder: Path, args: argparse.Namespace) -> Checked:
    """Return the outcome of all checks of a ledger and of the files in its folder."""
    files = checked_files(folder, ledger=ledger)
    mismatches = [*budget_mismatches(ledger), *epsilon_mismatches(ledger), *files.mismatches]
    mismatches += [] if args.head is None else head_mismatches(ledger, args.head)
    if args.adapter is not None:
        if not files.weights:
            mismatches.append(f"There is no adapter in {folder}. Give the folder in which the private run saved it.")
        else:
            from doppler_hf.run.weights.merged_model import (
                merge_mismatches,  # The module loads models, so it is imported late.
            )

            mismatches += merge_mismatches(args.path, base=args.base, adapter=folder)
    of_terms = (stated_in_words, unbegun_in_words, early_stop_in_words, earlier_in_words, earlier_ledgers)
    notes = [said for in_words in of_terms if (said := in_words(ledger))]
    others = other_ledgers(ledger, folder)
    return Checked(files, mismatches, [*notes, *files.notes, *others_in_words(others)], others)


def mismatches_in(folder: Path, *, ledger: PrivacyLedger) -> list[str]:
    """Return a line for everything in `folder` that contradicts its ledger: the target, ε, checkpoints and weights."""
    return [
        *budget_mismatches(ledger),
        *epsilon_mismatches(ledger),
        *checked_files(folder, ledger=ledger).mismatches,
    ]


def earlier_ledgers(ledger: PrivacyLedger) -> str:
    """Return which other ledgers have a part of the ε, in words; empty if none has."""
    if not ledger.earlier:
        return ""
    # Their steps are in other ledgers, or in none if a search was interrupted.
    others = [
        f"{name} (ε = {spent.epsilon:.4g})"
        for name, spent in ledger.earlier_trainings.items()
        if not name.startswith(INTERRUPTED_SEARCH)
    ]
    named = f" In their row *ledger* they have the names {', '.join(others)}." if others else ""
    return f"The ε of the others is as this ledger states it. Verify their ledgers, too.{named}"


def as_json(ledger: PrivacyLedger, checked: Checked) -> dict[str, Any]:
    """Return the verdict, and what it is about, in a form for programs; what is infinite is None."""
    total = total_of(ledger, epsilon=ledger.epsilon())
    earlier = ledger.earlier_trainings
    return {
        "verdict": checked.verdict,
        "epsilon": _finite(total.epsilon),
        "delta": total.delta,
        "unit": noun_of(total.unit),
        "unit_of_run": ledger.statement.noun,
        "steps": ledger.steps_run,
        "epsilon_of_run": _finite(ledger.epsilon()),
        "planned_epsilon_of_run": _finite(ledger.planned_epsilon),
        "delta_of_run": ledger.statement.target_delta,
        "target_epsilon": ledger.statement.target_epsilon,
        "ledger": ledger.name,
        "head": ledger.head,
        "earlier": {
            name: {
                "epsilon": _finite(spent.epsilon),
                "delta": spent.delta,
                "unit": noun_of(spent.unit) if spent.unit else None,
            }
            for name, spent in earlier.items()
        },
        "other_ledgers": [_other_as_json(path, other) for path, other in checked.others.items()],
        "weights": checked.files.weights,
        "step_of_weights": checked.files.step,
        "copies": checked.files.copies,
        "unchecked": checked.files.unchecked,
        "incomplete_checkpoints": checked.files.incomplete,
        "failures": checked.mismatches,
        "notes": checked.notes,
        "terms": dict(terms_rows(ledger, [])),
        "not_covered": not_covered_in_words(ledger),
    }


def _other_as_json(path: Path, other: PrivacyLedger | None) -> dict[str, Any]:
    """Return what a program must know to add the ε of another run in the folder."""
    if other is None:
        return {"file": path.name, "ledger": None}
    return {
        "file": path.name,
        "ledger": other.name,
        "epsilon_of_run": _finite(other.epsilon()),
        "planned_epsilon_of_run": _finite(other.planned_epsilon),
        "delta_of_run": other.statement.target_delta,
        "unit_of_run": other.statement.noun,
        "steps": other.steps_run,
        "head": other.head,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(console: Console, ledger: PrivacyLedger, checked: Checked, args: argparse.Namespace) -> None:
    """Print the verdict, what it is about, and the terms of the guarantee."""
    weights, mismatches = checked.files.weights, checked.mismatches
    # The verdict comes first, since many readers stop after it.
    if mismatches:
        console.print("NOT VERIFIED: " + ("1 check" if len(mismatches) == 1 else f"{len(mismatches)} checks") + " failed.")
    else:
        total, parts = total_of(ledger, epsilon=ledger.epsilon()), parts_in_words(ledger, epsilon=ledger.epsilon())
        guarantee = f"({total.epsilon:.4g}, {total.delta:.3g})-differential privacy for {unit_in_words(ledger)}"
        guarantee += f", {parts}; {ledger.steps_run:,} steps" if parts else f" after {ledger.steps_run:,} steps"
        console.print(f"{checked.verdict.upper()}: {guarantee}.", markup=False, soft_wrap=True)
        if weights:
            is_earlier = checked.files.step is not None and checked.files.step < last_step(ledger)
            of_step = f" They are those of step {checked.files.step:,}." if is_earlier else ""
            console.print(f"The ledger matches the weights in {', '.join(weights)}.{of_step}", markup=False, soft_wrap=True)
        else:
            console.print("No weight files were found next to the ledger. Copy them there to check them too.")
        if args.adapter is not None:
            said = f"The model in {args.path} is {args.base} with this adapter merged into it, except for rounding."
            console.print(said, markup=False, soft_wrap=True)
    for line in (*(f"- {mismatch}" for mismatch in mismatches), *checked.notes):
        console.print(line, markup=False, soft_wrap=True)
    meaning = [] if mismatches else [("what ε means", meaning_in_words(ledger)), *attacks_in_words(ledger)]
    rows = terms_rows(ledger, meaning)
    if console.width < _NARROW:
        for name, value in rows:
            console.print(f"{name}:", style="bold", markup=False)
            console.print(Padding(Text(value), (0, 0, 0, 2)))
    else:
        console.print(terms_table(rows))
    console.print(
        "Not covered by ε:",
        *(f"  - {line}" for line in not_covered_in_words(ledger)),
        sep="\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"Last hash of the ledger: {ledger.head}", soft_wrap=True)
    if args.head is None:
        console.print(
            "This check cannot notice that somebody has shortened the ledger or rewritten all of it. To notice that too, "
            "publish the last hash, and pass it later as --head HASH.",
            soft_wrap=True,
        )


def last_step(ledger: PrivacyLedger) -> int:
    """Return the optimizer step that the last run has reached; after a crash, the one that it may have reached."""
    run = ledger.runs[-1]
    return (run.from_step or 0) + ledger.steps_run - run.steps_before


def epsilon_mismatches(ledger: PrivacyLedger) -> list[str]:
    """Return a line for each entry whose ε does not follow from what was released."""
    found = []
    for claim in ledger.claims:
        recomputed = recompute(claim.account.epsilon, delta=ledger.statement.target_delta) if claim.private else math.inf
        # A looser bound of another version holds too. Before 0.3, an incomplete round counted for every group as it does for
        # the first.
        is_looser = not has_installed_versions(claim.versions) and recomputed < claim.epsilon < math.inf
        if not is_looser and not math.isclose(claim.epsilon, recomputed, rel_tol=tolerance(claim.versions)):
            found.append(
                f"Entry {claim.entry} ({ledger.entries[claim.entry]['event']}) states ε = {claim.epsilon:.8g}, but "
                f"its steps cost {recomputed:.8g}."
            )
    return found


def recompute(epsilon: Callable[..., float], *, delta: float) -> float:
    """Return ε at δ, or NaN if the numbers of the ledger are out of range."""
    try:
        return epsilon(delta=delta)
    except ValueError:  # No run writes a ledger with such numbers.
        return math.nan


def tolerance(versions: Mapping[str, str]) -> float:
    """Return the allowed relative difference between an ε that was computed with these `versions` and one computed now."""
    return _SAME_VERSIONS_TOLERANCE if has_installed_versions(versions) else _OTHER_VERSIONS_TOLERANCE


def has_installed_versions(versions: Mapping[str, str]) -> bool:
    """Return whether these `versions` are the installed ones, so that ε is computed in the same way."""
    own = package_versions()
    return all(versions[name] == own[name] for name in _ACCOUNTING_PACKAGES)


def budget_mismatches(ledger: PrivacyLedger) -> list[str]:
    """Return a line if the run was not private or cost more than its target."""
    reason = why_not_private(ledger)
    if reason is not None:
        return [f"NOT PRIVATE: {reason}."]
    statement = ledger.statement
    # A trial's own steps cost less than its search, so there the whole search is compared.
    of_steps = functools.partial(get_total_epsilon, ledger.history)
    cost = (
        of_steps if statement.search is None else functools.partial(epsilon_with, statement.search.selection, ledger.history)
    )
    spent = recompute(cost, delta=statement.target_delta)
    slack = 1.0 + tolerance(ledger.runs[-1].versions)
    if statement.target_epsilon is not None and not spent <= slack * statement.target_epsilon:
        return [f"The target was ε = {statement.target_epsilon:g}, but what was released costs ε = {spent:.8g}."]
    return []


def other_ledgers(ledger: PrivacyLedger, folder: Path) -> dict[Path, PrivacyLedger | None]:
    """Return every ledger in `folder` of a different training run; None if it cannot be read."""
    readable = ledgers_in(folder)
    there = {path: readable.get(path) for path in ledger_files(folder)}
    return {
        path: other
        for path, other in there.items()
        if other is None or not (other.is_prefix_of(ledger) or ledger.is_prefix_of(other))
    }


def others_in_words(others: Mapping[Path, PrivacyLedger | None]) -> list[str]:
    """Return a line for every ledger of another training run, and what these mean for the total ε."""
    lines = []
    for path, other in others.items():
        if other is None:
            lines.append(
                f"{path.name} cannot be read, so the ε of its training run is unknown. To see why, run doppler-hf verify "
                f"{path}."
            )
        else:
            lines.append(
                f"{path.name} is the ledger of another training run: ε = {other.epsilon():.4g} at "
                f"δ = {other.statement.target_delta:.3g}, {HOW_COMPUTED}."
            )
    return [*lines, "If the runs used the same data, their ε add up, and so do their δ."] if lines else []


def head_mismatches(ledger: PrivacyLedger, head: str) -> list[str]:
    """Return a line if the ledger's head differs from the one that was published."""
    if ledger.head == head.lower():
        return []
    later = any(entry["hash"] == head.lower() for entry in ledger.entries)
    what = (
        "entries were added to the ledger after that head"
        if later
        else "this is a different ledger, or entries at its end were cut off"
    )
    return [f"The head (last hash) of the ledger is {ledger.head}, not {head.lower()}: {what}."]


def terms_rows(ledger: PrivacyLedger, meaning: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the terms of the guarantee, the steps, and the meaning of ε, each with its name."""
    statement, last, first = ledger.statement, ledger.runs[-1], ledger.entries[0]
    # The times of a search would tell something about the number of its trials, so its ledger has none.
    opened = "" if statement.search is not None else f"{first['time']}, "
    at_least = f"at least {last.steps_released:,} steps were run"
    end = "the run ended" if last.is_closed else f"the run had not ended, or was interrupted; {at_least}"
    return [
        ("ledger", ledger.name),
        *terms_in_words(ledger),
        ("steps planned", f"{statement.steps_planned:,}"),
        ("steps reserved", f"{last.steps_reserved:,}"),
        ("steps counted", f"{ledger.steps_run:,} ({end})"),
        *total_rows(ledger),
        (
            "ε of the whole plan" if ledger.earlier is None else "ε of this run's whole plan",
            f"{ledger.planned_epsilon:.6g}, {HOW_COMPUTED}",
        ),
        *meaning,
        ("opened", f"{opened}by doppler_hf {first['versions']['doppler_hf']}"),
    ]


def terms_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Lay out the terms of the guarantee for a screen that is wide enough for two columns."""
    table = Table(title="Privacy ledger", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table
