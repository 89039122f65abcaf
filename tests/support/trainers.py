"""A tiny private run, and what watches it.

The checks before the first step are off here, which a user has on: they take a third of such a run, and most tests are about
what comes after them. `checked_trainer_of` has them, for tests of the checks, of models, collators and losses, and of whole
trainings as a user starts them; scripts, recipes, processes and the README's examples have them too.
"""

import functools
import os

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import TrainerCallback

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.privacy.ledger.ledger import LEDGER_NAME
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert

# DOPPLER_TEST_DEVICE=cuda runs the trainings of `tests/run` and `tests/end_to_end` on a GPU, but for those that need several
# processes.
ON_CPU = os.environ.get("DOPPLER_TEST_DEVICE", "cpu") == "cpu"
assert ON_CPU or torch.cuda.is_available(), "DOPPLER_TEST_DEVICE=cuda needs a device"
# By how much two equal trainings may differ: on a CPU not in the last bit. Sums on a GPU have no fixed order.
OF_ORDER = 0.0 if ON_CPU else 1e-4
on_cpu = pytest.mark.skipif(not ON_CPU, reason="the last bits of two trainings differ on a GPU")


def arguments(tmp_path, **overrides):
    defaults = dict(
        output_dir=str(tmp_path / "out"), noise_multiplier=1.0, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-2, save_strategy="no", report_to="none",
        disable_tqdm=True, logging_steps=1, use_cpu=ON_CPU,
        # Without privacy these must be left as they are.
        grad_sample_self_check="disable_dp" in overrides, plot_training_curve="disable_dp" in overrides,
    )  # fmt: skip
    return DopplerTrainingArguments(**(defaults | overrides))


def trainer_of(
    tmp_path, *, model=None, cls=DopplerTrainer, data=None, evaluated=None, collator=pad, callbacks=None,
    compute_metrics=None, processing_class=None, **overrides,
):  # fmt: skip
    # Without evaluations there is no evaluation set, because it would be tried before the first step.
    if evaluated is None and (compute_metrics is not None or "eval_strategy" in overrides):
        evaluated = text_data(8, seed=1)
    return cls(
        model=tiny_bert() if model is None else model,
        args=arguments(tmp_path, **overrides),
        train_dataset=text_data() if data is None else data,
        eval_dataset=evaluated,
        data_collator=collator,
        callbacks=callbacks,
        compute_metrics=compute_metrics,
        processing_class=processing_class,
    )


def checked_trainer_of(tmp_path, **options):
    return trainer_of(tmp_path, **{"grad_sample_self_check": True} | options)


def trained(trainer):
    """Train, and return the trainer."""
    trainer.train()
    return trainer


class On(TrainerCallback):
    """Calls functions at Transformers' events, by the names of what they take: `On(step_end=lambda state, **_: ...)`."""

    def __init__(self, **functions):
        for event, function in functions.items():
            setattr(self, f"on_{event}", functools.partial(self._call, function))

    def _call(self, function, args, state, control, **more):
        function(args=args, state=state, control=control, **more)


def at(step, function):
    """Return a function for `On` that is called at one step alone."""
    return lambda state, **more: function(state=state, **more) if state.global_step == step else None


def interrupt(**_):
    raise KeyboardInterrupt


class Recorder(TrainerCallback):
    """Keeps every private gradient, flattened, as the optimizer sees it."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
        self.gradients.append(torch.cat([each.flatten() for each in whole]).double().cpu())


class Sees(DopplerTrainer):
    """Keeps the texts that it has trained on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def compute_per_sample_loss(self, model, inputs):
        self.seen += [tuple(row[row != 0].tolist()) for row in inputs["input_ids"]]
        return super().compute_per_sample_loss(model, inputs)


def interrupted(tmp_path, *, within="step_begin", **options):
    """Train 6 steps of one round, which go on after 4 or, within an optimizer's step, 5; a checkpoint every 2."""
    terms = dict(noise_multiplier=None, target_epsilon=8.0, max_steps=6, save_strategy="steps", save_steps=2) | options
    # 48 records and batches of 8: a round has 6 steps.
    trainer = trainer_of(tmp_path, data=text_data(48), cls=Sees, callbacks=[On(**{within: at(4, interrupt)})], **terms)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer, trainer_of(tmp_path, data=text_data(48), cls=Sees, **terms)


def changing(change, *, of=DopplerTrainer):
    """Return a trainer whose losses are those of another one, changed; `change` takes them and the inputs."""

    class Changing(of):
        def compute_per_sample_loss(self, model, inputs):
            return change(super().compute_per_sample_loss(model, dict(inputs)), inputs)

    return Changing


# Every per-example gradient is next to zero, so that `p.grad` is the bare noise.
NoSignal = changing(lambda losses, inputs: 1e-12 * losses)
# Each loss is weighted by its share of the batch's tokens, without a gradient into other rows.
TokenMean = changing(lambda losses, inputs: losses * inputs["attention_mask"].sum(dim=1) / inputs["attention_mask"].sum())


class OfLogits(DopplerTrainer):
    """Trains a module of one's own that returns logits, and has no loss."""

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs), labels, reduction="none")


def refused_training(tmp_path, code, *, match=None, **options):
    """Train with all checks, expect this refusal before the first step, and return its message."""
    trainer = checked_trainer_of(tmp_path, **options)
    with refused(code, match=match) as refusal:
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    return str(refusal.value)


def assert_trained_alike(found, expected):
    """Assert that two trainers' models have the same weights."""
    torch.testing.assert_close(weights(found), weights(expected), rtol=OF_ORDER, atol=OF_ORDER)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).cpu()
