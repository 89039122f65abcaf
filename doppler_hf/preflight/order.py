"""The order of all checks before the first step, so that a mistake costs no ε.

Each function below is a moment in the life of a trainer, and its lines are the checks of that moment, in order. A check is a
function in the file of its subject. It raises an error or returns. If it has a remark but refuses nothing, it adds the
remark to `run.notes`, which are printed when the run starts.
"""

from typing import Any

from doppler_hf.preflight import (
    data,
    examples,
    launcher,
    loop,
    loss,
    model,
    own_step,
    records,
    rehearsal,
    saved_weights,
    signatures,
    trainer,
    values,
)
from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes import refuse_processes_that_draw_alone
from doppler_hf.training_args import DopplerTrainingArguments


def of_a_class(cls: type) -> None:
    """Check a class of trainers when it is defined."""
    trainer.refuse_other_bases(cls)


def before_the_trainer(args: DopplerTrainingArguments, *, model: Any, train_dataset: Any) -> None:
    """Check the arguments, model and data of a trainer, before Transformers uses them."""
    trainer.refuse_changed_arguments(args)
    if not args.disable_dp:
        trainer.refuse_wrapped_model(model)
        data.refuse_stream(train_dataset)


def of_the_trainer(of: Any) -> None:
    """Check a trainer right after it was made."""
    trainer.refuse_own_loss_of_batches(of)
    trainer.refuse_own_optimizer(of)
    trainer.refuse_model_in_parts(of)
    launcher.refuse_settings_of_the_launcher(of.args, of.accelerator)
    trainer.refuse_methods_without_effect(of)
    data.warn_of_training_data_in_evaluation(of)


def before_a_training(of: Any) -> None:
    """Check, when `train` is called, what may have changed since the trainer was made, and what its loop will call."""
    trainer.refuse_changed_arguments(of.args)
    launcher.refuse_autocast_around_training(of.args)
    launcher.refuse_settings_of_the_launcher(of.args, of.accelerator)
    trainer.refuse_own_loss_of_batches(of)
    trainer.refuse_attributes_without_effect(of)
    trainer.refuse_methods_without_effect(of)
    trainer.refuse_missing_callbacks(of)
    signatures.refuse_other_signatures(of)
    signatures.refuse_callbacks_of_other_signatures(of)


def before_an_evaluation(of: Any, evaluated: Any) -> None:
    """Check a data set that is given to `evaluate`."""
    data.warn_if_evaluated(of.train_dataset, evaluated)


def of_privacy_itself(of: Any, *, checkpoint: str | None) -> None:
    """Check, when `train` is called, that the run is private if, and only if, the trainer and the checkpoint are."""
    trainer.refuse_another_privacy(of, checkpoint=checkpoint)


def before_a_run(of: Any) -> None:
    """Check the data set from which the numbers of a run are computed."""
    data.refuse_a_run_without_data(of.args, of.train_dataset)
    model.refuse_torchao(of.model)


def of_the_data(run: PrivateRun, of: Any, *, dataset: Any, collator: Collator) -> None:
    """Check the rows that the collator will get."""
    data.refuse_own_generators(of.train_dataset, of.data_collator)
    data.refuse_another_dataset(run, of)
    values.refuse_out_of_range(of.model, dataset, collate=collator, has_own_loss=of.has_own_loss)
    records.note_records(run, of, dataset=dataset)


def of_the_loader(run: PrivateRun, loader: Any) -> None:
    """Check the loader before Transformers counts its steps."""
    run.refuse_another_loader(loader)


def before_the_engine(run: PrivateRun, of: Any) -> None:
    """Check processes and model, before the engine is attached to the model."""
    refuse_processes_that_draw_alone(of.args.world_size)
    run.bring_processes_together(of.model)
    trainer.refuse_weights_of_a_loss(of)
    trainer.note_methods_of_another_library(run, of)
    loss.refuse_ignored_labels(run, of)
    loss.refuse_truth_values(run, of)
    model.refuse_model(run, of)


def with_the_engine(run: PrivateRun, of: Any) -> None:
    """Check the loss and the engine's gradients of a few examples."""
    examples.check_examples(run, of)
    loss.refuse_another_loss(run, of)
    loss.note_factors_without_effect(run, of)


def of_an_optimizer(optimizer: Any) -> None:
    """Check the optimizer when it is made."""
    loop.refuse_another_optimizer(optimizer)


def before_the_first_step(run: PrivateRun, of: Any) -> None:
    """Check what the loop will do, now that model, optimizer and schedule are final."""
    loop.refuse_another_optimizer(of.optimizer.optimizer)
    loop.refuse_other_parameters(run, of)
    loop.refuse_another_schedule(of)
    loop.refuse_another_rate(run, of)
    loop.refuse_a_rate_that_never_arrives(run, of)
    own_step.refuse_another_step(run, of)
    if of.args.rehearse:
        saved_weights.refuse_unsaved_weights(run, of)
        saved_weights.note_another_model_when_loaded(run, of)
        rehearsal.rehearse(run, of)
