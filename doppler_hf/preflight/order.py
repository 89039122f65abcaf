"""The order of all checks before the first step, so that a mistake costs no ε.

Each function below is a moment in the life of a trainer, and its lines are the checks of that moment, in order. A check is a
function in the file of its subject. It raises an error or returns. If it has a remark but refuses nothing, it adds the
remark to `run.notes`, which are printed when the run starts.
"""

from collections.abc import Sequence
from typing import Any

from doppler_hf.preflight import (
    data,
    examples,
    launcher,
    loaded_adapters,
    loop,
    loss,
    model,
    own_step,
    records,
    rehearsal,
    rows_without_numbers,
    saved_weights,
    search,
    signatures,
    trainer,
    values,
)
from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes.processes import refuse_processes_that_draw_alone
from doppler_hf.training_args import DopplerTrainingArguments


def check_class(cls: type, *, ours: type) -> None:
    """Check a class of trainers when it is defined; `ours` is `DopplerTrainer`."""
    trainer.refuse_other_bases(cls, ours=ours)


def check_before_trainer(args: DopplerTrainingArguments, *, model: Any, train_dataset: Any) -> None:
    """Check the arguments, model and data of a trainer, before Transformers uses them."""
    trainer.refuse_changed_arguments(args)
    if not args.disable_dp:
        trainer.refuse_wrapped_model(model)
        data.refuse_stream(train_dataset)


def check_new_trainer(private_trainer: Any) -> None:
    """Check a trainer right after it was made."""
    trainer.refuse_own_loss_of_batches(private_trainer)
    trainer.refuse_own_optimizer(private_trainer)
    trainer.refuse_model_in_parts(private_trainer)
    launcher.refuse_settings_of_the_launcher(private_trainer.args, private_trainer.accelerator)
    trainer.refuse_methods_without_effect(private_trainer)
    trainer.refuse_generation_without_effect(private_trainer)
    data.refuse_evaluation_data(private_trainer)
    data.warn_of_training_data_in_evaluation(private_trainer)


def check_before_training(private_trainer: Any) -> None:
    """Check, when `train` is called, what may have changed since the trainer was made, and what its loop will call."""
    trainer.refuse_changed_arguments(private_trainer.args)
    launcher.refuse_autocast_around_training(private_trainer.args)
    launcher.refuse_settings_of_the_launcher(private_trainer.args, private_trainer.accelerator)
    trainer.refuse_own_loss_of_batches(private_trainer)
    trainer.refuse_attributes_without_effect(private_trainer)
    trainer.refuse_methods_without_effect(private_trainer)
    trainer.refuse_checkpointing_without_method(private_trainer)
    trainer.refuse_missing_callbacks(private_trainer)
    trainer.refuse_early_stopping_without_evaluations(private_trainer)
    trainer.refuse_generation_without_effect(private_trainer)
    data.refuse_evaluation_data(private_trainer)
    data.warn_of_training_data_in_evaluation(private_trainer)
    records.refuse_metrics_of_no_users(private_trainer)
    signatures.refuse_other_signatures(private_trainer)
    signatures.refuse_callbacks_of_other_signatures(private_trainer)


def check_training(private_trainer: Any) -> None:
    """Check a call of `train`."""
    search.refuse_training_after_search(private_trainer)
    check_before_training(private_trainer)


def check_begun(private_trainer: Any) -> None:
    """Check what callbacks have done when the run began, such as watching gradients, before the ledger is opened."""
    model.refuse_hooks_of_gradients(private_trainer.model)


def check_search(private_trainer: Any, *, hp_space: Any, n_trials: Any, direction: Any, others: dict[str, Any]) -> None:
    """Check a call of `hyperparameter_search`, of which `others` are the arguments that have no use here."""
    search.refuse_other_backends(others)
    search.refuse_another_direction(direction)
    search.refuse_number_of_trials(n_trials)
    search.refuse_without_target(private_trainer.args)
    search.refuse_several_processes(private_trainer.args)
    search.refuse_reports(private_trainer)
    search.refuse_other_model(private_trainer)
    search.refuse_evaluation_of_training_data(private_trainer)
    search.refuse_space(private_trainer.args, hp_space)
    check_before_training(private_trainer)


def check_objective(private_trainer: Any, compute_objective: Any) -> None:
    """Compute the objective of the untrained model, which costs no ε, before a search begins."""
    search.refuse_no_number(private_trainer, compute_objective)


def check_trials(private_trainer: Any, *, hp_space: Any, plan: Any, trial: Any) -> None:
    """Check the plans of trials, now that the search has divided its budget."""
    search.refuse_trials(private_trainer, hp_space, plan=plan, trial=trial)


def check_callbacks(private_trainer: Any) -> None:
    """Check callbacks that were added during the run."""
    signatures.refuse_callbacks_of_other_signatures(private_trainer)


def check_before_evaluation(private_trainer: Any, evaluated: Any, *, name: str) -> None:
    """Check a data set that is given to `evaluate` or `predict`."""
    data.warn_if_evaluated(private_trainer.train_dataset, evaluated, name=name)
    if name == "eval_dataset":  # an attack may predict copies of training rows on purpose
        records.warn_of_copies(private_trainer, evaluated)


def check_beginning(private_trainer: Any, *, checkpoint: str | None) -> None:
    """Check, when the training loop is entered, if this model and checkpoint may be trained in this way."""
    trainer.refuse_another_privacy(private_trainer, checkpoint=checkpoint)
    trainer.refuse_a_model_in_a_run(private_trainer)
    trainer.refuse_weights_trained_openly(private_trainer)


def check_before_run(private_trainer: Any) -> None:
    """Check the data set from which the numbers of a run are computed."""
    data.refuse_a_run_without_data(private_trainer.args, private_trainer.train_dataset)
    model.refuse_torchao(private_trainer.model)


def check_columns(private_trainer: Any, dataset: Any, *, taken: Sequence[str] | None, description: str | None) -> None:
    """Check the columns of a data set before Transformers removes those that the model does not take."""
    data.refuse_without_inputs(dataset, taken or (), labels=private_trainer.label_names or (), description=description)


def check_data(run: PrivateRun, private_trainer: Any, *, dataset: Any, collator: Collator) -> None:
    """Check the rows that the collator will get."""
    data.refuse_own_generators(private_trainer.train_dataset, private_trainer.data_collator)
    data.refuse_another_dataset(run, private_trainer)
    values.refuse_out_of_range(
        private_trainer.model,
        dataset,
        collate=collator,
        has_own_loss=private_trainer.has_own_loss,
        label_names=private_trainer.label_names or (),
    )
    values.refuse_uncollated(dataset, collate=collator)
    records.note_records(run, private_trainer, dataset=dataset)


def check_loader(run: PrivateRun, loader: Any) -> None:
    """Check the loader before Transformers counts its steps."""
    run.refuse_another_loader(loader)


def check_before_engine(run: PrivateRun, private_trainer: Any) -> None:
    """Check processes and model, before the engine is attached to the model."""
    refuse_processes_that_draw_alone(private_trainer.args.world_size)
    run.bring_processes_together(private_trainer.model)
    trainer.refuse_weights_of_a_loss(private_trainer)
    trainer.note_methods_of_another_library(run, private_trainer)
    loss.refuse_ignored_labels(run, private_trainer)
    loss.refuse_truth_values(run, private_trainer)
    loss.note_other_number_of_classes(run, private_trainer)
    model.refuse_model(run, private_trainer)


def check_with_engine(run: PrivateRun, private_trainer: Any) -> None:
    """Check the loss and the engine's gradients of a few examples."""
    examples.check_examples(run, private_trainer)
    rows_without_numbers.refuse_rows_without_numbers(run, private_trainer)
    loss.refuse_failing_rows(run, private_trainer)
    loss.refuse_another_loss(run, private_trainer)
    loss.note_factors_without_effect(run, private_trainer)
    records.note_equal_views(run, private_trainer)


def check_optimizer(optimizer: Any) -> None:
    """Check the optimizer when it is made."""
    loop.refuse_another_optimizer(optimizer)


def check_before_first_step(run: PrivateRun, private_trainer: Any) -> None:
    """Check what the loop will do, now that model, optimizer and schedule are final."""
    loop.refuse_another_optimizer(private_trainer.optimizer.optimizer)
    loop.refuse_optimizer_of_other_parameters(private_trainer)
    loop.refuse_another_schedule(private_trainer)
    loop.refuse_another_rate(run, private_trainer)
    loop.refuse_vanishing_learning_rate(run, private_trainer)
    own_step.refuse_other_batches(run, private_trainer)
    own_step.refuse_another_step(run, private_trainer)
    own_step.refuse_counts_that_fail(run, private_trainer)
    saved_weights.note_another_base(run, private_trainer)
    if private_trainer.args.rehearse:
        saved_weights.refuse_unsaved_weights(run, private_trainer)
        loaded_adapters.refuse_adapters_that_load_differently(private_trainer)
        saved_weights.note_another_model_when_loaded(run, private_trainer)
        rehearsal.rehearse(run, private_trainer)
