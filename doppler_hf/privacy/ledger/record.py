"""The content of a privacy ledger, read entry by entry: runs, steps counted, and every ε that was stated.

A run that ended cleanly counts the steps that it released. Any other counts the steps that it had reserved, since it is
unknown how many of them were computed. Runs that go on under the same terms, within the same target, make one plan.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from doppler_hf.privacy.accounting.accounting import Account, Releases, Spent, Trainings, all_trainings
from doppler_hf.privacy.ledger.file import Entry, next_entry
from doppler_hf.privacy.ledger.statement import PrivacyStatement

MARK_LENGTH: Final = 16  # hexadecimal digits by which a trained weight is recognised


def split_marks(joined: str) -> frozenset[str]:
    """Return the marks of trained weights, which a file holds as one text."""
    return frozenset(joined[first : first + MARK_LENGTH] for first in range(0, len(joined), MARK_LENGTH))


class ModelDigests(NamedTuple):
    """The digests by which a ledger knows a model: of its parameters, and of what is saved besides them."""

    parameters: str
    buffers: str


class Claim(NamedTuple):
    """An ε that entry number `entry` states (infinity if not private)."""

    entry: int
    epsilon: float
    account: Account  # of which
    private: bool
    versions: Mapping[str, str]


@dataclass
class Run:
    """One launch of the training. Counts of steps are over the ledger's life."""

    statement: PrivacyStatement
    versions: Mapping[str, str]
    from_step: int | None  # the optimizer step from which it was resumed; None for the first
    steps_before: int
    steps_reserved: int
    steps_released: int
    continues_rounds: bool = False  # whether units keep the turns that they had drawn in the run before
    is_closed: bool = False  # whether it ended cleanly

    @property
    def steps_counted(self) -> int:
        """Steps counted at its end: those released if that is known, or else those reserved."""
        return self.steps_released if self.is_closed else self.steps_reserved


class LedgerRecord:
    """The content of a checked chain of entries: see `PrivacyLedger`."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = []
        self.runs: list[Run] = []
        self.plans: list[list[Run]] = []  # all runs: those that go on with a plan follow the one that began it
        self.claims: list[Claim] = []
        self.saved: list[Mapping[str, str]] = []
        self.models: list[ModelDigests] = []
        self.trained_marks: frozenset[str] = frozenset()
        self.earlier: Trainings = {}  # what other trainings had spent on the weights
        for entry in entries:
            self.take(entry)

    def add(self, event: str, payload: Mapping[str, Any]) -> None:
        """Append an entry of `event`, with the time of now."""
        self.take(next_entry(self.entries, event, payload))

    def take(self, entry: Entry) -> None:
        """Append an entry of the chain, if it can follow those before it. Only here does an entry change the record."""
        event = entry["event"]
        if event in ("opened", "resumed"):
            self._begin(entry)
        else:
            if not self.runs:
                _refuse(entry, "a ledger begins with 'opened'")
            if event in ("left", "saved"):  # A model may be saved after the run too.
                self.models.append(ModelDigests(entry["parameters"], entry["buffers"]))
                self.saved += [entry["weights"]] if event == "saved" else []
                self.trained_marks |= split_marks(entry.get("trained", ""))
            elif self.runs[-1].is_closed:
                _refuse(entry, "the run is closed")
            elif event == "steps":
                if entry["steps_reserved"] <= self.runs[-1].steps_reserved:
                    _refuse(entry, f"{self.runs[-1].steps_reserved} steps were reserved already")
                self.runs[-1].steps_reserved = entry["steps_reserved"]
            else:
                self._release(entry)
        self.entries.append(entry)

    def account(self, steps_run: int) -> Account:
        """Return what all plans release to their end, and with the last one after `steps_run` steps of all runs."""
        *earlier, plan = self.plans
        begun = [each for each in earlier if each[-1].steps_counted > each[0].steps_before]
        done = [_rounds(each, _to_its_end(each, each[-1].steps_counted)) for each in begun]
        planned, counted = (
            [each for each in (*done, _rounds(plan, steps)) if each]
            for steps in (_to_its_end(plan, steps_run), steps_run - plan[-1].steps_before)
        )
        return Account(planned, counted, target=plan[-1].statement.target_epsilon)

    def history(self, steps_run: int) -> list[Releases]:
        """Return what the first `steps_run` steps of all runs have released, by rounds."""
        plans = zip(self.plans, [*(plan[-1].steps_counted for plan in self.plans[:-1]), steps_run], strict=True)
        return [each for plan, count in plans for each in _rounds(plan, count - plan[-1].steps_before)]

    def steps_of_rounds(self, steps_run: int) -> int:
        """Return the steps since the rounds of the last run began, in an earlier run perhaps."""
        first = next(run for run in reversed(self.runs) if not run.continues_rounds)
        return steps_run - first.steps_before

    def _begin(self, entry: Entry) -> None:
        statement, versions = PrivacyStatement(**entry["statement"]), entry["versions"]
        self.earlier = all_trainings([self.earlier, _earlier(entry)])
        if not math.isclose(statement.sample_rate, statement.expected_batch_size / statement.num_units, rel_tol=1e-12):
            _refuse(entry, f"its sample_rate {statement.sample_rate} is not expected_batch_size / num_units")
        if not self.runs:
            if entry["event"] != "opened":
                _refuse(entry, "a ledger begins with 'opened'")
            self.runs.append(Run(statement, versions, None, 0, 0, 0))
            self.plans.append([self.runs[-1]])
            return
        if entry["event"] == "opened":
            _refuse(entry, "the ledger is open")
        earlier, counted = self.runs[-1].statement, self.runs[-1].steps_counted
        for name, there, here in (
            ("num_units", earlier.num_units, statement.num_units),
            ("unit_of_privacy", earlier.unit_of_privacy, statement.unit_of_privacy),
            ("target_delta", earlier.target_delta, statement.target_delta),
        ):
            if there != here:
                raise ValueError(
                    f"{name} must be {there!r}, as in the run that is resumed, got {here!r}. Resume with the same data, "
                    "privacy_unit_column and target_delta, or train into a new output_dir."
                )
        if entry["steps_run"] != counted:
            _refuse(entry, f"{counted} steps were counted")
        if entry["from_step"] > counted:
            raise ValueError(
                f"The checkpoint is at step {entry['from_step']}, but its ledger counts {counted} steps only: it is of "
                "another checkpoint. Put back the ledger that was saved with it."
            )
        goes_on = statement.continues(earlier, from_step=entry["from_step"])
        keeps_rounds = entry.get("continues_rounds", False)
        if keeps_rounds and not goes_on:
            _refuse(entry, "rounds go on under the same terms only")
        run = Run(statement, versions, entry["from_step"], counted, counted, counted, keeps_rounds)
        self.runs.append(run)
        if not goes_on:
            self.plans.append([])
        self.plans[-1].append(run)

    def _release(self, entry: Entry) -> None:
        run, steps_run, is_end = self.runs[-1], entry["steps_run"], entry["event"] == "closed"
        if not run.steps_released <= steps_run <= run.steps_reserved:
            _refuse(entry, f"{run.steps_released} steps had been released and {run.steps_reserved} were reserved")
        run.steps_released, run.is_closed = steps_run, is_end
        if "planned_epsilon" in entry:
            stated, account = entry["planned_epsilon"], self.account(steps_run)
        else:  # format 9 stated ε of the steps so far
            history = self.history(steps_run)
            stated, account = entry["epsilon"], Account([history], [history], target=None)
            stated = stated[run.statement.accountant] if is_end else stated
        epsilon, is_private = math.inf if stated is None else stated, all(each.statement.private for each in self.runs)
        self.claims.append(Claim(entry["index"], epsilon, account, is_private, run.versions))


def _earlier(entry: Entry) -> Trainings:
    """Return what other trainings had spent on the weights with which a run began, by their ledgers."""
    earlier = entry.get("earlier") or []
    if isinstance(earlier, dict):  # the sum of them, before format 11
        earlier = [{"ledger": f"before {entry['run_id']}", **earlier}]
    return {
        each["ledger"]: Spent(math.inf if each["epsilon"] is None else each["epsilon"], each["delta"]) for each in earlier
    }


def _to_its_end(plan: Sequence[Run], steps_counted: int) -> int:
    """Return the steps of a plan's last run if it makes all that it planned."""
    run = plan[-1]
    return max(steps_counted - run.steps_before, run.statement.steps_planned - (run.from_step or 0))


def _rounds(plan: Sequence[Run], last_steps: int) -> list[Releases]:
    """Return what a plan releases, by rounds, if its last run makes so many steps."""
    counts = [0]
    for run, steps in zip(plan, [*(run.steps_counted - run.steps_before for run in plan[:-1]), last_steps], strict=True):
        if not run.continues_rounds:
            counts.append(0)
        counts[-1] += steps
    return [plan[-1].statement.releases(steps) for steps in counts if steps]


def _refuse(entry: Entry, reason: str) -> None:
    said = json.dumps({name: entry[name] for name in ("from_step", "steps_reserved", "steps_run") if name in entry})
    raise ValueError(
        f"Entry {entry['index']} ({entry['event']!r}, {said}) cannot stand here: {reason}. Take the file from an unchanged "
        "copy."
    )
