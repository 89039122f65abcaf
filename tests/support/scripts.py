"""A training script without its training: what it has made of its flags."""

from types import SimpleNamespace
from unittest import mock

from doppler_hf import DopplerTrainer


def made_by(script, *flags):
    """Return the trainer of a script, and the data sets that it evaluates on, by the prefix of their metrics."""
    trainers, evaluated = [], {}

    def train(trainer, **options):
        trainers.append(trainer)
        return SimpleNamespace(metrics={})

    def evaluate(trainer, rows=None, metric_key_prefix="eval"):
        evaluated[metric_key_prefix] = trainer.eval_dataset if rows is None else rows
        return {f"{metric_key_prefix}_loss": 0.0}

    def nothing(trainer, *args):
        pass

    writing = dict.fromkeys(("save_model", "save_state", "log_metrics", "save_metrics"), nothing)
    with mock.patch.multiple(DopplerTrainer, train=train, evaluate=evaluate, **writing):
        script.main([*flags])
    (trainer,) = trainers
    return trainer, evaluated
