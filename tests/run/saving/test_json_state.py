"""Whatever callbacks and logs hold, a checkpoint can be written, and says what it holds in another form."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from doppler_hf import DopplerTrainer
from doppler_hf.run.saving.json_state import as_json
from tests.support.tiers import thorough
from tests.support.tiny import text_data
from tests.support.trainers import On, at, interrupt, trained, trainer_of

SAVES = dict(save_strategy="steps", save_steps=2, max_steps=4)


class Logs(DopplerTrainer):
    def log(self, logs, start_time=None):
        super().log(logs | {"norm": torch.tensor(1.5, requires_grad=True) * 2, "each": np.ones(2)}, start_time)


class Evaluates(DopplerTrainer):
    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        self.log({"confusion": np.eye(2), "where": Path("here")})
        return metrics


@pytest.mark.parametrize("plots", [False, *thorough(True)])
@pytest.mark.parametrize("cls", [Logs, Evaluates])
def test_logs_of_tensors_and_arrays_are_saved_as_lists(tmp_path, cls, plots):
    trainer = trainer_of(tmp_path, cls=cls, eval_strategy="steps", eval_steps=2, plot_training_curve=plots, **SAVES)
    with pytest.warns(UserWarning, match="A log has a value that JSON cannot hold"):
        trained(trainer)
    history = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())["log_history"]
    assert [1.0, 1.0] in [logs.get("each") for logs in history] or [[1.0, 0.0], [0.0, 1.0]] in [
        logs.get("confusion") for logs in history
    ]
    trained_again = trainer_of(tmp_path, cls=cls, **SAVES | {"max_steps": 6})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained_again.train(resume_from_checkpoint=True)
    assert trained_again.state.global_step == 6


class Seen(TrainerCallback, ExportableState):
    """Has a state that JSON can hold at first."""

    def __init__(self):
        self.seen = None

    def on_step_end(self, args, state, control, **kwargs):
        self.seen = {state.global_step}

    def state(self):
        return {"args": {}, "attributes": {"seen": self.seen}}


class Fails(TrainerCallback, ExportableState):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def state(self):
        return {"args": {}, "attributes": {"steps": 1 // (1 - min(1, self.steps))}}


@pytest.mark.parametrize(
    ("callback", "match", "kept"),
    [(Seen, r"Seen.state\(\) has a value", {"seen": [4]}), (Fails, r"Fails.state\(\) failed with a ZeroDiv", {})],
)
def test_states_of_callbacks_that_change_in_the_run_are_saved(tmp_path, callback, match, kept):
    one = callback()
    with pytest.warns(UserWarning, match=match):
        trained(trainer_of(tmp_path, callbacks=[one], **SAVES))
    state = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())["stateful_callbacks"]
    assert state[callback.__name__]["attributes"] == kept
    assert "state" not in vars(one)


def test_an_interrupted_run_with_such_a_log_is_saved_too(tmp_path):
    trainer = trainer_of(tmp_path, cls=Logs, callbacks=[On(step_end=at(3, interrupt))], max_steps=4)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="A log has"):
        trainer.train()
    assert (tmp_path / "out/checkpoint-3/trainer_state.json").exists()


@pytest.mark.filterwarnings("ignore:eval_dataset is train_dataset")
def test_evaluations_of_training_data_are_still_known(tmp_path):
    data = text_data()
    trainer = trainer_of(tmp_path, data=data, **SAVES)

    def evaluate(**_):
        trainer.evaluate(data)
        trainer.log({"each": np.ones(2)})

    trainer.add_callback(On(step_end=at(1, evaluate)))
    with pytest.warns(UserWarning, match="A log has"):
        trained(trainer)
    (evaluated,) = trainer.evaluations_of_training_data
    assert any(logs is evaluated for logs in trainer.state.log_history)


def test_what_json_can_hold_stays_as_it_is():
    values = {"a": 1, "b": [0.5, None, True], "c": {"d": "e"}}
    assert as_json(values) == values
    assert as_json({(1, 2): {torch.float32}}) == {"(1, 2)": ["torch.float32"]}
