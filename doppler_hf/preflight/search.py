"""Checks of a hyperparameter search, before any ε is spent."""

import math
from collections.abc import Callable
from typing import Any, Final

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from doppler_hf.errors import Refusal
from doppler_hf.preflight.records import has_copies_in, shares_users
from doppler_hf.run.published_results import training_rows_in
from doppler_hf.run.search import arguments_of_trial, copied_callbacks, drawn_settings
from doppler_hf.training_args import DopplerTrainingArguments

_REHEARSED: Final = 100  # settings that are drawn and checked before the search


def refuse_other_backends(others: dict[str, Any]) -> None:
    """Refuse a backend with its options: such a search chooses later trials by the results of earlier ones."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise Refusal(
            "search-backend",
            f"hyperparameter_search got {', '.join(given)}, which a private run cannot use. The settings of a trial must "
            "not depend on the results of others, and the trials themselves are not kept. Leave out "
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
            "With noise_seed the noise can be reproduced, but the number of trials is secret. Leave out noise_seed.",
        )


def refuse_several_processes(args: DopplerTrainingArguments) -> None:
    """Refuse several processes, which would each draw a number of trials."""
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
            f"{what} would publish something of every trial, but ε covers only the best one, and the number of trials has "
            f"to stay secret. {mend}. After the search you can publish the best model.",
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
        raise Refusal(
            "search-without-model-init",
            "Each trial of a search begins with a new model. Give the trainer a function that makes it, as "
            "DopplerTrainer(model_init=…, args=…), in place of model.",
        )
    first, second = trainer.call_model_init(), trainer.call_model_init()
    known = {id(each) for each in first.parameters()}
    if any(id(each) in known for each in second.parameters()):
        raise Refusal(
            "search-same-model",
            "Two calls of model_init returned the same model, so a trial would go on with the weights of another trial. "
            "Make or load the model inside model_init.",
        )


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


def refuse_space(args: DopplerTrainingArguments, hp_space: Callable[[Any], Any] | None) -> None:
    """Refuse settings that a trial could not have: draw some, and make arguments of them."""
    if not callable(hp_space):
        raise Refusal(
            "search-space",
            f"Expected hp_space to be a function; got {type(hp_space).__name__}. Pass a function that draws the settings of "
            'a trial, such as lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)}.',
        )
    for _ in range(_REHEARSED):
        arguments_of_trial(args, drawn_settings(hp_space))


def refuse_no_number(trainer: Any, compute_objective: Callable[[dict[str, float]], float]) -> None:
    """Evaluate the untrained model, and refuse an objective that is no number."""
    metrics = trainer.evaluate()
    try:
        value = float(compute_objective(dict(metrics)))
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
