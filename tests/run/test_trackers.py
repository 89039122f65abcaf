"""Callbacks that Transformers makes for experiment trackers do their work in a private run, or are refused before it."""

import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from transformers import Trainer
from transformers.integrations import integration_utils

from tests.support.refusals import refused
from tests.support.tiny import pad, text_data
from tests.support.trainers import On, trained, trainer_of
from tests.support.unspent import refusal_unspent


def watch(model, log, log_freq):
    """Look at gradients as wandb.watch does."""
    for parameter in model.parameters() if log in ("gradients", "all") else ():
        parameter.register_hook(lambda gradient: gradient.data.flatten().histc())


@pytest.fixture
def wandb(monkeypatch):
    """Stand in for the package wandb, which is not installed."""
    stand_in = MagicMock()
    stand_in.watch, stand_in.summary = watch, {}
    errors = types.ModuleType("wandb.sdk.lib.config_util")
    errors.ConfigError = type("ConfigError", (Exception,), {})
    parts = {"wandb": stand_in, "wandb.sdk": MagicMock(), "wandb.sdk.lib": MagicMock(), "wandb.sdk.lib.config_util": errors}
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    return stand_in


def test_weights_and_biases_gets_the_model_at_the_end(tmp_path, monkeypatch, wandb):
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    trainer = trained(trainer_of(tmp_path, callbacks=[integration_utils.WandbCallback()], max_steps=1))
    assert trainer.privacy.ledger.runs[-1].is_closed
    assert wandb.run.log_artifact.call_args.kwargs == {"aliases": ["final_model"]}
    files = [call.args[0] for call in wandb.Artifact.return_value.new_file.call_args_list]
    assert "model.safetensors" in files


def test_dvclive_gets_the_model_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_dvclive_available", lambda: True)
    module = types.ModuleType("dvclive")
    module.Live = type("Live", (MagicMock,), {})
    for name, part in {"dvclive": module, "dvclive.plots": MagicMock(), "dvclive.utils": MagicMock()}.items():
        monkeypatch.setitem(sys.modules, name, part)
    live = module.Live()
    callback = integration_utils.DVCLiveCallback(live=live, log_model=True)
    trainer = trained(trainer_of(tmp_path, callbacks=[callback], max_steps=1))
    assert trainer.privacy.ledger.runs[-1].is_closed
    assert (Path(trainer.args.output_dir) / "last" / "model.safetensors").exists()
    live.log_artifact.assert_called_once()


def test_a_helper_that_could_train_and_a_trainer_after_the_run_are_refused(tmp_path):
    made = []

    def helper(args, model, **_):
        with refused("stock-trainer"):
            Trainer(model=model, args=args, train_dataset=text_data(), data_collator=pad)
        made.append(Trainer(model=model, args=args, eval_dataset=text_data(4), data_collator=pad))

    trainer = trained(trainer_of(tmp_path, callbacks=[On(train_end=helper)], max_steps=1))
    assert len(made) == 1
    with refused("stock-trainer"):
        Trainer(model=trainer.model, args=trainer.args, data_collator=pad)


@pytest.mark.parametrize("watched", ["gradients", "all"])
def test_watched_gradients_are_refused_before_the_first_step(tmp_path, monkeypatch, wandb, watched):
    monkeypatch.setenv("WANDB_WATCH", watched)
    trainer = trainer_of(tmp_path, callbacks=[integration_utils.WandbCallback()], max_steps=1)
    assert "WANDB_WATCH to 'false' or 'parameters'" in refusal_unspent(trainer, "gradient-hook")


@pytest.mark.parametrize("watched", ["false", "parameters"])
def test_the_mend_of_watched_gradients_trains(tmp_path, monkeypatch, wandb, watched):
    monkeypatch.setenv("WANDB_WATCH", watched)
    trainer = trained(trainer_of(tmp_path, callbacks=[integration_utils.WandbCallback()], max_steps=1))
    assert trainer.privacy.ledger.steps_run == 1


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_any_callback_sets_at_the_start_is_refused(tmp_path, how):
    def look(model, **_):
        getattr(model.classifier.weight, how)(lambda _: None)

    assert "classifier" in refusal_unspent(trainer_of(tmp_path, callbacks=[On(train_begin=look)]), "gradient-hook")
