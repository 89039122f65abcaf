"""Methods and attributes that were set on a trainer, or on Transformers' class, and would have no effect."""

import re
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from doppler_hf import DopplerTrainer
from doppler_hf.errors import page
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import OfLogits, arguments, checked_trainer_of, trained, trainer_of
from tests.support.unspent import assert_unspent, refusal_unspent

GUIDE = Path(__file__).parents[2] / "docs/guides/own-loss.md"


def own(self, *args, **kwargs):
    raise AssertionError("it has no effect")


class OfStock(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Mixed(DopplerTrainer, OfStock):
    """Python finds DopplerTrainer's step first."""


HAVE_NO_EFFECT = ["compute_loss", "_get_train_sampler", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"]
ARE_REPLACED = ["training_step", "get_train_dataloader", "get_batch_samples", "create_optimizer"]


@pytest.mark.parametrize("name", HAVE_NO_EFFECT)
def test_a_method_without_effect_is_refused_wherever_it_is_set(tmp_path, monkeypatch, name):
    trainer = trainer_of(tmp_path)
    setattr(trainer, name, types.MethodType(own, trainer))
    assert refusal_unspent(trainer, "method-without-effect").startswith(f"trainer.{name} has no effect")
    delattr(trainer, name)
    with monkeypatch.context() as patch:
        patch.setattr(DopplerTrainer, name, own)
        refusal_unspent(trainer, "method-without-effect")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, name, own)
        assert refusal_unspent(trainer, "method-without-effect").startswith(f"Trainer.{name} has no effect")
        with pytest.raises(ValueError, match="has no effect"):
            trainer_of(tmp_path)
    trained(trainer)


def test_a_sampler_for_rare_classes_is_refused_with_the_weights_that_take_its_place(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer._get_train_sampler = types.MethodType(own, trainer)
    message = refusal_unspent(trainer, "method-without-effect")
    assert page("guides/own-loss", "imbalanced-classes") in message
    assert "\n## Imbalanced classes" in GUIDE.read_text()


@pytest.mark.parametrize("name", ARE_REPLACED)
def test_a_method_of_transformers_class_that_ours_hides_is_refused(tmp_path, monkeypatch, name):
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(Trainer, name, own)
    assert f"Trainer.{name} has no effect" in refusal_unspent(trainer, "method-without-effect")


def test_a_method_of_a_stock_trainer_behind_ours_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"OfStock\.training_step has no effect in a private run"):
        trainer_of(tmp_path, cls=Mixed)
    without = dict(noise_multiplier=None, disable_dp=True)
    assert trained(trainer_of(tmp_path, cls=Mixed, max_steps=1, **without)).state.global_step == 1


def flipped(model, inputs):
    """The loss of the other class."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return F.cross_entropy(logits, 1 - inputs["labels"], reduction="none")


@pytest.mark.parametrize("how", ["plain", "bound", "on the class"])
def test_a_loss_of_each_example_that_is_set_on_the_trainer_is_trained(tmp_path, monkeypatch, how):
    """As one of a subclass, in evaluations too."""
    options = dict(noise_multiplier=0.0, max_steps=40, learning_rate=2e-2, data=text_data(64), grad_sample_self_check=True)
    trainer = trainer_of(tmp_path, **options)
    bound = lambda self, model, inputs: flipped(model, inputs)  # noqa: E731
    if how == "plain":
        trainer.compute_per_sample_loss = flipped
    elif how == "bound":
        trainer.compute_per_sample_loss = types.MethodType(bound, trainer)
    else:
        monkeypatch.setattr(DopplerTrainer, "compute_per_sample_loss", bound)
    assert trainer.has_own_loss
    trained(trainer)
    others = [*text_data(64, seed=1)]
    batch = pad(others)
    with torch.no_grad():
        of_other, of_label = (
            F.cross_entropy(trainer.model.eval()(batch["input_ids"], batch["attention_mask"]).logits, labels)
            for labels in (1 - batch["labels"], batch["labels"])
        )
    assert of_other < of_label
    assert trainer.evaluate(others)["eval_loss"] == pytest.approx(float(of_other), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("label_smoother", LabelSmoother(0.1), "attribute-without-effect"),
        ("neftune_noise_alpha", 5.0, "attribute-without-effect"),
        ("optimizer_cls_and_kwargs", (torch.optim.SGD, {"lr": 1.0}), "attribute-without-effect"),
    ],
)
def test_attributes_that_are_set_later_are_refused(tmp_path, name, value, code):
    trainer = trainer_of(tmp_path)
    setattr(trainer, name, value)
    assert name in refusal_unspent(trainer, code)


def test_what_else_is_set_later_is_refused_before_a_step(tmp_path):
    def loader(trainer):
        return torch.utils.data.DataLoader(trainer.train_dataset, batch_size=3, collate_fn=pad)

    def made(trainer):
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        return trainer.optimizer

    cases = {
        "compute_loss_func": (lambda *args, **kwargs: None, "sees the whole batch"),
        "get_train_dataloader": (loader, "returned a different loader"),
        "create_optimizer": (made, "Expected a DopplerOptimizer from create_optimizer"),
    }
    for name, (function, words) in cases.items():
        for options in (dict(max_steps=2), dict(max_steps=-1, num_train_epochs=1)):
            trainer = trainer_of(tmp_path, **options)
            is_method = name != "compute_loss_func"
            setattr(trainer, name, types.MethodType(function, trainer) if is_method else function)
            with pytest.raises(ValueError, match=words):
                trainer.train()
            assert_unspent(trainer)


def test_methods_that_do_no_harm_may_be_set(tmp_path):
    trainer, logged = trainer_of(tmp_path, max_steps=2), []
    trainer.log = lambda logs, start_time=None: logged.append(logs)
    made = trainer.get_train_dataloader
    trainer.get_train_dataloader = lambda: made()
    trained(trainer)
    assert len(logged) == 3
    assert trainer.privacy.ledger.steps_run == 2


def test_a_trainer_as_it_is_has_nothing_of_its_own(tmp_path):
    trainer = DopplerTrainer(tiny_bert(), arguments(tmp_path, max_steps=1), pad, text_data())
    assert not trainer.has_own_loss
    trained(trainer)


def test_a_compiled_model_is_refused_before_its_columns_are_read(tmp_path):
    """The forward of such a model takes any name, so that Transformers would leave out all columns."""
    model = torch.compile(tiny_bert(), backend="eager")
    with refused("compiled-module", match="^The model is compiled and trained"):
        trainer_of(tmp_path, model=model)
    trained(trainer_of(tmp_path, model=model._orig_mod, max_steps=1))


class Around(torch.nn.Module):
    """A module of one's own around a model of Transformers."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = tiny_bert().bert, torch.nn.Linear(16, 2)
        self.encoder.pooler = None

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(hidden[:, 0])


class Forwarding(Around):
    def gradient_checkpointing_enable(self, **options):
        self.encoder.gradient_checkpointing_enable(**options)


def test_checkpointing_of_a_module_without_the_method_is_refused_with_where_it_is(tmp_path):
    model = Around()
    with refused("checkpointing-without-method", match="Around has none") as refusal:
        trainer_of(tmp_path, model=model, cls=OfLogits, gradient_checkpointing=True).train()
    exec(re.search(r"call (model\..*\(\)) before", str(refusal.value))[1], {"model": model})
    assert model.encoder.is_gradient_checkpointing
    trained(checked_trainer_of(tmp_path / "mended", model=model, cls=OfLogits, max_steps=1))


def test_checkpointing_of_a_module_that_passes_it_on_trains(tmp_path):
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # Transformers prefers the new name
        trainer = trained(trainer_of(tmp_path, model=Forwarding(), cls=OfLogits, gradient_checkpointing=True, max_steps=1))
    assert trainer.model.encoder.is_gradient_checkpointing
    alone = torch.nn.Sequential()
    with refused("checkpointing-without-method", match=r"Leave the argument out\."):
        trainer_of(tmp_path, model=alone, cls=OfLogits, gradient_checkpointing=True).train()
