"""The common end of the training scripts: train, save, evaluate."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import Trainer


def train_and_evaluate(
    trainer: Trainer,
    eval_datasets: Mapping[str, Any],
    *,
    complete: Callable[[dict[str, float]], None] | None = None,
) -> None:
    """Train, save model and state, and evaluate. The metrics are printed, and saved beside the model.

    Args:
        trainer: The trainer; with `args.resume_from_checkpoint` it continues from there.
        eval_datasets: The data sets to evaluate on, by the prefix of their metrics' names.
        complete: A function that adds derived metrics to those of an evaluation.
    """
    train_result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    for prefix, dataset in eval_datasets.items():
        metrics = trainer.evaluate(dataset, metric_key_prefix=prefix)
        if complete is not None:
            complete(metrics)
        trainer.log_metrics(prefix, metrics)
        trainer.save_metrics(prefix, metrics)
