"""What is kept of a search until it ends: a note of its ε in its output folder, and what it needs to continue.

The note is written before the first trial. Whatever ends the search, each later private run in this folder adds the ε of the
note to its own, until the same search has been continued and has ended.

To continue, a search needs its state and its best trial so far. Privacy: both are as secret as the number of trials, so they
are in the user's own folder of states (XDG_STATE_HOME), readable by the user alone, and are removed when the search
ends. They do not tell what is left to do, because that is not drawn yet: a coin after each trial decides whether another one
follows (`search.another_trial`). A coin that says no is written down before anything else happens, or an interruption while
the best model is saved would toss it again, and the number of trials would have another distribution.

The trial that ran when a search was interrupted is made again, with the settings that were drawn for it. So trials have the
distribution that the theorem needs, if interruptions do not depend on the records. Leaving this trial out would change the
distribution of the number of trials. Drawing other settings would change that of the settings, since long trials are
interrupted more often.
"""

import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from doppler_hf.errors import Refusal
from doppler_hf.privacy.accounting.accounting import INTERRUPTED_SEARCH, Spent, Trainings
from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.privacy.ledger.file import WriterLock, make_folder, write_whole
from doppler_hf.privacy.ledger.ledger import SEARCH_NOTE_NAME, ledgers_in
from doppler_hf.run.saving.json_state import as_json
from doppler_hf.run.states_folder import KEPT_FOR, make_states_folder

_STATE_NAME: Final = "search.json"
_PREFIX: Final = "doppler-hf-search-"  # of the names of folders for trials


@dataclass(frozen=True)
class SearchCall:
    """What has to be the same when a search continues, since its trials have one distribution."""

    values: Mapping[str, str]  # name of an argument, or of something else → its value in words
    rows: Mapping[str, DataDigest]  # name of a data set → digest

    def changes(self, before: "SearchCall") -> list[str]:
        """Return in words what differs from the call of the search that was interrupted."""
        old, new = before.values, self.values
        found = [
            f"{name} was {old.get(name)} and is {new.get(name)}"
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name)
        ]
        return found + [
            f"{name} has other rows or another order"
            for name in dict.fromkeys([*before.rows, *self.rows])
            if name not in before.rows or name not in self.rows or not before.rows[name].is_of_same_rows(self.rows[name])
        ]


@dataclass
class SearchState:
    """How far a search is.

    Attributes:
        call: What has to be the same when it continues.
        began: When it began, in seconds since 1970.
        begun: The number of trials that have begun.
        settings: Those of the trial that runs.
        is_complete: Whether a coin has said that no trial follows.
        best: The best trial so far: its folder, and what its files do not say.
    """

    call: SearchCall
    began: float = field(default_factory=time.time)
    begun: int = 0
    settings: dict[str, Any] | None = None
    is_complete: bool = False
    best: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> "SearchState | None":
        """Return the state in a folder of trials, or None if there is none that can be read."""
        try:
            found = json.loads((folder / _STATE_NAME).read_text("utf-8"))
            call = found.pop("call")
            rows = {name: DataDigest.from_json(digest) for name, digest in call["rows"].items()}
            return cls(SearchCall(call["values"], rows), **found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass
class RunningSearch:
    """A search while this process makes its trials.

    Attributes:
        folder: Of the trials, which nobody but the user can read.
        is_spent: Whether a trial has made a step.
        run: The name of the best trial's run, once all trials are made.
        is_kept: Whether the state is on the disk.
    """

    name: str
    folder: Path
    state: SearchState
    is_spent: bool = False
    run: str | None = None
    is_kept: bool = True
    write_note: Callable[[], None] = lambda: None

    def keep(self) -> None:
        """Write the state. If it cannot be written, the search makes its trials, but an interruption ends it."""
        if not self.is_kept:
            return
        try:
            # A folder made by `tempfile` or with the user's own mode: nobody else can read it.
            write_whole(self.folder / _STATE_NAME, json.dumps(as_json(asdict(self.state))) + "\n")
        except OSError:
            self.give_up_resuming()

    def give_up_resuming(self) -> None:
        """Remove the state, which does not have all that the search would need to continue."""
        self.is_kept = False
        with suppress(OSError):
            (self.folder / _STATE_NAME).unlink()

    def place_of_trial(self) -> Path:
        """Return the folder in which the trial that runs may be kept."""
        return self.folder / f"trial-{self.state.begun}"

    def remove_others(self) -> None:
        """Remove what a kill has left of trials that are not the best one."""
        best = None if self.state.best is None else self.state.best["folder"]
        for path in self.folder.iterdir():
            if path.is_dir() and path.name != best:
                shutil.rmtree(path, ignore_errors=True)

    def end_trial(self, best: dict[str, Any] | None) -> None:
        """Write that the trial has ended, and `best`, if it is the best one so far. Then remove the other one."""
        state, place = self.state, self.place_of_trial()
        other = place if best is None else None if state.best is None else self.folder / state.best["folder"]
        state.best, state.settings = state.best if best is None else {**best, "folder": place.name}, None
        self.keep()
        if other is not None:
            shutil.rmtree(other, ignore_errors=True)

    def name_best(self, run: str) -> None:
        """Write the name of the best trial's run into the note, before its ledger is in the output folder."""
        self.run = run
        self.write_note()


@contextmanager
def noted_search(folder: Path, call: SearchCall, *, spent: Spent, resume: bool | None) -> Iterator[RunningSearch]:
    """Note in a folder that a search is running, and remove the note at its end, or if nothing was spent.

    Args:
        folder: The output folder of the search.
        call: With what it was called.
        spent: By the whole search.
        resume: Whether an interrupted search in this folder continues; None if it does wherever there is one.

    Raises:
        ValueError: If an interrupted search was to continue, and cannot.
    """
    make_folder(folder)
    before = _notes(folder)
    found = _interrupted(folder, before, call, resume=resume)
    if found is None:
        remove_leftovers(folder)
        search = RunningSearch(secrets.token_hex(8), _new_folder(), SearchState(call))
    else:
        search, before = found, [each for each in before if each["name"] != found.name]
    own = {"name": search.name, **spent._asdict(), "trials": str(search.folder)}
    cost = f"ε = {spent.epsilon:g} at δ = {spent.delta:.3g}"

    def write_note() -> None:
        _write_notes(folder, [*before, own if search.run is None else {**own, "run": search.run}])

    search.write_note = write_note
    with WriterLock(search.folder):  # the output folder may have been copied: a search publishes only once
        if found is not None:
            # Another process may have ended this search since it was read.
            state = SearchState.read(found.folder)
            if state is None:
                raise _state_is_missing(folder, own)
            found.state = state
            found.remove_others()
        try:
            write_note()
            if found is not None:
                print(f"The search that was interrupted in {folder} continues. Its ε is spent only once.")
            yield search
            if _is_saved(folder, search.run):
                _write_notes(folder, [])  # the ledger in this folder has the ε of earlier searches, too
            else:
                write_note()
                print(
                    f"{folder} has no ledger of this search, because the best model was saved elsewhere or not at all. So "
                    f"later private runs in {folder} add the {cost} of the search to theirs."
                )
            shutil.rmtree(search.folder, ignore_errors=True)
        except BaseException:
            if not search.is_spent:
                _write_notes(folder, before)
                shutil.rmtree(search.folder, ignore_errors=True)
            else:
                _say_how_it_goes_on(folder, search, cost=cost)
            raise


def _say_how_it_goes_on(folder: Path, search: RunningSearch, *, cost: str) -> None:
    state = search.state
    # Without a result all trials have failed, which the error says.
    if search.run is None and not (state.is_complete and state.best is None):
        goes_on = (
            "Call hyperparameter_search again with the same arguments, and it continues at no further cost. Do not continue "
            "it after the date that you have fixed for publication."
        )
        fails = (
            "It cannot continue, because its trials could not be written to the disk. You can begin another one with "
            "resume_from_checkpoint=False."
        )
        print(
            f"The search has not ended, so nothing of it is published. {goes_on if search.is_kept else fails} Other private "
            f"runs in {folder}{' that begin before it has ended' if search.is_kept else ''} add its {cost} to theirs."
        )
    elif search.run is not None and not _is_saved(folder, search.run):
        # Privacy: only a search dates the files back that it writes.
        again = "hyperparameter_search again" if search.is_kept else "trainer.save_model()"
        print(
            "The search has ended, but its best model could not be saved. The trainer has this model: remove the cause of "
            f"the error, and call {again}. Until then, other private runs in {folder} add the {cost} of "
            "the search to theirs."
        )
    if not search.is_kept or (state.is_complete and state.best is None):
        shutil.rmtree(search.folder, ignore_errors=True)


def _interrupted(
    folder: Path, notes: Sequence[Mapping[str, Any]], call: SearchCall, *, resume: bool | None
) -> RunningSearch | None:
    """Return the search of this folder that continues, or None if another one begins."""
    last = next((each for each in reversed(notes) if not _is_saved(folder, each.get("run"))), None)
    place = None if last is None else Path(last["trials"])
    state = SearchState.read(place) if place is not None and place.name.startswith(_PREFIX) else None
    has_ended = last is None or ("run" in last and state is None)  # its best model may be in another folder
    if resume and has_ended:
        raise Refusal(
            "no-search-to-resume",
            f"resume_from_checkpoint=True, but {folder} has no search that was interrupted. Leave resume_from_checkpoint "
            "out to begin a search.",
        )
    if resume is False or has_ended:
        return None
    assert last is not None
    assert place is not None
    if state is None:
        raise _state_is_missing(folder, last)
    if changes := call.changes(state.call):
        raise Refusal(
            "search-changed",
            f"The search that was interrupted in {folder} (ε = {last['epsilon']:g}) cannot continue with other arguments, "
            f"since all its trials need the same distribution: {'; '.join(changes)}. Use the "
            "arguments with which it began. Or begin another one with resume_from_checkpoint=False: the ε of both then add "
            "up.",
        )
    return RunningSearch(last["name"], place, state, is_spent=True)


def _state_is_missing(folder: Path, note: Mapping[str, Any]) -> Refusal:
    return Refusal(
        "search-state-missing",
        f"The search that was interrupted in {folder} (ε = {note['epsilon']:g}) cannot continue: its trials are not in "
        f"{Path(note['trials']).parent}. Perhaps all of them failed, it ran on another machine, another search in this "
        "folder removed them, or nobody continued it for half a year. Begin another one with "
        "resume_from_checkpoint=False: the ε of both then add up.",
    )


def not_restored(folder: Path, error: BaseException | str) -> Refusal:
    """Return the error of a search whose best trial so far cannot be loaded."""
    return Refusal(
        "search-not-restored",
        f"The best trial so far of the search that was interrupted in {folder} cannot be loaded: {error}. If model_init has "
        "changed, restore it. Otherwise begin another one with resume_from_checkpoint=False: the ε of both then add up.",
    )


def _new_folder() -> Path:
    """Return a new folder that only the user can read: among the user's states, or else a temporary one."""
    try:
        states = make_states_folder()
        for path in states.glob(f"{_PREFIX}*"):
            if path.stat().st_mtime < time.time() - KEPT_FOR:  # a search that was not called again
                shutil.rmtree(path, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=states))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=_PREFIX))


def remove_leftovers(folder: str | Path) -> None:
    """Remove the trials of searches that were interrupted in this folder. The caller has the folder's lock."""
    for each in _notes(Path(folder)):
        trials = Path(each["trials"])
        if trials.name.startswith(_PREFIX) and trials.is_dir():  # the file may have been edited
            # Another process may make its trials there, if the output folder was copied.
            with suppress(Refusal), WriterLock(trials):
                shutil.rmtree(trials, ignore_errors=True)


def interrupted_in(folder: str | Path, *, but: str = "") -> Trainings:
    """Return what searches in this folder, except one, had spent when they were interrupted."""
    return {
        f"{INTERRUPTED_SEARCH}{each['name']}": Spent(each["epsilon"], each["delta"], each["unit"])
        for each in _notes(Path(folder))
        # The user may have saved the best model since, after an error: it has a ledger of its own.
        if each["name"] != but and not _is_saved(Path(folder), each.get("run"))
    }


def _is_saved(folder: Path, run: str | None) -> bool:
    """Return whether a folder has the ledger of this run, perhaps renamed by a later run."""
    return run is not None and any(ledger.name == run for ledger in ledgers_in(folder).values())


def _notes(folder: Path) -> list[dict[str, Any]]:
    path = folder / SEARCH_NOTE_NAME
    if not path.exists():
        return []
    try:
        notes: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["searches"]
        return [{"name": str(each["name"]), "epsilon": float(each["epsilon"]), "delta": float(each["delta"]),
                 "unit": str(each.get("unit", "")),
                 "trials": str(each["trials"]), **({"run": str(each["run"])} if each.get("run") else {})}
                for each in notes]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            "search-note-damaged",
            f"{path} cannot be read ({type(error).__name__}), so the ε of an interrupted search in this folder is unknown. "
            "Use another output_dir, and add that ε to the ε of later runs on the same data.",
        ) from error


def _write_notes(folder: Path, notes: Sequence[Mapping[str, Any]]) -> None:
    path = folder / SEARCH_NOTE_NAME
    if not notes:
        with suppress(FileNotFoundError):
            path.unlink()
        return
    about = "A search runs here, or was interrupted. Later private runs in this folder add its epsilon and delta to theirs."
    # Privacy: the note is on the disk before the first trial begins, whatever happens to the power.
    write_whole(path, json.dumps({"about": about, "searches": list(notes)}, indent=2) + "\n")
