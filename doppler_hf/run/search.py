"""`hyperparameter_search` with privacy: a secret number of trials, of which only the best is published.

Privacy: `privacy.accounting.selection` bounds what such a search says about one record. Its assumptions hold as follows.

- The number of trials, and the settings of all trials, are drawn from the operating system's entropy before the first trial
  begins. So no result can influence them. `hp_space` gets an object that draws, and nothing else.
- Every trial begins with a new model, a new run with secrets of its own, and copies of the callbacks. Its noise is such that
  it satisfies the two guarantees of the search (`calibration.noise_multiplier_of_trial`), whatever its settings are.
- A trial is scored on evaluation data, which are other records than the training data. A trial that fails, or whose score is
  not a number, is worse than all others. Independent coins order trials with equal scores.
- All files of all trials are in a folder outside `output_dir`, which is removed.
- No published file tells how long the search took, which would tell something of the number of trials. The model is saved
  after the last trial, and its files get the time at which the search began. The ledger does not even say when it began,
  since people may see at once when it is published: all its entries have the same time, which means nothing. Logs lose their
  clocks, because the first trial in a process is slower than the others. So, given the published trial, its files do not
  depend on the number of trials. What is left is the moment of publication, which the user chooses: docs/guides/choosing.md.
- Nothing of a trial is shown while the search runs, not even of the first one: if its settings were known, and another trial
  were published, there would be at least two trials, and the theorem does not hold for a number of which this is known.

A search that does not reach its end publishes nothing. It still counts with its whole ε: `output_dir` has a note of a search
that is running, and each later private run in this folder adds the ε of the note to its own. The note has neither the number
of trials nor what is left to do, so such a search cannot be resumed.
"""

import copy
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from transformers.trainer_utils import BestRun, SchedulerType

from doppler_hf.errors import Failure, Refusal
from doppler_hf.privacy import LEDGER_NAME, PrivacyStatement
from doppler_hf.privacy.accounting.accounting import INTERRUPTED_SEARCH, Spent, Trainings
from doppler_hf.privacy.accounting.selection import NumberOfTrials, Selection, divide_budget
from doppler_hf.privacy.ledger.file import make_folder, write_whole
from doppler_hf.privacy.ledger.ledger import ledgers_in
from doppler_hf.run.evaluation import BASELINES
from doppler_hf.run.lineage import forget
from doppler_hf.run.plan import Trial
from doppler_hf.run.published_results import CLOCKS
from doppler_hf.training_args import DopplerTrainingArguments

NOTE_NAME: Final = "privacy_search_running.json"
NO_TIME: Final = (
    "1970-01-01T00:00:00+00:00"  # of all entries of a search's ledger, whose true times would tell of its length
)
# The arguments that may differ between trials. None of them changes what ε means or covers, and each run of a trial computes
# its noise from them.
SEARCHED: Final = frozenset({
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "per_sample_max_grad_norm", "clipping", "clipping_granularity", "augmentation_multiplicity", "noise_shape",
    "low_pass_filter", "base_optimizer", "adam_bc_floor", "weight_decay", "adam_beta2", "adam_epsilon",
    "lr_scheduler_type", "warmup_steps", "seed",
})  # fmt: skip
_PREFIX: Final = "doppler-hf-search-"  # of the names of folders for trials
# Methods of Optuna's trials that are out of use there, and what to call in their place.
_OTHER_METHODS: Final = {
    "suggest_uniform": "Call suggest_float(name, low, high)",
    "suggest_loguniform": "Call suggest_float(name, low, high, log=True)",
    "suggest_discrete_uniform": "Call suggest_float(name, low, high, step=step)",
}
# Callbacks of Transformers that do nothing but show something.
_SHOWING: Final = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
_RANDOM: Final = secrets.SystemRandom()


class MissingMethodRefusal(Refusal, AttributeError):
    """`hp_space` calls a method that a trial does not have; `hasattr` and `copy` expect an `AttributeError`."""


class Draw:
    """The settings of one trial, drawn at random. It has the methods that `hp_space` calls on a trial of Optuna.

    Example:
        >>> draw = Draw()
        >>> 1e-4 <= draw.suggest_float("learning_rate", 1e-4, 1e-2, log=True) <= 1e-2
        True
        >>> draw.suggest_categorical("per_device_train_batch_size", [32, 64]) in (32, 64)
        True
    """

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> float:
        """Draw a number between `low` and `high` uniformly, or its logarithm uniformly, or one of the steps from `low`."""
        _check_range(name, low, high, positive=log)
        if step is not None:
            steps = math.floor((high - low) / step + 1e-9)
            return self._once(name, lambda: min(high, low + step * _RANDOM.randrange(steps + 1)))
        if log:
            return self._once(name, lambda: min(high, max(low, math.exp(_RANDOM.uniform(math.log(low), math.log(high))))))
        return self._once(name, lambda: _RANDOM.uniform(low, high))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Draw a whole number from `low` to `high` uniformly, or its logarithm nearly uniformly."""
        _check_range(name, low, high, positive=log)
        if low != int(low) or high != int(high) or step != int(step):
            raise Refusal(
                "out-of-range",
                f"hp_space draws {name} as a whole number between {low} and {high} in steps of {step}. Give whole "
                "numbers, or draw it with suggest_float.",
            )
        low, high, step = int(low), int(high), int(step)
        if log:
            ends = math.log(low - 0.5), math.log(high + 0.5)
            return self._once(name, lambda: min(high, max(low, round(math.exp(_RANDOM.uniform(*ends))))))
        return self._once(name, lambda: _RANDOM.randrange(low, high + 1, step))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Draw one of the choices uniformly."""
        if not len(choices):
            raise Refusal("out-of-range", f"hp_space has no choices for {name}. Give suggest_categorical at least one.")
        return self._once(name, lambda: _RANDOM.choice([*choices]))

    def __getattr__(self, name: str) -> Any:
        mend = _OTHER_METHODS.get(name, "Draw the settings with suggest_float, suggest_int and suggest_categorical")
        raise MissingMethodRefusal(
            "search-space",
            f"hp_space uses trial.{name}, which a trial of a private search does not have: its settings are drawn at "
            f"random, and must not depend on its number or on other trials. {mend}.",
        )

    def _once(self, name: str, draw: Callable[[], Any]) -> Any:
        if name not in self.params:
            self.params[name] = draw()
        return self.params[name]


def _check_range(name: str, low: float, high: float, *, positive: bool) -> None:
    if not -math.inf < low <= high < math.inf or (positive and low <= 0):
        raise Refusal(
            "out-of-range",
            f"hp_space draws {name} between {low} and {high}{' on a logarithmic scale' if positive else ''}. The first "
            f"number has to be {'positive and ' if positive else ''}at most the second one, and both have to be finite.",
        )


def drawn_settings(hp_space: Callable[[Any], Any], draw: Draw | None = None) -> dict[str, Any]:
    """Return the settings of a trial, which `hp_space` draws; the same `draw` gives the same numbers again."""
    settings = hp_space(Draw() if draw is None else draw)
    if not isinstance(settings, Mapping):
        raise Refusal(
            "search-space",
            f"hp_space returned {type(settings).__name__}. Return a dictionary of the arguments that a trial gets, such as "
            '{"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)}.',
        )
    # JSON, which ledgers are written in, has no numbers of NumPy.
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}


def arguments_of_trial(args: DopplerTrainingArguments, settings: Mapping[str, Any]) -> DopplerTrainingArguments:
    """Return the arguments of a trial with these settings, after the checks of ordinary arguments."""
    for name in settings:
        if name not in SEARCHED:
            is_known = hasattr(args, name)
            mend = "To warm up for a share of the steps, set warmup_steps=0.1. " if name == "warmup_ratio" else ""
            raise Refusal(
                "search-setting",
                f"hp_space sets {name}, which {'may not differ between trials' if is_known else 'is no argument'}. {mend}A "
                "search can choose: " + ", ".join(sorted(SEARCHED)) + ".",
            )
    of_trial = copy.copy(args)
    try:
        for name, value in settings.items():
            # Transformers reads a schedule by its kind, and only its own `__post_init__` makes one of a name.
            setattr(of_trial, name, SchedulerType(value) if name == "lr_scheduler_type" else value)
        of_trial.check()
    except ValueError as error:
        raise Refusal("search-setting", f"hp_space drew settings that are refused ({dict(settings)}): {error}") from error
    return of_trial


def default_objective(metrics: Mapping[str, float], *, direction: str) -> float:
    """Return the loss if it is to be small, else the sum of all metrics but losses, clocks and our own."""
    if direction == "minimize":
        if "eval_loss" not in metrics:
            raise Refusal(
                "search-objective",
                "The evaluation has no eval_loss, which a search makes small if it has no objective of its own. Pass "
                f"compute_objective, a function that returns a number from these metrics: {', '.join(sorted(metrics))}.",
            )
        return float(metrics["eval_loss"])
    left_out = ("_loss", "_time", *CLOCKS, *BASELINES)
    found = [value for name, value in metrics.items() if name.startswith("eval_") and not name.endswith(left_out)]
    if not found:
        raise Refusal(
            "search-objective",
            'With direction="maximize" a search makes the sum of your metrics large, but the evaluation has none besides '
            'losses. Give the trainer compute_metrics, pass compute_objective, or search with direction="minimize".',
        )
    return float(sum(found))


def draw_number_of_trials(trials: NumberOfTrials) -> int:
    """Draw the secret number of trials."""
    # Privacy: the coins come from the operating system, and nothing that is published depends on the number.
    number = 1
    while _RANDOM.random() < trials.another_after(number):
        number += 1
    return number


def drawn_trials(hp_space: Callable[[Any], Any], trials: NumberOfTrials) -> list[dict[str, Any]]:
    """Return the settings of all trials of a search, a secret number of them, each drawn independently of the others."""
    return [drawn_settings(hp_space) for _ in range(draw_number_of_trials(trials))]


class _Result(NamedTuple):
    score: float  # the larger, the better
    coin: float  # orders equal scores
    objective: float
    settings: dict[str, Any]
    kept: dict[str, Any]  # attributes of the trainer


def trial_of(trainer: Any, plan: PrivacyStatement, *, n_trials: float) -> Trial:
    """Return what all trials of a search have in common; `plan` is the statement of a run with the trainer's arguments."""
    assert plan.target_epsilon is not None
    # Privacy: the division is valid for all trials. It follows from public arguments, before the first trial.
    selection = divide_budget(
        NumberOfTrials(float(n_trials)),
        target_epsilon=plan.target_epsilon,
        target_delta=plan.target_delta,
        single_run=plan.releases(plan.steps_planned),
    )
    return Trial(selection, NO_TIME, {}, Path(trainer.args.output_dir))


def search(
    trainer: Any,
    *,
    hp_space: Callable[[Any], Any],
    compute_objective: Callable[[dict[str, float]], float],
    direction: str,
    trial: Trial,
) -> BestRun:
    """Run a search, save its best trial into `output_dir`, and leave the trainer with that model."""
    args, began = trainer.args, time.time()
    folder, selection = trial.output_dir, trial.selection
    _say_what_begins(folder, selection)
    with _unseen():  # `hp_space` may print
        of_trials = [(each, arguments_of_trial(args, each)) for each in drawn_trials(hp_space, selection.trials)]
    with ExitStack() as after, trainer._lock_of(folder):
        # Privacy: files are dated back after everything else was written there, also if saving fails halfway.
        after.callback(_date_back, folder, to=began)
        with _noted(folder, epsilon=args.target_epsilon, delta=selection.delta) as note:
            trial = trial._replace(interrupted=interrupted_in(folder, but=note.name))
            best = _best_of(trainer, of_trials, trial, compute_objective=compute_objective, direction=direction, note=note)
            _restore(trainer, best.kept)
            _forget_last_trial(trainer)
            trainer.args.output_dir = args.output_dir
            trainer.state.best_model_checkpoint = None
            _forget_clocks(trainer.state)
            run = trainer.privacy
            assert run.ledger is not None
            note.run = run.ledger.name
            run.forget_rounds()
            trainer.draw_training_curve(run)
            trainer.save_model()
    return BestRun(run.ledger.run_id, best.objective, best.settings, None)


def _say_what_begins(folder: Path, selection: Selection) -> None:
    print(
        f"Search: ε = {selection.epsilon:.4g} at δ = {selection.delta:.3g} for all trials together, of which "
        f"{selection.trials.mean:g} are expected. Their number is secret, so nothing is shown until the search has ended."
    )
    if (folder / LEDGER_NAME).exists():
        print(
            f"{folder} has the ledger of an earlier run, which will be renamed when the best model is saved there. If that "
            "run used the same data, its ε and the ε of this search add up."
        )


def _best_of(
    trainer: Any,
    of_trials: Sequence[tuple[dict[str, Any], DopplerTrainingArguments]],
    trial: Trial,
    *,
    compute_objective: Callable[[dict[str, float]], float],
    direction: str,
    note: "_Note",
) -> _Result:
    """Run all trials, and return the best one. Everything of the others is forgotten."""
    before, handler = _kept(trainer), trainer.callback_handler
    callbacks, best, why = handler.callbacks, None, "All objectives were NaN."
    trainer._trial_of_search = trial
    try:
        for settings, args in of_trials:
            handler.callbacks = copied_callbacks(callbacks)
            result = None
            try:
                with _unseen(), tempfile.TemporaryDirectory(dir=note.folder) as place:
                    args.output_dir = place
                    objective = _objective_of_trial(trainer, args, compute_objective, note=note)
                if not math.isnan(objective):
                    score = -objective if direction == "minimize" else objective
                    result = _Result(score, _RANDOM.random(), objective, settings, _kept(trainer))
                    # Privacy: a trial must not run out of memory because of the trials before it, so none stays there.
                    trainer.model.to("cpu")
            except Exception as error:
                if not note.is_spent:
                    raise
                why = f"The last error: {type(error).__name__}: {error}"  # the error itself would keep the trial's tensors
            # Privacy: a failure is not shown, since it tells of a trial, and it is worse than any score.
            is_better = result is not None and (best is None or result[:2] > best[:2])
            _forget(best.kept["_run"] if is_better and best is not None else None if is_better else trainer._run)
            best = result if is_better else best
            _free_memory(trainer)
        if best is None:
            raise Failure(
                "search-failed",
                "All trials of the search failed, so there is no model to publish. The ε of the search is spent: later runs "
                f"in this output_dir count it. {why}",
            )
    except BaseException:
        for run in (trainer._run, None if best is None else best.kept["_run"]):
            if run is not before["_run"]:
                _forget(run)
        _restore(trainer, before)
        raise
    finally:
        trainer._trial_of_search, handler.callbacks = None, callbacks
    return best


def _objective_of_trial(
    trainer: Any,
    args: DopplerTrainingArguments,
    compute_objective: Callable[[dict[str, float]], float],
    *,
    note: "_Note",
) -> float:
    trainer.args, trainer._run = args, None
    try:
        trainer.train()
        return float(compute_objective(trainer.evaluate()))
    finally:
        run = trainer._run
        note.is_spent |= run is not None and run.ledger is not None and run.ledger.runs[-1].steps_reserved > 0


def copied_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Return copies of callbacks for a trial, without those that only show it."""
    return [copy.deepcopy(each) for each in callbacks if _SHOWING.isdisjoint(kind.__name__ for kind in type(each).__mro__)]


@contextmanager
def _unseen() -> Iterator[None]:
    """Show nothing of what the block prints, warns of or logs.

    # Privacy: it would tell the number of trials, and their settings and results, to whoever reads the screen or a log file.
    """
    was_disabled = logging.root.manager.disable
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(was_disabled)


_KEPT: Final = (
    "args", "model", "model_wrapped", "state", "control", "is_in_train", "_run", "_train_batch_size",
)  # fmt: skip


def _kept(trainer: Any) -> dict[str, Any]:
    # The states of an optimizer have no use after a trial.
    return {name: getattr(trainer, name) for name in _KEPT} | {"optimizer": None, "lr_scheduler": None, "is_in_train": False}


def _restore(trainer: Any, kept: Mapping[str, Any]) -> None:
    for name, value in kept.items():
        setattr(trainer, name, value)


def _free_memory(trainer: Any) -> None:
    trainer.model = trainer.model_wrapped = None
    trainer.callback_handler.model = trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    trainer.accelerator.free_memory()  # collects garbage, too


def _forget_last_trial(trainer: Any) -> None:
    """Let nothing of the trainer refer to the last trial, which may be another one than the best."""
    # Privacy: callbacks get what the handler has, and may save it.
    if trainer.place_model_on_device:
        trainer.model.to(trainer.args.device)
    trainer.callback_handler.model = trainer.model
    trainer._locks = {folder: lock for folder, lock in trainer._locks.items() if folder.exists()}


def _forget_clocks(state: Any) -> None:
    """Remove from the logs how long the best trial took, which depends on the trials before it."""
    for log in state.log_history:
        for name in [each for each in log if each.endswith(CLOCKS)]:
            del log[name]


def _forget(run: Any) -> None:
    """Remove what the user's state folder has of a trial that is not published."""
    if run is not None and run.ledger is not None:
        run.forget_rounds()
        forget(run.ledger.run_id)


def _date_back(folder: Path, *, to: float) -> None:
    """Give the files that were written since the search began the time of its beginning."""
    # Privacy: the time at which the search ended tells how many trials it had.
    kept = []
    for path in [*folder.rglob("*"), folder]:
        try:
            if path.lstat().st_mtime >= to:
                os.utime(path, (to, to), follow_symlinks=os.utime not in os.supports_follow_symlinks)
        except FileNotFoundError:
            pass  # somebody has removed the file
        except OSError:
            kept.append(path.name)
    if kept:
        print(
            f"warning        The file system does not let the search change the times of {', '.join(kept)} in {folder}. "
            "These times tell when the search ended, and so something about the number of trials, which has to stay secret. "
            "Copy the files without their times before anybody else sees them."
        )


# --- searches that do not end ------------------------------------------------------------------------------------------


@dataclass
class _Note:
    name: str
    folder: Path  # of the trials
    is_spent: bool = False
    run: str | None = None  # the best trial, once all trials are made


@contextmanager
def _noted(folder: Path, *, epsilon: float, delta: float) -> Iterator[_Note]:
    """Note in a folder that a search is running, and remove the note at its end, or if nothing was spent.

    # Privacy: the note is written before the first trial, so whatever ends the search, its ε is counted.
    """
    make_folder(folder)
    before = _notes(folder)
    remove_leftovers(folder)
    note = _Note(secrets.token_hex(8), Path(tempfile.mkdtemp(prefix=_PREFIX)))
    own = {"name": note.name, "epsilon": epsilon, "delta": delta, "trials": str(note.folder)}
    cost = f"ε = {epsilon:g} at δ = {delta:.3g}"
    try:
        _write_notes(folder, [*before, own])
        yield note
        if _is_saved(folder, note.run):
            _write_notes(folder, [])  # the ledger in this folder has the ε of earlier searches, too
        else:
            _write_notes(folder, [*before, {**own, "run": note.run}])
            print(
                f"{folder} has no ledger of this search, because the best model was saved elsewhere or not at all. So later "
                f"private runs in {folder} add the {cost} of the search to theirs."
            )
    except BaseException:
        if not note.is_spent:
            _write_notes(folder, before)
        elif note.run is None:
            print(
                f"The search has not ended, so nothing of it is published, and it cannot be resumed. Its {cost} "
                f"counts all the same: later private runs in {folder} add it to theirs."
            )
        else:
            with suppress(OSError):  # without this name the search counts once more, which is safe
                _write_notes(folder, [*before, {**own, "run": note.run}])
            if not _is_saved(folder, note.run):
                print(
                    "The search has ended, but its best model could not be saved. The trainer has this model: remove the "
                    f"cause of the error, and call trainer.save_model(). Until then, later private runs in {folder} add the "
                    f"{cost} of the search to theirs."
                )
        raise
    finally:
        shutil.rmtree(note.folder, ignore_errors=True)


def _is_saved(folder: Path, run: str | None) -> bool:
    """Return whether a folder has the ledger of this run, perhaps renamed by a later run."""
    return any(ledger.name == run for ledger in ledgers_in(folder).values())


def remove_leftovers(folder: str | Path) -> None:
    """Remove the trials of searches that were killed while they ran in this folder. The caller has the folder's lock."""
    for each in _notes(Path(folder)):
        trials = Path(each["trials"])
        if trials.name.startswith(_PREFIX):  # the file may have been edited
            shutil.rmtree(trials, ignore_errors=True)


def interrupted_in(folder: str | Path, *, but: str = "") -> Trainings:
    """Return what searches in this folder, except one, had spent when they were interrupted."""
    return {
        f"{INTERRUPTED_SEARCH}{each['name']}": Spent(each["epsilon"], each["delta"])
        for each in _notes(Path(folder))
        # The user may have saved the best model since, after an error: it has a ledger of its own.
        if each["name"] != but and not ("run" in each and _is_saved(Path(folder), each["run"]))
    }


def _notes(folder: Path) -> list[dict[str, Any]]:
    path = folder / NOTE_NAME
    if not path.exists():
        return []
    try:
        notes: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["searches"]
        return [{"name": str(each["name"]), "epsilon": float(each["epsilon"]), "delta": float(each["delta"]),
                 "trials": str(each["trials"]), **({"run": str(each["run"])} if each.get("run") else {})}
                for each in notes]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            "search-note-damaged",
            f"{path} cannot be read ({type(error).__name__}), so the ε of an interrupted search in this folder is unknown. "
            "Use another output_dir, and add that ε to the ε of later runs on the same data.",
        ) from error


def _write_notes(folder: Path, notes: Sequence[Mapping[str, Any]]) -> None:
    path = folder / NOTE_NAME
    if not notes:
        with suppress(FileNotFoundError):
            path.unlink()
        return
    about = "A search runs here, or was interrupted. Later private runs in this folder add its epsilon and delta to theirs."
    # Privacy: the note is on the disk before the first trial begins, whatever happens to the power.
    write_whole(path, json.dumps({"about": about, "searches": list(notes)}, indent=2) + "\n")
