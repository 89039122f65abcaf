"""Checks of a hyperparameter search, before any ε is spent."""

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from transformers import EarlyStoppingCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from doppler_hf.errors import Refusal
from doppler_hf.filters.noise_shape import NoiseShape
from doppler_hf.preflight.loop import refuse_vanishing_rates
from doppler_hf.preflight.records import has_copies_in, shares_users
from doppler_hf.privacy import AllocationSampler, PrivacyStatement
from doppler_hf.privacy.accounting.selection import NumberOfTrials
from doppler_hf.privacy.batching.shared_rows import training_rows_in
from doppler_hf.privacy.ledger.record import search_continued
from doppler_hf.run.own_code import overrides
from doppler_hf.run.planning.filter_and_noise import learning_rates_of
from doppler_hf.run.planning.learning_rate import (
    VERY_FAR,
    check_given_learning_rate,
    check_rate_of_0,
    has_automatic_rate,
    is_any_rate_allowed,
    learning_rate_for,
    trained_weights,
)
from doppler_hf.run.planning.plan import Trial, planned_batch_size, planned_steps
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.search.search import copied_callbacks
from doppler_hf.run.search.search_space import Draw, arguments_of_trial, drawn_settings
from doppler_hf.training_args import DopplerTrainingArguments

_REHEARSED: Final = 100  # settings that are drawn and checked before the search
_CLOSE: Final = 3.0  # The learning rates of estimated plans were within a factor of 2.4 of those of the plans.


def refuse_other_backends(others: dict[str, Any]) -> None:
    """Refuse a backend with its options: such a search chooses later trials by the results of earlier ones."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise Refusal(
            "search-backend",
            f"hyperparameter_search got {', '.join(given)}, which a private run cannot use. The settings of a trial must "
            "not depend on the results of others, and only the best trial is kept. Leave out "
            f"{', '.join(given)}: settings are then drawn at random, without Optuna or another library.",
        )


def refuse_another_direction(direction: Any) -> None:
    """Refuse several objectives, and words that are no direction."""
    if direction not in ("minimize", "maximize"):
        raise Refusal(
            "search-direction",
            f'Expected direction="minimize" or direction="maximize"; got {direction!r}. A private search publishes one '
            "trial, so it has one objective.",
        )


def refuse_number_of_trials(n_trials: Any) -> None:
    """Refuse a number of trials that is none, or too small or large."""
    if isinstance(n_trials, bool) or not isinstance(n_trials, int | float):
        raise Refusal(
            "out-of-range",
            f"Expected n_trials to be a number; got {n_trials!r}. It is the expected number of trials, such as 10.",
        )
    _ = NumberOfTrials(float(n_trials)).parameter


def refuse_without_target(args: DopplerTrainingArguments) -> None:
    """Refuse arguments without a target, or with reproducible noise."""
    if args.target_epsilon is None:
        raise Refusal(
            "search-without-target",
            "A search needs target_epsilon, from which the noise of each trial is computed. Set target_epsilon and leave "
            "out noise_multiplier.",
        )
    if args.noise_seed is not None:
        raise Refusal(
            "search-with-seed",
            "A search cannot use noise_seed: whoever knows it can reproduce the noise, and so find out the number of "
            "trials, which has to stay secret. Leave out noise_seed.",
        )


def refuse_several_processes(args: DopplerTrainingArguments) -> None:
    """Refuse several processes, which would each toss coins for further trials."""
    if args.world_size > 1:
        raise Refusal(
            "search-processes",
            f"A private search runs in one process; this run has {args.world_size}. Start the script with `python`, without "
            "torchrun or accelerate launch.",
        )


def refuse_reports(trainer: Any) -> None:
    """Refuse whatever publishes trials: their number is secret, and only the best of them is covered by ε."""
    trackers = tuple(INTEGRATION_TO_CALLBACK.values())
    found = [type(each).__name__ for each in trainer.callback_handler.callbacks if isinstance(each, trackers)]
    if found or trainer.args.push_to_hub or trainer.args.report_train_loss == "raw":
        what = "push_to_hub=True" if trainer.args.push_to_hub else 'report_train_loss="raw"'
        what, mend = (f"{found[0]}", 'Set report_to="none"') if found else (what, f"Leave out {what}")
        raise Refusal(
            "search-reports",
            f"{what} would publish something of every trial, but ε allows you to publish only the best one, and their "
            f"number has to stay secret. {mend}. After the search you can publish the best model.",
        )
    try:
        copied_callbacks(trainer.callback_handler.callbacks)
    except Exception as error:
        raise Refusal(
            "search-callbacks",
            f"A callback of the trainer cannot be copied ({type(error).__name__}: {error}). Each trial gets copies of the "
            "callbacks, so that none depends on another trial. Remove the callback with trainer.remove_callback, or define "
            "its __deepcopy__.",
        ) from error


def refuse_other_model(trainer: Any) -> None:
    """Refuse a search without `model_init`, or with one that returns the same model again."""
    if trainer.model_init is None:
        taken = inspect.signature(type(trainer).__init__).parameters.values()
        if not any(each.name == "model_init" or each.kind is each.VAR_KEYWORD for each in taken):
            raise Refusal(
                "search-takes-no-model-init",
                f"Each trial of a search begins with a new model, but {type(trainer).__name__} takes no model_init, so it "
                "cannot search. Search with DopplerTrainer on tokenized data, or choose the settings on public data.",
            )
        raise Refusal(
            "search-without-model-init",
            "Each trial of a search begins with a new model. Give the trainer a function that makes it, as "
            "DopplerTrainer(model_init=…, args=…), in place of model.",
        )
    first, second = trainer.call_model_init(), trainer.call_model_init()
    known = _places_of_tensors(first)
    # Privacy: each trial has the same distribution, whatever trials came before it. What one trial has written into a
    # weight, a running statistic or a table that grows with the longest record must not be there when another one begins.
    shared = [name for place, name in _places_of_tensors(second).items() if place in known]
    if shared:
        raise Refusal(
            "search-same-model",
            f"Two calls of model_init returned models that share the memory of {shared[0]!r}, so a trial would begin with "
            "what another trial has written there. Make or load the whole model inside model_init, and copy what you put "
            "into it, such as {name: value.clone() for name, value in weights.items()}.",
        )


def _places_of_tensors(model: nn.Module) -> dict[int, str]:
    """Return the address of the memory of each tensor of a model, also of plain attributes, and the tensor's name."""
    attributes = (
        (f"{module_name}.{name}".lstrip("."), value)
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    )
    # The memory is compared, not the object: load_state_dict(assign=True) makes new parameters of the same memory.
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False), *attributes)
    places = ((name, value.untyped_storage().data_ptr()) for name, value in named if not value.is_meta)
    return {place: name for name, place in places if place}


def refuse_evaluation_of_training_data(trainer: Any) -> None:
    """Refuse a search without evaluation data, or with rows of the training data among them."""
    if trainer.eval_dataset is None:
        raise Refusal(
            "search-without-evaluation",
            "A search compares its trials by their metrics on eval_dataset, and the trainer has none. Give it other "
            "people's records than those of train_dataset.",
        )
    if training_rows_in(trainer.train_dataset, trainer.eval_dataset):
        raise Refusal(
            "search-on-training-data",
            "eval_dataset has rows of train_dataset, so the choice of the best trial would depend on them without noise. "
            "Evaluate on other records, for example on split['test'] of a split whose split['train'] is train_dataset.",
        )
    # Sensitivity: the choice of the best trial reads the evaluation data without noise.
    if has_copies_in(trainer.train_dataset, trainer.eval_dataset):
        raise Refusal(
            "search-on-copies",
            "Many rows of eval_dataset seem to be copies of rows of train_dataset, so the choice of the best trial would "
            "depend on training records without noise. Evaluate on other records.",
        )
    unit = trainer.args.privacy_unit_column
    if unit is not None and shares_users(trainer.train_dataset, trainer.eval_dataset, column=unit):
        raise Refusal(
            "search-on-users",
            f"Some users (column {unit!r}) are in train_dataset and in eval_dataset, so the choice of the best trial would "
            "depend on their rows without noise. Split the data by users, so that no user is in both.",
        )


def refuse_training_after_search(trainer: Any) -> None:
    """Refuse to train after a search, before Transformers replaces the best model by a new one of `model_init`."""
    ledger = None if trainer._run is None else trainer._run.ledger
    if ledger is not None and ledger.statement.search is not None:
        raise search_continued()


def refuse_space(args: DopplerTrainingArguments, hp_space: Callable[[Any], Any] | None) -> None:
    """Refuse settings that a trial could not have: draw some, and make arguments of them."""
    if not callable(hp_space):
        raise Refusal(
            "search-space",
            f"Expected hp_space to be a function; got {type(hp_space).__name__}. Pass a function that draws the settings of "
            'a trial, such as lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)}.',
        )
    for _ in range(_REHEARSED):
        draw = Draw()
        settings = drawn_settings(hp_space, draw)
        arguments_of_trial(args, settings)
        # Privacy: the theorem needs settings that are drawn from the same distribution for each trial. If they were counted
        # off, or drawn with a known seed, the published settings would tell which trial it was, and so how many there were.
        if drawn_settings(hp_space, draw) != settings:
            raise Refusal(
                "search-space",
                "hp_space returned other settings although trial drew the same numbers, so it has random numbers of its "
                "own, or counts its calls. The published settings could then tell the number of trials, which has to stay "
                "secret. Draw all settings with trial.suggest_float, trial.suggest_int and trial.suggest_categorical.",
            )


def refuse_trials(trainer: Any, hp_space: Callable[[Any], Any], *, plan: PrivacyStatement, trial: Trial) -> None:
    """Refuse settings that a trial would refuse when it begins: draw some, and make a plan for each.

    A trial that is refused during a search is the worst one, and nobody is told of it. The noise of a plan is estimated from
    the `plan` with the trainer's own arguments. It is computed only for the two learning rates that are farthest off.
    """
    weights, ratios = trained_weights(trainer.model), []
    for _ in range(_REHEARSED):
        settings = drawn_settings(hp_space)
        args = arguments_of_trial(trainer.args, settings)
        with _refused_for(settings):
            _refuse_epochs_without_effect(args, settings)
            check_rate_of_0(args)
            estimated = _estimated_plan(plan, args)
            steps = estimated.steps_planned
            rates = learning_rates_of(args, steps=steps)
            if not overrides(trainer, "create_scheduler"):
                refuse_vanishing_rates(rates or [], args, steps=steps)
            if args.learning_rate and has_automatic_rate(args) and not is_any_rate_allowed(args):
                rule = learning_rate_for(weights, args, estimated, rates=rates)
                ratios.append((args.learning_rate / rule, settings, args))
    by_ratio = operator.itemgetter(0)
    for ratio, settings, args in [min(ratios, key=by_ratio), max(ratios, key=by_ratio)] if ratios else []:
        if not _CLOSE / VERY_FAR < ratio < VERY_FAR / _CLOSE:
            with _refused_for(settings):
                number = trainer.get_num_trainable_parameters()
                run = PrivateRun(args, trainer.train_dataset, num_trained=number, trial=trial)
                check_given_learning_rate(args, run.statement, model=trainer.model)


@contextmanager
def _refused_for(settings: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Refusal as error:
        raise Refusal(
            error.code, f"hp_space drew settings with which a trial would be refused ({settings}): {error}"
        ) from error
    except Exception as error:  # Transformers has several kinds of errors for schedules without their arguments
        raise Refusal(
            "search-setting-fails",
            f"hp_space drew settings with which a trial would fail ({settings}): {type(error).__name__}: {error}",
        ) from error


def _refuse_epochs_without_effect(args: DopplerTrainingArguments, settings: dict[str, Any]) -> None:
    if "num_train_epochs" in settings and args.max_steps > 0:
        raise Refusal(
            "no-effect",
            f"num_train_epochs has no effect with max_steps={args.max_steps}. Set max_steps=-1, or let hp_space choose "
            "max_steps in place of num_train_epochs.",
        )


def _estimated_plan(plan: PrivacyStatement, args: DopplerTrainingArguments) -> PrivacyStatement:
    """Return the plan of a trial with these arguments, without the calibration of its noise, which takes seconds."""
    sampler = AllocationSampler(
        num_examples=plan.num_units,
        expected_batch_size=planned_batch_size(args),
        units=None if args.privacy_unit_column is None else np.arange(plan.num_units),
        sampling=args.sampling,
    )
    if args.noise_shape != "auto":
        sampler.take_turns(NoiseShape.parse(args.noise_shape).bands)
    steps = planned_steps(args, sampler, groups=sampler.groups)
    # T steps are about as private as a single release of q·√(T·(e^(1/σ²) − 1)) with noise of size 1 (Bu et al. 2020,
    # https://arxiv.org/abs/1911.11607). Privacy: nothing is released with this σ.
    release = plan.sample_rate**2 * plan.steps_planned * math.expm1(min(plan.noise_multiplier**-2, 500.0))
    return replace(
        plan,
        noise_shape=plan.noise_shape if args.noise_shape == "auto" else args.noise_shape,
        noise_multiplier=math.log1p(release / (sampler.sample_rate**2 * steps)) ** -0.5,
        per_sample_max_grad_norm=args.per_sample_max_grad_norm,
        expected_batch_size=sampler.expected_batch_size,
        sample_rate=sampler.sample_rate,
        steps_planned=steps,
    )


def refuse_no_number(trainer: Any, compute_objective: Callable[[dict[str, float]], float]) -> None:
    """Evaluate the untrained model, and refuse an objective that is no number."""
    handler = trainer.callback_handler
    callbacks = handler.callbacks
    # Nothing is stopped early here. A callback that cannot do so says it in words when a trial begins, and fails here.
    handler.callbacks = [each for each in callbacks if not isinstance(each, EarlyStoppingCallback)]
    try:
        metrics = trainer.evaluate()
    finally:
        handler.callbacks = callbacks
    try:
        value = float(compute_objective(dict(metrics)))
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(
            "search-objective",
            f"compute_objective failed on the metrics of the untrained model ({type(error).__name__}: {error}). Return a "
            f"number that it computes from these metrics: {', '.join(sorted(metrics))}.",
        ) from error
    if math.isnan(value):
        raise Refusal(
            "search-objective",
            f"The objective of the untrained model is not a number. The metrics are {metrics}. Return one of them from "
            "compute_objective.",
        )
