"""The training scripts: parse, build, train, save, evaluate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import Trainer

from doppler_hf.workloads.arguments import one_line_errors
from doppler_hf.workloads.recipe import Kind, build


def launch(
    trainer_class: type[Trainer],
    kind: Kind,
    *,
    argv: Sequence[str] | None = None,
    complete: Callable[[dict[str, float]], None] | None = None,
) -> None:
    """Train what a recipe and the flags after it describe, and leave model, state and metrics in its `output_dir`."""
    with one_line_errors():
        workload, training_args = build(kind, argv=argv)
    trainer = trainer_class(args=training_args, **workload.for_trainer())
    train_and_evaluate(trainer, workload.eval_datasets, complete=complete)


def train_and_evaluate(
    trainer: Trainer,
    eval_datasets: Mapping[str, Any],
    *,
    complete: Callable[[dict[str, float]], None] | None = None,
) -> None:
    """Train, save model and state, and evaluate. The metrics are printed, and saved beside the model.

    Data sets to evaluate on are by the prefix of their metrics' names, None for the trainer's own. `complete` adds derived
    metrics to those of an evaluation.
    """
    if trainer.args.do_train:
        train_result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", train_result.metrics)
        trainer.save_metrics("train", train_result.metrics)
    for prefix, dataset in eval_datasets.items() if trainer.args.do_eval else ():
        metrics = trainer.evaluate(dataset, metric_key_prefix=prefix)
        if complete is not None:
            complete(metrics)
        trainer.log_metrics(prefix, metrics)
        trainer.save_metrics(prefix, metrics)
