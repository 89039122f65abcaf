"""`hyperparameter_search` with privacy: a secret number of trials, of which only the best is published.

Privacy: `privacy.accounting.selection` bounds what such a search says about one record. Its assumptions hold as follows.

- A coin after each trial decides whether another one follows, so that their number has the stated distribution. The coins,
  and the settings of all trials (`search_space`), come from the operating system's entropy. So no result can influence them.
- Every trial begins with a new model, a new run with secrets of its own, and copies of the callbacks. Its noise is such that
  it satisfies the two guarantees of the search (`calibration.noise_multiplier_of_trial`), whatever its settings are.
- A trial is scored on evaluation data, which are other records than the training data. A trial that fails, or whose score is
  not a number, is worse than all others. Independent coins order trials with equal scores.
- All files of all trials are in a folder outside `output_dir`, which only the user can read. It is removed when the best
  trial is published.
- No published file tells how long the search took, which would tell something of the number of trials. The model is saved
  after the last trial, and its files get the time at which the search began. The ledger does not even say when it began,
  since people may see at once when it is published: all its entries have the same time, which means nothing. Logs lose their
  clocks, because the first trial in a process is slower than the others. So, given the published trial, its files do not
  depend on the number of trials. What is left is the moment of publication, which the user chooses: docs/guides/search.md.
- Nothing of a trial is shown while the search runs, not even of the first one: if its settings were known, and another trial
  were published, there would be at least two trials, and the theorem does not hold for a number of which this is known.

A search that does not reach its end publishes nothing. It still counts with its whole ε, and the same call continues it:
`interrupted_searches`. That it was interrupted is told by no published file, since whoever knows when, and which trial was
made before, would know something of the number of trials.
"""

import copy
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from transformers import EarlyStoppingCallback, PreTrainedModel, TrainerControl, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import BestRun
from transformers.utils import CONFIG_NAME

from doppler_hf.errors import Failure, Refusal, page
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger, PrivacyStatement
from doppler_hf.privacy.accounting.accounting import Spent
from doppler_hf.privacy.accounting.selection import NumberOfTrials, Selection, divide_budget
from doppler_hf.privacy.batching.data_digest import DataDigest, digests_of_fields
from doppler_hf.privacy.ledger.file import synchronize_files
from doppler_hf.run.digests import digests_of
from doppler_hf.run.planning.plan import NO_TIME, Trial, in_digits
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.reporting.logged_loss import is_console
from doppler_hf.run.reporting.other_runs import other_runs_note, remember_run
from doppler_hf.run.reporting.published_results import BASELINES, CLOCKS, USERS_WITH
from doppler_hf.run.saving.json_state import writable_state
from doppler_hf.run.search.interrupted_searches import (
    RunningSearch,
    SearchCall,
    interrupted_in,
    not_restored,
    noted_search,
)
from doppler_hf.run.search.search_space import RANDOM, arguments_of_trial, drawn_settings, space_in_words, unseen
from doppler_hf.run.weights.lineage import forget
from doppler_hf.training_args import DopplerTrainingArguments


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
    found = [
        value
        for name, value in metrics.items()
        if name.startswith("eval_") and not name.endswith(left_out) and USERS_WITH not in name
    ]
    if not found:
        raise Refusal(
            "search-objective",
            'With direction="maximize" a search makes the sum of your metrics large, but the evaluation has none besides '
            'losses. Give the trainer compute_metrics, pass compute_objective, or search with direction="minimize".',
        )
    return float(sum(found))


def another_trial(trials: NumberOfTrials, begun: int) -> bool:
    """Toss the coin that decides, after so many trials, whether another one follows."""
    # Privacy: the coins come from the operating system, and nothing that is published depends on the number of trials.
    return RANDOM.random() < trials.another_after(begun)


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
    return Trial(selection, {}, Path(trainer.args.output_dir))


def search(
    trainer: Any,
    *,
    hp_space: Callable[[Any], Any],
    compute_objective: Callable[[dict[str, float]], float],
    direction: str,
    trial: Trial,
    plan: PrivateRun,
    resume: bool | None = None,
) -> BestRun:
    """Run a search, save its best trial into `output_dir`, and leave the trainer with that model.

    `plan` is a run with the trainer's own arguments. With `resume`, an interrupted search continues; see `noted_search`.
    """
    args, folder, selection = trainer.args, trial.output_dir, trial.selection
    call = _call_of(trainer, plan, selection, hp_space=hp_space, direction=direction)
    began = time.time()
    with ExitStack() as after, trainer._lock_of(folder):
        # Privacy: files are dated back after everything else was written there, also if saving fails halfway.
        after.callback(lambda: _date_back(folder, to=began))
        spent = Spent(args.target_epsilon, selection.delta, plan.statement.unit_of_privacy)
        noted = noted_search(folder, call, spent=spent, resume=resume)
        with noted as running:
            _say_what_begins(trainer, folder, selection, plan)
            began = running.state.began
            trial = trial._replace(interrupted=interrupted_in(folder, but=running.name))
            best = _best_of(
                trainer, hp_space, trial, compute_objective=compute_objective, direction=direction, running=running
            )
            _restore(trainer, best.kept)
            _forget_last_trial(trainer)
            trainer.args.output_dir = args.output_dir
            run = trainer.privacy
            assert run.ledger is not None
            running.name_best(run.ledger.name)
            run.forget_rounds()
            remember_run(run, folder=str(folder))
            trainer.draw_training_curve(run)
            trainer.save_model()
    return BestRun(run.ledger.run_id, best.objective, best.settings, None)


def _call_of(
    trainer: Any, plan: PrivateRun, selection: Selection, *, hp_space: Callable[[Any], Any], direction: str
) -> SearchCall:
    # Trials need one distribution, so all arguments are compared. Of functions, such as an objective, nothing is known.
    arguments = {name: repr(value) for name, value in trainer.args.to_dict().items() if name not in _OF_THE_PLACE}
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {"": trainer.eval_dataset}
    return SearchCall(
        {
            "direction": direction,
            "hp_space": space_in_words(hp_space),
            "the division of ε": in_digits(selection),
            "the untrained model's digest": str(digests_of(trainer.model)),
            **arguments,
        },
        {"train_dataset": plan.digest_of_data}
        | {f"eval_dataset {name}".strip(): DataDigest("", digests_of_fields(each)) for name, each in sets.items()},
    )


def _say_what_begins(trainer: Any, folder: Path, selection: Selection, plan: PrivateRun) -> None:
    print(
        f"Search: ε = {selection.epsilon:.4g} at δ = {selection.delta:.3g} for all trials together, of which "
        f"{selection.trials.mean:g} are expected. Their number is secret, so nothing is shown until the search has ended. "
        "On the two tasks that we measured, a search was no better than a single run with the automatic values "
        f"({page('guides/search')})."
    )
    for note in other_runs_note(plan.digest_of_data, epsilon=selection.epsilon):
        print(f"{'warning':<14} {note}")
    if any(isinstance(each, EarlyStoppingCallback) for each in trainer.callback_handler.callbacks):
        print(
            "With EarlyStoppingCallback, the time that the search takes depends on the training records, and ε does not "
            "cover this. Remove the callback if anybody can see when you publish the model."
        )
    if (folder / LEDGER_NAME).exists():
        print(
            f"{folder} has the ledger of an earlier run, which will be renamed when the best model is saved there. If that "
            "run used the same data, its ε and the ε of this search add up."
        )


def _best_of(
    trainer: Any,
    hp_space: Callable[[Any], Any],
    trial: Trial,
    *,
    compute_objective: Callable[[dict[str, float]], float],
    direction: str,
    running: RunningSearch,
) -> _Result:
    """Run all trials, and return the best one. Everything of the others is forgotten."""
    before, handler, args = _kept(trainer), trainer.callback_handler, trainer.args
    callbacks, best, why = handler.callbacks, None, "All objectives were NaN."
    trainer._trial_of_search = trial
    try:
        if running.state.best is not None:
            best = _loaded(trainer, running, args)
            trainer.model.to("cpu")
            _free_memory(trainer)
        while _another_follows(running, trial.selection.trials, hp_space):
            handler.callbacks, trainer._run = copied_callbacks(callbacks), None
            result = None
            try:
                settings = running.state.settings or {}
                with unseen(), tempfile.TemporaryDirectory(dir=running.folder) as place:
                    of_trial = arguments_of_trial(args, settings)
                    of_trial.output_dir = place
                    objective = _objective_of_trial(trainer, of_trial, compute_objective, running=running)
                if not math.isnan(objective):
                    score = -objective if direction == "minimize" else objective
                    trainer.state.best_model_checkpoint = None
                    _forget_clocks(trainer.state)
                    result = _Result(score, RANDOM.random(), objective, settings, _kept(trainer))
                    # Privacy: before it is compared, so that an interruption meets better and worse trials alike.
                    _write_trial(trainer, running)
            except Exception as error:
                if not running.is_spent:
                    raise
                why = f"The last error: {type(error).__name__}: {error}"  # the error itself would keep the trial's tensors
            # Privacy: a failure is not shown, since it tells of a trial, and it is worse than any score.
            is_better = result is not None and (best is None or result[:2] > best[:2])
            running.end_trial(_in_words(trainer, result) if result is not None and is_better else None)
            if is_better:
                _forget(None if best is None else best.kept["_run"])
                best = result
                # Privacy: a trial must not run out of memory because of the trials before it, so none stays there.
                trainer.model.to("cpu")
            else:
                _forget(trainer._run)
            _free_memory(trainer)
        if best is not None and running.is_kept:
            # Privacy: published files are those of a trial that was loaded, whether the search was interrupted or not. A
            # trial that could not be written, or cannot be loaded, is published from memory: such a search cannot continue.
            with suppress(Refusal):
                best = _loaded(trainer, running, args)
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


def _another_follows(running: RunningSearch, trials: NumberOfTrials, hp_space: Callable[[Any], Any]) -> bool:
    """Decide whether another trial follows, draw its settings, and write that down before anything else happens."""
    state = running.state
    if state.settings is None and not state.is_complete:  # else a trial was interrupted
        state.is_complete = state.begun > 0 and not another_trial(trials, state.begun)
        if not state.is_complete:
            state.begun += 1
            try:
                with unseen():  # `hp_space` may print
                    state.settings = drawn_settings(hp_space)
            except Exception as error:
                if not running.is_spent:
                    raise
                state.settings = {f"{type(error).__name__}: {error}": None}  # no argument's name, so the trial fails
        running.keep()
    return not state.is_complete


def _write_trial(trainer: Any, running: RunningSearch) -> None:
    """Write the trial that the trainer has made, with which the search can continue after an interruption."""
    place = running.place_of_trial()
    try:
        with unseen():
            trainer._save(str(place))
            trainer._run.ledger.save(place)
            with writable_state(trainer):
                # In the order of the logs, which `save_to_json` would sort.
                (place / TRAINER_STATE_NAME).write_text(json.dumps(asdict(trainer.state)), "utf-8")
        synchronize_files(place)
    except Exception:  # such as a full disk
        running.give_up_resuming()


def _in_words(trainer: Any, result: _Result) -> dict[str, Any]:
    """Return what the files of a trial do not say."""
    return {
        "score": result.score, "coin": result.coin, "objective": result.objective, "settings": result.settings,
        "words": trainer._run.words, "chosen_step": trainer._run.chosen_step,
    }  # fmt: skip


def _loaded(trainer: Any, running: RunningSearch, args: DopplerTrainingArguments) -> _Result:
    """Load the best trial so far, as if the trainer had just made it."""
    kept = running.state.best
    assert kept is not None
    place = running.folder / kept["folder"]
    try:
        with unseen():
            trainer.args, trainer._run = arguments_of_trial(args, kept["settings"]), None
            set_seed(trainer.args.seed)  # as `train` does before it makes the model
            model = trainer.model = trainer.model_wrapped = trainer.call_model_init()
            run = trainer.privacy
            # Before the weights are loaded: what the run has trained is what differs from the model at its start.
            run.take_up(PrivacyLedger.load(place, time=NO_TIME), model, words=kept["words"], chosen_step=kept["chosen_step"])
            trainer._load_from_checkpoint(str(place))
            if isinstance(model, PreTrainedModel) and (place / CONFIG_NAME).exists():
                model.config = type(model.config).from_pretrained(place)  # training has set its special tokens and task
            trainer.state = TrainerState.load_from_json(str(place / TRAINER_STATE_NAME))
            trainer.control = TrainerControl()
            model.eval()
    except Exception as error:
        raise not_restored(args.output_dir, f"{type(error).__name__}: {error}") from error
    if not run.covers_weights_of(model):
        raise not_restored(args.output_dir, "its weights are not those that were saved")
    return _Result(kept["score"], kept["coin"], kept["objective"], kept["settings"], _kept(trainer))


def _objective_of_trial(
    trainer: Any,
    args: DopplerTrainingArguments,
    compute_objective: Callable[[dict[str, float]], float],
    *,
    running: RunningSearch,
) -> float:
    trainer.args, trainer._run = args, None
    try:
        trainer.train()
        return float(compute_objective(trainer.evaluate()))
    finally:
        run = trainer._run
        running.is_spent |= run is not None and run.ledger is not None and run.ledger.runs[-1].steps_reserved > 0


def copied_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Return copies of callbacks for a trial, without those that only show it."""
    return [copy.deepcopy(each) for each in callbacks if not is_console(each)]


# Arguments that say where a run is, and not what it is.
_OF_THE_PLACE: Final = frozenset({"output_dir", "run_name", "local_rank", "hub_token"})
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
