"""The content of a privacy ledger, read entry by entry: runs, steps counted, and every ε that was stated.

A run that ended cleanly counts the steps that it released. Any other counts the steps that it had reserved, since it is
unknown how many of them were computed.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from doppler_hf.privacy.accounting.accounting import Releases
from doppler_hf.privacy.ledger import chain
from doppler_hf.privacy.ledger.statement import PrivacyStatement


class ModelDigests(NamedTuple):
    """The digests by which a ledger knows a model: of its parameters, and of what is saved besides them."""

    parameters: str
    buffers: str


class Claim(NamedTuple):
    """An ε that entry number `entry` states (infinity if not private), for everything released until then."""

    entry: int
    history: list[Releases]
    target: float | None
    epsilon: float
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
    is_closed: bool = False  # whether it ended cleanly

    @property
    def steps_counted(self) -> int:
        """Steps counted at its end: those released if that is known, or else those reserved."""
        return self.steps_released if self.is_closed else self.steps_reserved


class LedgerRecord:
    """The content of a checked chain of entries: see `PrivacyLedger`."""

    def __init__(self, entries: Iterable[chain.Entry] = ()) -> None:
        self.entries: list[chain.Entry] = []
        self.runs: list[Run] = []
        self.claims: list[Claim] = []
        self.saved: list[Mapping[str, str]] = []
        self.models: list[ModelDigests] = []
        for entry in entries:
            self.take(entry)

    def add(self, event: str, payload: Mapping[str, Any]) -> None:
        """Append an entry of `event`, with the time of now."""
        self.take(chain.next_entry(self.entries, event, payload))

    def take(self, entry: chain.Entry) -> None:
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
            elif self.runs[-1].is_closed:
                _refuse(entry, "the run is closed")
            elif event == "steps":
                self._reserve(entry)
            else:
                self._release(entry)
        self.entries.append(entry)

    def history(self, steps_run: int) -> list[Releases]:
        """Return what was released by the first `steps_run` steps of all runs, by run: each begins a round of its own."""
        counts = [min(run.steps_counted, steps_run) for run in self.runs[:-1]] + [steps_run]
        history: list[Releases] = []
        for run, counted in zip(self.runs, counts, strict=True):
            releases = run.statement.releases(max(0, counted - run.steps_before))
            if releases.steps > 0:
                history.append(releases)
        return history

    def history_within_plan(self, steps_run: int) -> list[Releases]:
        """Return that history, with the steps that are planned: a run that ends early costs no more than all of them."""
        history, run = self.history(steps_run), self.runs[-1]
        planned = run.statement.steps_planned - (run.from_step or 0)
        if steps_run > run.steps_before and history[-1].steps < planned:
            history[-1] = history[-1]._replace(planned=planned)
        return history

    def _begin(self, entry: chain.Entry) -> None:
        statement, versions = PrivacyStatement(**entry["statement"]), entry["versions"]
        if not math.isclose(statement.sample_rate, statement.expected_batch_size / statement.num_units, rel_tol=1e-12):
            _refuse(entry, f"its sample_rate {statement.sample_rate} is not expected_batch_size / num_units")
        if not self.runs:
            if entry["event"] != "opened":
                _refuse(entry, "a ledger begins with 'opened'")
            self.runs.append(Run(statement, versions, None, 0, 0, 0))
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
        self.runs.append(Run(statement, versions, entry["from_step"], counted, counted, counted))

    def _reserve(self, entry: chain.Entry) -> None:
        if entry["steps_reserved"] <= self.runs[-1].steps_reserved:
            _refuse(entry, f"{self.runs[-1].steps_reserved} steps were reserved already")
        self.runs[-1].steps_reserved = entry["steps_reserved"]

    def _release(self, entry: chain.Entry) -> None:
        run, steps_run, is_end = self.runs[-1], entry["steps_run"], entry["event"] == "closed"
        if not run.steps_released <= steps_run <= run.steps_reserved:
            _refuse(entry, f"{run.steps_released} steps had been released and {run.steps_reserved} were reserved")
        run.steps_released, run.is_closed = steps_run, is_end
        stated = entry["epsilon"][run.statement.accountant] if is_end else entry["epsilon"]
        epsilon = math.inf if stated is None else stated
        private = all(run.statement.private for run in self.runs)
        history, target = self.history_within_plan(steps_run), run.statement.target_epsilon
        self.claims.append(Claim(entry["index"], history, target, epsilon, private, run.versions))


def _refuse(entry: chain.Entry, reason: str) -> None:
    said = json.dumps({name: entry[name] for name in ("from_step", "steps_reserved", "steps_run") if name in entry})
    raise ValueError(
        f"Entry {entry['index']} ({entry['event']!r}, {said}) cannot stand here: {reason}. Take the file from an unchanged "
        "copy."
    )
