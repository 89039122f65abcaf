"""The content of a privacy ledger, read entry by entry: runs, steps counted, and every ε that was stated.

A run that ended cleanly counts the steps that it released. Any other run counts all steps that it reserved, since it is
unknown how many of them were computed.

Runs with the same terms make one plan, as long as they release a part of what was fixed before the first result. A plan is a
sequence of steps, in rounds, with a length. Each step may use what was released before. Whether a step starts from the last
weights, or from those of an earlier checkpoint, or is not made at all, is post-processing of the same sequence, and the ε of
the whole sequence covers it. So results may end a run, and a later run may continue the plan where it was left.

But results may not make the sequence longer, nor decide where a round is cut. Results may have led to a clean end. So a run
after a clean end begins a new plan if it repeats steps without a target, or if it starts in the middle of a round that it
cannot continue. With a target, repeated steps are missing at the end of the plan. A run that was killed, failed or was
interrupted has not ended cleanly, and chance is taken to have ended it: the steps since its latest checkpoint are lost, are
repeated, and lengthen the plan by as many. A run from an earlier checkpoint counts as one to which results may have led.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from doppler_hf.errors import Refusal
from doppler_hf.privacy.accounting.accounting import Account, Plan, Releases, Spent, Trainings, merged_runs, name_of_plan
from doppler_hf.privacy.accounting.selection import epsilon_with
from doppler_hf.privacy.ledger.file import Entry, next_entry
from doppler_hf.privacy.ledger.statement import PrivacyStatement, SearchTerms

MARK_LENGTH: Final = 16  # hexadecimal digits by which a trained weight is recognised


def split_marks(joined: str) -> frozenset[str]:
    """Return the marks of trained weights, which a ledger file holds as one string."""
    return frozenset(joined[first : first + MARK_LENGTH] for first in range(0, len(joined), MARK_LENGTH))


class ModelDigests(NamedTuple):
    """The digests by which a ledger knows a model: of its parameters, and of the buffers that are saved with them."""

    parameters: str
    buffers: str


class SearchAccount(NamedTuple):
    """The account of a search, of which this ledger has the published trial."""

    planned: Sequence[Plan]
    counted: Sequence[Plan]
    target: float | None
    search: SearchTerms

    def epsilon(self, *, delta: float) -> float:
        """Return the ε of the search, which holds wherever the trial ends."""
        (plan,) = self.planned or ((),)
        return epsilon_with(self.search.selection, plan, delta=delta)


class Claim(NamedTuple):
    """An ε that entry number `entry` states (infinity if not private)."""

    entry: int
    epsilon: float
    account: Account | SearchAccount  # the plans to which this ε belongs
    private: bool
    versions: Mapping[str, str]


@dataclass
class Run:
    """One launch of a training run; counts of steps are over the life of the ledger."""

    name: str
    statement: PrivacyStatement
    versions: Mapping[str, str]
    from_step: int | None  # the optimizer step from which it was resumed; None for the first
    steps_before: int
    steps_reserved: int
    steps_released: int
    steps_allowed: int  # the steps that its plan has left
    saved_at: int = 0  # the step of its latest checkpoint that is known to be complete
    being_saved_at: int = 0  # the step of the last checkpoint that it noted, whose writing may have been cut off
    made_anew_from: int = 0  # the step at which its plan began or, after a clean end, was taken up again
    continues_rounds: bool = False  # whether units keep their turns from the run before
    is_closed: bool = False  # whether it ended cleanly
    is_by_the_rule_before: bool = False  # whether version 0.3.0 wrote it, which treated all clean ends alike

    @property
    def steps_counted(self) -> int:
        """Steps counted at its end: the released steps if their number is known, else the reserved steps."""
        return self.steps_released if self.is_closed else self.steps_reserved

    @property
    def steps_made(self) -> int:
        """Steps counted for this run only."""
        return self.steps_counted - self.steps_before

    @property
    def ended_at(self) -> int:
        """The optimizer step at which it ended."""
        return (self.from_step or 0) + self.steps_made


def search_continued() -> Refusal:
    """Return the refusal of a run that would continue the ledger of a search."""
    return Refusal(
        "search-continued",
        "The ledger of a search cannot be continued, because the ε of a search holds for its trials as they were planned. "
        "To train the published model further, load it into a new trainer with a new output_dir. The ε of the search is "
        "then counted as that of an earlier run.",
    )


def refuse_other_terms(earlier: PrivacyStatement, statement: PrivacyStatement) -> None:
    """Refuse a run that would continue the ledger of an earlier run for other data, another unit of privacy or another δ."""
    for name, there, here in (
        (f"The number of {statement.noun}s", earlier.num_units, statement.num_units),
        ("What ε covers", *(_in_records(each.unit_of_privacy) for each in (earlier, statement))),
        ("target_delta", earlier.target_delta, statement.target_delta),
    ):
        if there != here:
            raise Refusal(
                "other-terms-than-resumed",
                f"{name} changed from {there} in the earlier run to {here} in this run, so one ledger cannot hold "
                "both. Resume with the same data, privacy_unit_column and target_delta, or make a new "
                "trainer with another output_dir; the ε of both then add up.",
            )


class LedgerRecord:
    """The content of a checked chain of entries: see `PrivacyLedger`."""

    def __init__(self, entries: Iterable[Entry] = (), *, time: str | None = None) -> None:
        self._time = time  # of all new entries; None for the present time
        self.entries: list[Entry] = []
        self.runs: list[Run] = []
        self.plans: list[list[Run]] = []  # plans, each with its runs in their order
        self._plans_before: list[list[Run]] = []  # the plans by the rule of version 0.3.0, by which its entries state ε
        self.claims: list[Claim] = []
        self.saved: list[Mapping[str, str]] = []
        self.models: list[ModelDigests] = []
        self.trained_marks: frozenset[str] = frozenset()
        self.earlier: Trainings = {}  # what other runs had spent on the weights
        for entry in entries:
            self.take(entry)

    def add(self, event: str, payload: Mapping[str, Any]) -> None:
        """Append an entry of `event`."""
        self.take(next_entry(self.entries, event, payload, time=self._time))

    def take(self, entry: Entry) -> None:
        """Append an entry if it can follow the entries before it; only this method changes the record."""
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
                self.runs[-1].saved_at = self.runs[-1].being_saved_at
            else:
                self._release(entry)
        self.entries.append(entry)

    def account(self, steps_run: int) -> Account | SearchAccount:
        """Return what all plans release: as planned, and with the last plan up to `steps_run` steps of all runs."""
        account = _account(self.plans, steps_run, to_its_end=_all_allowed_steps)
        search = self.runs[-1].statement.search
        return account if search is None else SearchAccount(*account, search)

    @property
    def names_of_plans(self) -> list[str]:
        """The names of all plans, in order."""
        return [name_of_plan(self.runs[0].name, [run.name for run in plan]) for plan in self.plans]

    def plans_made(self, steps_run: int) -> dict[str, Plan]:
        """Return name → plan for the plans of `account`, with the last plan as it was counted."""
        last = steps_run - self.plans[-1][-1].steps_before
        made = {
            name_of_plan(self.runs[0].name, [run.name for run in plan]): _rounds(
                plan, last if plan is self.plans[-1] else _all_allowed_steps(plan[-1], plan[-1].steps_made)
            )
            for plan in self.plans
            if plan is self.plans[-1] or plan[-1].steps_counted > plan[0].steps_before
        }
        return {name: plan for name, plan in made.items() if plan}

    def history(self, steps_run: int) -> list[Releases]:
        """Return what the first `steps_run` steps of all runs have released."""
        return _rounds(self.runs, steps_run - self.runs[-1].steps_before)

    def steps_allowed(self, statement: PrivacyStatement, *, from_step: int, keeps_rounds: bool) -> int | None:
        """Return how many steps a run may make as a part of the last plan; None if it begins a new plan."""
        last = next((run for run in reversed(self.plans[-1]) if run.steps_made), None)
        if last is None or not statement.continues(last.statement, from_step=from_step):
            return None
        left = last.steps_allowed - last.steps_made
        if not self._has_ended_cleanly(last):
            # Privacy: chance has ended the run here, and results have not. Chance can lose the steps since the latest
            # checkpoint, but no steps before the step at which the run was resumed by choice, since resuming from an earlier
            # checkpoint is a choice.
            kept = max(last.made_anew_from, self._saved_at())
            is_lost = from_step >= kept or statement.target_epsilon is not None
            return left + max(0, last.ended_at - max(from_step, kept)) if is_lost else None
        # Privacy: results may have decided that the run ended here. So a continued run may make only the steps that the plan
        # has left.
        goes_on = keeps_rounds or self._is_between_rounds(last)
        return left if goes_on and (from_step >= last.ended_at or statement.target_epsilon is not None) else None

    def steps_of_rounds(self, steps_run: int) -> int:
        """Return the steps since the rounds of the last run began, perhaps in an earlier run."""
        first = next(run for run in reversed(self.runs) if not run.continues_rounds)
        return steps_run - first.steps_before

    def _is_between_rounds(self, last: Run) -> bool:
        """Return whether the counted steps are complete rounds, so that new rounds would have followed anyway."""
        turns, groups = last.statement.releases(1).turns, last.statement.groups
        return (
            groups == 1 and self.steps_of_rounds(self.runs[-1].steps_counted) % turns == 0
        )  # Groups stay the same in all rounds.

    def _begin(self, entry: Entry) -> None:
        statement, versions = PrivacyStatement.from_entry(entry["statement"]), entry["versions"]
        self.earlier = merged_runs([self.earlier, _earlier(entry)])
        if not math.isclose(statement.sample_rate, statement.expected_batch_size / statement.num_units, rel_tol=1e-12):
            _refuse(entry, f"its sample_rate {statement.sample_rate} is not expected_batch_size / num_units")
        search = statement.search
        # Privacy: the first guarantee of a trial gets its part of δ, since a search has E K times the δ of a trial.
        if search is not None and not math.isclose(search.selection.delta, statement.target_delta, rel_tol=1e-9):
            _refuse(
                entry,
                f"its search has δ = {search.selection.delta:.6g}, and its target_delta is {statement.target_delta:.6g}",
            )
        if not self.runs:
            if entry["event"] != "opened":
                _refuse(entry, "a ledger begins with 'opened'")
            self.runs.append(Run(entry["run_id"], statement, versions, None, 0, 0, 0, statement.steps_planned))
            self.plans.append([self.runs[-1]])
            self._plans_before.append([self.runs[-1]])
            self._claim(entry, steps_run=0)
            return
        if entry["event"] == "opened":
            _refuse(entry, "the ledger is open")
        earlier, counted = self.runs[-1].statement, self.runs[-1].steps_counted
        if earlier.search is not None or statement.search is not None:
            # Privacy: a trial that continues would release more than its two guarantees allow.
            raise search_continued()
        refuse_other_terms(earlier, statement)
        if entry["steps_run"] != counted:
            _refuse(entry, f"{counted} steps were counted")
        if entry["from_step"] > counted:
            raise Refusal(
                "ledger-of-another-checkpoint",
                f"The checkpoint is at step {entry['from_step']}, but its ledger counts only {counted} steps, so the "
                "ledger is from another checkpoint. Put back the ledger that was saved in this checkpoint's folder, or "
                "resume from another checkpoint.",
            )
        from_step, keeps_rounds = entry["from_step"], entry.get("continues_rounds", False)
        went_on = statement.continues_by_the_rule_before(earlier, from_step=from_step)
        allowed = self.steps_allowed(statement, from_step=from_step, keeps_rounds=keeps_rounds)
        stated = entry.get("continues_plan")
        if stated not in (None, allowed is not None):
            _refuse(entry, f"by what came before it {'begins a new plan' if stated else 'continues the plan'}")
        if keeps_rounds and not (went_on if stated is None else stated):
            _refuse(entry, "rounds continue under the same terms only")
        is_taken_up = allowed is None or self._has_ended_cleanly(self._last_made())
        run = Run(
            name=entry["run_id"],
            statement=statement,
            versions=versions,
            from_step=from_step,
            steps_before=counted,
            steps_reserved=counted,
            steps_released=counted,
            steps_allowed=max(0, statement.steps_planned - from_step) if allowed is None else allowed,
            made_anew_from=from_step if is_taken_up else self._last_made().made_anew_from,
            continues_rounds=keeps_rounds,
            is_by_the_rule_before=stated is None,
        )
        self.runs.append(run)
        for plans, is_same in ((self.plans, allowed is not None), (self._plans_before, went_on)):
            if not is_same:
                plans.append([])
            plans[-1].append(run)
        self._claim(entry, steps_run=counted)

    def _saved_at(self) -> int:
        """Return the step of the latest checkpoint of the last plan; 0 if none is known."""
        return max((run.saved_at for run in self.plans[-1]), default=0)

    def _has_ended_cleanly(self, last: Run) -> bool:
        """Return whether the last run that made a step, or a later run without steps, ended cleanly.

        A run that failed after its last step is over for who looks at the results of a later one that found nothing to do.
        """
        since = next(place for place, run in enumerate(self.runs) if run is last)
        return any(run.is_closed for run in self.runs[since:])

    def _last_made(self) -> Run:
        """Return the last run that made a step, or the first run if there is none."""
        return next((run for run in reversed(self.runs) if run.steps_made), self.runs[0])

    def _release(self, entry: Entry) -> None:
        run, steps_run, is_end = self.runs[-1], entry["steps_run"], entry["event"] == "closed"
        if not run.steps_released <= steps_run <= run.steps_reserved:
            _refuse(entry, f"{run.steps_released} steps had been released and {run.steps_reserved} were reserved")
        run.steps_released, run.is_closed = steps_run, is_end
        # The files of a checkpoint are written after its entry. They are complete if the run continued.
        step = run.being_saved_at if is_end else entry["step"]
        if is_end or step != run.being_saved_at:
            run.saved_at, run.being_saved_at = run.being_saved_at, step
        self._claim(entry, steps_run=steps_run)

    def _claim(self, entry: Entry, *, steps_run: int) -> None:
        """Note the ε that an entry states; before format 12, the first entry of a run stated none."""
        run = self.runs[-1]
        account: Account | SearchAccount
        if "planned_epsilon" in entry:
            stated, account = entry["planned_epsilon"], self.account(steps_run)
            if run.is_by_the_rule_before:
                account = _account(self._plans_before, steps_run, to_its_end=_all_planned_steps)
        elif "epsilon" in entry:  # Format 9 stated the ε of the steps so far.
            history = self.history(steps_run)
            stated, account = entry["epsilon"], Account([history], [history], target=None)
            stated = stated[run.statement.accountant] if entry["event"] == "closed" else stated
        else:
            return
        epsilon, is_private = math.inf if stated is None else stated, all(each.statement.private for each in self.runs)
        self.claims.append(Claim(entry["index"], epsilon, account, is_private, run.versions))


def _earlier(entry: Entry) -> Trainings:
    """Return ledger → what its runs had spent on the weights with which a run began."""
    earlier = entry.get("earlier") or []
    if isinstance(earlier, dict):  # Before format 11, entries had only the sum.
        earlier = [{"ledger": f"before {entry['run_id']}", **earlier}]
    return {
        each["ledger"]: Spent(
            math.inf if each["epsilon"] is None else each["epsilon"], each["delta"], each.get("unit_of_privacy", "")
        )
        for each in earlier
    }


def _account(plans: Sequence[Sequence[Run]], steps_run: int, *, to_its_end: Callable[[Run, int], int]) -> Account:
    """Return `LedgerRecord.account` of these plans; `to_its_end` has the steps of a plan's last run if it makes all."""
    *earlier, plan = plans
    begun = [each for each in earlier if each[-1].steps_counted > each[0].steps_before]
    done = [_rounds(each, to_its_end(each[-1], each[-1].steps_made)) for each in begun]
    last = steps_run - plan[-1].steps_before
    planned, counted = (
        [each for each in (*done, _rounds(plan, steps)) if each] for steps in (to_its_end(plan[-1], last), last)
    )
    return Account(planned, counted, target=plan[-1].statement.target_epsilon)


def _all_allowed_steps(run: Run, steps_made: int) -> int:
    return max(steps_made, run.steps_allowed)


def _all_planned_steps(run: Run, steps_made: int) -> int:
    return max(steps_made, run.statement.steps_planned - (run.from_step or 0))


def _rounds(runs: Sequence[Run], last_steps: int) -> list[Releases]:
    """Return what runs release if the last run makes this many steps."""
    found: list[tuple[PrivacyStatement, int]] = []
    for run, steps in zip(runs, [*(run.steps_made for run in runs[:-1]), last_steps], strict=True):
        before = found.pop()[1] if run.continues_rounds and found else 0
        found.append((run.statement, before + steps))
    return [statement.releases(steps) for statement, steps in found if steps]


def _in_records(unit_of_privacy: str) -> str:
    """Return what ε covers in the words of messages; the ledger's own field says "example"."""
    return unit_of_privacy.replace("one example", "one record").replace("all examples", "all records")


def _refuse(entry: Entry, reason: str) -> None:
    said = json.dumps({name: entry[name] for name in ("from_step", "steps_reserved", "steps_run") if name in entry})
    raise Refusal(
        "impossible-entry",
        f"Entry {entry['index']} of the ledger ({entry['event']!r}, {said}) cannot follow the entries before it: "
        f"{reason}. Restore an unchanged copy.",
    )
