"""The privacy ledger: what was done to the data, in a file that others can check.

It is the file `privacy_ledger.json` next to the model and in every checkpoint, an append-only chain of entries:

    opened | resumed    the whole statement of a run, before its first step, and ε as planned
    steps               at most this many steps may have been released; written before they are computed
    checkpoint          steps released, and ε as planned
    closed              steps released, exactly, and ε as planned; reserved steps that were not run do not count
    left                the digests of the model's parameters and buffers when the run ended, cleanly or not
    saved               the digests of a model that was saved, and the hashes of its weight files; see `weights`

After a crash it never counts too few steps, and at most one portion too many, a hundredth of the plan.

Privacy: ε is that of the whole plan, wherever a run ends, since results may have decided where (`accounting.accounting`).
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from doppler_hf.errors import Refusal
from doppler_hf.privacy.accounting.accounting import (
    Plan,
    Releases,
    Spent,
    Trainings,
    by_ledger,
    get_epsilon_of_plans,
    get_total_epsilon,
    is_continued_by,
    total_of_runs,
)
from doppler_hf.privacy.accounting.attack import TradeOff, trade_off_at, trade_off_of_plans
from doppler_hf.privacy.accounting.calibration import most_steps
from doppler_hf.privacy.ledger.file import (
    Entry,
    is_earlier_state,
    next_entry,
    package_versions,
    read_entries,
    synchronize_names,
    write_entries,
)
from doppler_hf.privacy.ledger.record import Claim, LedgerRecord, ModelDigests, Run, split_marks
from doppler_hf.privacy.ledger.statement import NEIGHBOURING_RELATION, ROLE_OF_NUM_UNITS, PrivacyStatement
from doppler_hf.privacy.ledger.weights import copies_below, hashes, unknown_files

LEDGER_NAME: Final = "privacy_ledger.json"
SEARCH_NOTE_NAME: Final = "privacy_search_running.json"  # of searches that have not ended (`run/search`)
_PORTIONS: Final = 100  # A run reserves its steps in about so many portions.


class PrivacyLedger:
    """The account of all releases of a training run, with the terms of each; made by `open`, `load` or `resume`."""

    def __init__(self, record: LedgerRecord) -> None:
        self._record = record
        self.entries: Sequence[Entry] = record.entries
        self.runs: Sequence[Run] = record.runs
        self.claims: Sequence[Claim] = record.claims  # every ε that the entries state
        self.saved: Sequence[Mapping[str, str]] = record.saved  # name → hash, for each set of saved weights
        self.models: Sequence[ModelDigests] = record.models  # digests of the models that the run left or saved
        self._is_training = False

    # --- written by a run ---------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        statement: PrivacyStatement,
        *,
        earlier: Trainings | None = None,
        run_id: str | None = None,
        time: str | None = None,
    ) -> Self:
        """Return a new ledger without any spending, for weights on which `earlier` training runs may have spent ε.

        Its run gets a random name, unless `run_id` is given. Processes that train together pass the same name. All entries
        get the given `time`, or else the present time.
        """
        ledger = cls(LedgerRecord(time=time))
        ledger._begin("opened", statement, {"earlier": _entries_of(earlier or {})}, run_id)
        return ledger

    def resume(
        self,
        statement: PrivacyStatement,
        *,
        from_step: int,
        continues_rounds: bool = False,
        earlier: Trainings | None = None,
        run_id: str | None = None,
    ) -> Self:
        """Return a ledger that continues this one at an optimizer step, for the same data, unit of privacy and δ.

        Another training may have gone on with the weights in between: `earlier` are those under other ledgers.
        """
        ledger = self.as_written()
        allowed = ledger.steps_allowed_to(statement, from_step=from_step, keeps_rounds=continues_rounds)
        counted = {
            "from_step": from_step,
            "steps_run": ledger.steps_run,
            "continues_rounds": continues_rounds,
            "continues_plan": allowed is not None,
            "earlier": _entries_of(earlier or {}),
        }
        ledger._begin("resumed", statement, counted, run_id)
        return ledger

    def steps_allowed_to(self, statement: PrivacyStatement, *, from_step: int, keeps_rounds: bool) -> int | None:
        """Return how many steps a run may make as a part of the last plan; None if it begins a new plan (see `record`)."""
        return self._record.steps_allowed(statement, from_step=from_step, keeps_rounds=keeps_rounds)

    def as_written(self) -> Self:
        """Return the ledger as it is read from its entries, where an interrupted run counts all reserved steps."""
        return type(self)(LedgerRecord(self.entries))

    def as_finished(self) -> Self:
        """Return the ledger as if its run had made all allowed steps: a lone checkpoint does not tell how it went on."""
        ledger = self.as_written()
        run = ledger.runs[-1]
        if run.is_closed:
            return ledger
        further = ledger.affordable_steps(run.steps_allowed - run.steps_made)
        if further > 0:
            ledger._record.add("steps", {"steps_reserved": run.steps_reserved + further})
        planned = _json_number(ledger.planned_epsilon)
        ledger._record.add("closed", {"steps_run": run.steps_reserved, "planned_epsilon": planned})
        return ledger

    def reserve(self, *, at_most: int) -> bool:
        """Reserve the next portion of steps before they are computed; return whether the ledger must now be saved."""
        run = self.runs[-1]
        assert self._is_training
        if run.steps_released < run.steps_reserved:
            return False
        # Steps are reserved in portions, since writing and synchronizing a file may take longer than a small step.
        portion = min(max(1, run.statement.steps_planned // _PORTIONS), at_most)
        self._record.add("steps", {"steps_reserved": run.steps_reserved + portion})
        return True

    def record_step(self) -> None:
        """Count one release; it was reserved, so the file need not change."""
        run = self.runs[-1]
        assert self._is_training
        assert run.steps_released < run.steps_reserved, "a step was released before it was reserved"
        run.steps_released += 1

    def checkpoint(self, step: int) -> None:
        """Note that the weights after optimizer step `step` are saved."""
        assert self._is_training
        planned = _json_number(self.planned_epsilon)
        self._record.add("checkpoint", {"step": step, "steps_run": self.steps_run, "planned_epsilon": planned})

    def close(self) -> None:
        """Note the clean end of the run, after which reserved steps that were not run no longer count."""
        assert self._is_training
        self._record.add("closed", {"steps_run": self.steps_run, "planned_epsilon": _json_number(self.planned_epsilon)})
        self._is_training = False

    def leave(self, model: ModelDigests, *, trained: Iterable[str] = ()) -> bool:
        """Note the digests of the model as the run leaves it, and return whether they were new.

        The marks of the `trained` weights let a later run recognise them in another model.
        """
        is_new = model not in self.models
        if is_new:
            self._record.add("left", {**model._asdict(), "trained": "".join(sorted(trained))})
        return is_new

    def speak_for(self, weights: Mapping[str, str], *, model: ModelDigests, trained: Iterable[str] = ()) -> None:
        """Note that the run has saved weight files (name → SHA-256), with these marks of trained weights."""
        # The same weights are not noted twice, so that the head, which may be published, stays the same.
        if not self.has_saved(weights):
            self._record.add("saved", {**model._asdict(), "trained": "".join(sorted(trained)), "weights": dict(weights)})

    # --- read ---------------------------------------------------------------------------------------------------------

    @property
    def head(self) -> str:
        """The hash of the last entry, which shows later whether this is still the same ledger."""
        return str(self.entries[-1]["hash"])

    @property
    def run_id(self) -> str:
        """The name of the last run."""
        return str(next(entry["run_id"] for entry in reversed(self.entries) if "run_id" in entry))

    @property
    def steps_of_rounds(self) -> int:
        """Steps counted since the rounds of the last run began, perhaps in an earlier run."""
        return self._record.steps_of_rounds(self.steps_run)

    @property
    def statement(self) -> PrivacyStatement:
        """Statement of the last run."""
        return self.runs[-1].statement

    @property
    def private(self) -> bool:
        """Whether ε of every run is finite; see `why_not_private`."""
        return all(run.statement.private for run in self.runs)

    @property
    def why_not_private(self) -> str | None:
        """The reason why a run was not private, whatever its ε; None if all were."""
        return next(filter(None, (run.statement.why_not_private for run in self.runs)), None)

    @property
    def not_covered(self) -> list[str]:
        """What the guarantee of some run does not cover, as the entries say it."""
        return list(dict.fromkeys(line for entry in self.entries for line in entry.get("not_covered", ())))

    @property
    def restarts(self) -> list[int]:
        """Optimizer steps at which the run was resumed."""
        return [run.from_step for run in self.runs if run.from_step is not None]

    @property
    def steps_run(self) -> int:
        """Steps released, including steps that a crash undid; a run that did not end cleanly counts all reserved steps."""
        run = self.runs[-1]
        return run.steps_released if self._is_training else run.steps_counted

    @property
    def is_repeated(self) -> bool:
        """Whether the last run is a plan of its own although it has the terms of the run before (see `record`)."""
        if len(self.runs) < 2:
            return False
        before, run = self.runs[-2:]
        has_its_terms = run.statement.continues(before.statement, from_step=run.from_step or 0)
        return has_its_terms and before.is_closed and len(self._record.plans[-1]) == 1

    @property
    def history(self) -> list[Releases]:
        """The releases so far."""
        return self._record.history(self.steps_run)

    @property
    def name(self) -> str:
        """The name of this ledger, which is the name of its first run; other ledgers refer to it."""
        return str(self.entries[0]["run_id"])

    @property
    def names_of_plans(self) -> list[str]:
        """The names of its plans, by which other ledgers refer to their spending."""
        return self._record.names_of_plans

    @property
    def trained_marks(self) -> frozenset[str]:
        """The marks of the weights that were trained under this ledger, by which other runs recognise them."""
        return self._record.trained_marks

    @property
    def earlier_trainings(self) -> Trainings:
        """What private runs under other ledgers had spent on the weights with which the runs of this ledger began.

        This ledger may be among them, if it was also continued in another folder and the weights come from there.
        """
        return by_ledger(self._spent_by_earlier_plans)

    @property
    def earlier(self) -> Spent | None:
        """What all these earlier runs had spent together if they used the same data; None if none is known."""
        return total_of_runs(self._spent_by_earlier_plans) if self._spent_by_earlier_plans else None

    @property
    def trainings(self) -> Trainings:
        """Name of a plan → what it has spent on the weights, for this ledger and the earlier runs."""
        return {**self._spent_by_earlier_plans, **self.spent_by_own_plans}

    @property
    def _spent_by_earlier_plans(self) -> Trainings:
        own = self.names_of_plans
        return {
            name: spent
            for name, spent in self._record.earlier.items()
            if not any(is_continued_by(name, plan) for plan in own)
        }

    @property
    def spent_by_own_plans(self) -> Trainings:
        """What each plan of this ledger has spent. Together they cost `epsilon` at δ, and each has an equal share of δ."""
        epsilon, delta, unit = self.epsilon(), self.statement.target_delta, self.statement.unit_of_privacy
        plans = self._record.plans_made(self.steps_run)
        if len(plans) < 2:
            return {next(iter(plans), self.names_of_plans[-1]): Spent(epsilon, delta, unit)}
        share = delta / len(plans)
        if not self.private:
            return dict.fromkeys(plans, Spent(epsilon, share, unit))
        *before, last = plans
        spent = {name: Spent(get_total_epsilon(plans[name], delta=share), share, unit) for name in before}
        # The budget check may end the last plan within its target.
        return {**spent, last: Spent(epsilon - sum(each.epsilon for each in spent.values()), share, unit)}

    def when(self, marks: frozenset[str]) -> "PrivacyLedger | None":
        """Return the ledger as it was at the end of the last run in which one of these marks was new; None if none is.

        Weights that were saved in an earlier run carry what had been spent by then.
        """
        known: set[str] = set()
        end = 0
        for place, entry in enumerate(self.entries):
            of_entry = split_marks(entry.get("trained", ""))
            end = place + 1 if marks & of_entry - known else end
            known |= of_entry
        if not end:
            return None
        begun = (place for place, entry in enumerate(self.entries) if place >= end and "run_id" in entry)
        return type(self)(LedgerRecord(self.entries[: next(begun, len(self.entries))]))

    @property
    def spent(self) -> Spent:
        """What this run and the earlier runs have spent together if they used the same data."""
        return total_of_runs(self.trainings)

    @property
    def plans(self) -> Sequence[Plan]:
        """The planned releases, for which ε is computed."""
        return self._record.account(self.steps_run).planned

    @property
    def begun_plans(self) -> Sequence[Plan]:
        """The planned releases of the plans that have made a step, which a further plan adds to."""
        account = self._record.account(self.steps_run)
        return account.planned[: len(account.counted)]

    @property
    def allowed_plans(self) -> Sequence[Plan]:
        """The plans without the steps that `target_epsilon` does not allow, as after steps that were made twice.

        How many are allowed follows from public numbers, so these are the releases that ε holds for.
        """
        account, target = self._record.account(self.steps_run), self.statement.target_epsilon
        if target is None or self.statement.search is not None or not self.private or not account.planned:
            return account.planned
        has_begun = len(account.counted) == len(account.planned)
        steps = sum(releases.steps for releases in account.planned[-1])
        left = steps - (sum(releases.steps for releases in account.counted[-1]) if has_begun else 0)
        further = self.affordable_steps(left)
        return account.planned if further == left else self._record.account(self.steps_run + further).counted

    @property
    def planned_epsilon(self) -> float:
        """The ε of everything that was planned; infinity if not private."""
        if not self.private:
            return math.inf
        return self._record.account(self.steps_run).epsilon(delta=self.statement.target_delta)

    def epsilon(self) -> float:
        """Return the ε of the whole plan, which holds from the first step on, wherever a run ends."""
        return 0.0 if self.steps_run == 0 and self.private else self.planned_epsilon

    @property
    def stated_epsilon(self) -> float | None:
        """The ε of the plan as the entries last state it; None if they state none, as in format 9."""
        claim = self.claims[-1] if self.claims else None
        return claim.epsilon if claim is not None and "planned_epsilon" in self.entries[claim.entry] else None

    def as_last_stated(self) -> "PrivacyLedger":
        """Return the ledger as it was when an entry last stated ε."""
        return type(self)(LedgerRecord(self.entries[: self.claims[-1].entry + 1]))

    def epsilon_of_fixed_length(self) -> float:
        """Return the ε that would hold if the number of steps and all terms had been fixed before the first result."""
        if self.statement.search is not None:
            return self.planned_epsilon  # other trials may have made all their steps
        return get_total_epsilon(self.history, delta=self.statement.target_delta) if self.private else math.inf

    @property
    def epsilon_of_trial(self) -> float | None:
        """ε of the published trial of a search, as if it had been the only run, at δ of the search; None if no search."""
        if self.statement.search is None:
            return None
        plan = next(iter(self.plans), ())
        return get_total_epsilon(plan, delta=self.statement.target_delta) if self.private else math.inf

    def trade_off(self) -> TradeOff:
        """Return bounds on the success of a membership attack."""
        if self.statement.search is not None:  # only this pair is known
            return trade_off_at(self.epsilon(), delta=self.statement.target_delta)
        return trade_off_of_plans(self.allowed_plans, epsilon=self.epsilon(), delta=self.statement.target_delta)

    def affordable_steps(self, steps: int) -> int:
        """Return how many of `steps` more steps stay within `target_epsilon`: all of them if there is no target."""
        target, delta = self.statement.target_epsilon, self.statement.target_delta
        if target is None or not self.private:
            return steps

        def epsilon_after(further: int) -> float:
            return get_epsilon_of_plans(self._record.account(self.steps_run + further).counted, delta=delta)

        return most_steps(epsilon_after, target_epsilon=target, at_most=steps)

    # --- the file -----------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, *, time: str | None = None) -> Self:
        """Read a ledger file, or the ledger of a folder. Further entries have the present time, or this one.

        Raises:
            ValueError: If the file is not a ledger, or an entry was changed.
        """
        path = Path(path) / LEDGER_NAME if Path(path).is_dir() else Path(path)
        try:
            return cls(LedgerRecord(read_entries(path), time=time))
        except Refusal as error:
            raise Refusal(error.code, f"{path}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write the ledger into `folder`, as a whole or not at all.

        Raises:
            ValueError: If the folder has the ledger of another run, whose entries would be lost.
        """
        path = Path(folder) / LEDGER_NAME
        if path.exists() and not is_earlier_state(path, self.entries):
            raise Refusal(
                "ledger-of-another-run",
                f"{path} is the ledger of another run (its last hash begins with {self.load(path).head[:8]}), so two "
                "runs are writing to the same folder. Use another output_dir for one of them.",
            )
        write_entries(path, self.entries)

    def has_saved(self, weights: Mapping[str, str]) -> bool:
        """Return whether files with these names and hashes were saved together."""
        return not unknown_files(weights, saved=self.saved)

    def unknown_weights(self, folder: Path) -> list[str]:
        """Return the weight files of a folder that this ledger does not cover."""
        unknown = unknown_files(hashes(folder), saved=self.saved)
        copies = copies_below(folder, saved=self.saved) if any("/" in name for name in unknown) else []
        return [name for name in unknown if name not in copies]

    def is_prefix_of(self, other: "PrivacyLedger") -> bool:
        """Return whether `other` is this ledger or a continuation of it."""
        return other.entries[: len(self.entries)] == self.entries

    def _begin(self, event: str, statement: PrivacyStatement, payload: dict[str, Any], run_id: str | None) -> None:
        terms = {
            # A random name tells runs apart that begin in the same second with the same arguments.
            "run_id": secrets.token_hex(8) if run_id is None else run_id,
            "statement": {name: value for name, value in asdict(statement).items() if (name, value) != ("search", None)},
            "mechanism": statement.mechanism,
            "neighbouring_relation": NEIGHBOURING_RELATION,
            "role_of_num_units": ROLE_OF_NUM_UNITS,
            "not_covered": list(statement.not_covered),
            "versions": package_versions(),
        }
        # The plan, and so its ε, follows from the entry and those before it.
        begun = LedgerRecord([*self.entries, next_entry(self.entries, event, payload | terms)])
        planned = _json_number(type(self)(begun).planned_epsilon)
        self._record.add(event, payload | terms | {"planned_epsilon": planned})
        self._is_training = True


def latest(ledgers: Sequence[PrivacyLedger]) -> PrivacyLedger:
    """Return the ledger that continues all the others; refuse ledgers of different runs."""
    longest = max(ledgers, key=lambda ledger: len(ledger.entries))
    for ledger in ledgers:
        if not ledger.is_prefix_of(longest):
            raise Refusal(
                "ledgers-disagree",
                "The ledgers that this run should continue come from different runs (their last hashes begin with "
                f"{ledger.head[:8]} and {longest.head[:8]}), so the ε spent is unknown. One is in the checkpoint, the "
                "other in the folder that has the checkpoints, or from the trainer's last run. Resume from a checkpoint "
                f"of the run whose {LEDGER_NAME} is in that folder, or put back the {LEDGER_NAME} of the checkpoint's run "
                "there. If this trainer has trained before, make a new one.",
            )
    return longest


def ledger_files(folder: str | Path) -> list[Path]:
    """Return the files of the ledger of a folder, if there is one, and of ledgers that were set aside there."""
    path = Path(folder) / LEDGER_NAME
    return [*([path] if path.exists() else []), *sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))]


def ledgers_in(folder: str | Path) -> dict[Path, PrivacyLedger]:
    """Return the ledger of a folder and the ledgers set aside there, without files that cannot be read."""
    found = {}
    for candidate in ledger_files(folder):
        with contextlib.suppress(FileNotFoundError, ValueError):
            found[candidate] = PrivacyLedger.load(candidate)
    return found


def entries_in(path: Path) -> list[Any]:
    """Return the entries in a file, none if it is not a ledger; unlike `load`, this checks nothing."""
    try:
        return list(json.loads(path.read_text("utf-8"))["entries"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def marks_in(path: Path) -> frozenset[str]:
    """Return the marks of trained weights in a file, which may not be a ledger; unlike `load`, this checks nothing."""
    try:
        return frozenset().union(*(split_marks(entry.get("trained", "")) for entry in entries_in(path)))
    except (TypeError, AttributeError):
        return frozenset()


def set_aside(folder: str | Path, *, unless: Callable[[PrivacyLedger], bool]) -> Path | None:
    """Rename the ledger of `folder` after its head, except if `unless` allows it to stay; return the new path."""
    path = Path(folder) / LEDGER_NAME
    if not path.exists():
        return None
    try:
        there = PrivacyLedger.load(path)
    except ValueError:  # A damaged file, or one of another format, is kept too.
        name = hashlib.sha256(path.read_bytes()).hexdigest()
    else:
        if unless(there):
            return None
        name = there.head
    aside = path.with_name(f"{path.stem}.{name[:8]}{path.suffix}")
    os.replace(path, aside)
    synchronize_names(path.parent)  # A power failure must not undo this name once a new ledger has the old one.
    return aside


def _entries_of(trainings: Trainings) -> list[dict[str, Any]]:
    return [
        {"ledger": name, "epsilon": _json_number(spent.epsilon), "delta": spent.delta}
        | ({"unit_of_privacy": spent.unit} if spent.unit else {})
        for name, spent in trainings.items()
    ]


def _json_number(value: float) -> float | None:
    return None if math.isinf(value) else value  # JSON has no infinity
