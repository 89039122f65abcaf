"""Code that the checks have seen, and that a callback replaces while the run goes on, ends it before another step counts."""

import warnings

import pytest
import torch
from transformers import DefaultFlowCallback, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import On, arguments, at, trained, trainer_of
from tests.support.unspent import assert_unspent


def of_the_batch(model, inputs):
    losses = DopplerTrainer.compute_per_sample_loss(trainer_of_test[0], model, inputs)
    return losses / losses.sum().detach()


def loss_of_batch(model, inputs, return_outputs=False, num_items_in_batch=None):
    return model(**inputs | {"labels": 1 - inputs["labels"]}).loss


def other_forward(model):
    own = model.forward
    return lambda **inputs: own(**inputs | {"labels": 1 - inputs["labels"]} if "labels" in inputs else inputs)


trainer_of_test = []
# What a callback sets → how.
REPLACED = {
    "trainer.compute_per_sample_loss": lambda trainer: setattr(trainer, "compute_per_sample_loss", of_the_batch),
    "trainer.compute_loss": lambda trainer: setattr(trainer, "compute_loss", loss_of_batch),
    "trainer.compute_loss_func": lambda trainer: setattr(trainer, "compute_loss_func", lambda *args, **kwargs: None),
    "trainer.label_smoother": lambda trainer: setattr(trainer, "label_smoother", LabelSmoother(0.1)),
    "trainer.training_step": lambda trainer: setattr(trainer, "training_step", lambda *args, **kwargs: torch.zeros(())),
    "trainer._prepare_inputs": lambda trainer: setattr(trainer, "_prepare_inputs", lambda inputs: inputs),
    "trainer.model": lambda trainer: setattr(trainer, "model", tiny_bert()),
    "trainer.model.forward": lambda trainer: setattr(trainer.model, "forward", other_forward(trainer.model)),
    "trainer.optimizer": lambda trainer: setattr(trainer, "optimizer", torch.optim.SGD(trainer.model.parameters(), 0.1)),
    "trainer.args": lambda trainer: setattr(trainer, "args", arguments(trainer.args.parent, max_steps=2)),
}
SOME = ["trainer.compute_per_sample_loss", "trainer.compute_loss", "trainer.compute_loss_func", "trainer.optimizer"]


def replacing(tmp_path, change, event, *, step=None):
    function = lambda **_: change(trainer_of_test[0])  # noqa: E731
    trainer = trainer_of(tmp_path, callbacks=[On(**{event: function if step is None else at(step, function)})])
    trainer_of_test[:] = [trainer]
    trainer.args.parent = tmp_path
    return trainer


@pytest.mark.parametrize("name", [*SOME, *thorough(*[name for name in REPLACED if name not in SOME])])
def test_code_that_is_replaced_as_the_run_begins_costs_nothing(tmp_path, name):
    trainer = replacing(tmp_path, REPLACED[name], "train_begin")
    with refused("code-replaced", match=rf"^{name} .*No ε is spent"):
        trainer.train()
    assert_unspent(trainer)


@pytest.mark.parametrize("event", ["step_begin", *thorough("step_end", "log")])
@pytest.mark.parametrize("name", [*SOME, *thorough(*[name for name in REPLACED if name not in SOME])])
def test_code_that_is_replaced_later_changes_no_step(tmp_path, name, event):
    trainer = replacing(tmp_path, REPLACED[name], event, step=1)
    with refused("code-replaced", match=rf"^{name} .*This step is not counted"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.privacy.ledger.steps_run == 1


def test_a_method_that_is_replaced_on_the_class_is_noticed(tmp_path, monkeypatch):
    class Mine(DopplerTrainer):
        pass

    set_it = On(step_begin=at(1, lambda **_: monkeypatch.setattr(Mine, "compute_per_sample_loss", lambda *_: None, False)))
    trainer = trainer_of(tmp_path, cls=Mine, callbacks=[set_it])
    with refused("code-replaced"):
        trainer.train()


def test_a_loss_function_of_the_model_is_noticed(tmp_path):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    data = text_data().map(lambda row: {"labels": row["input_ids"]})

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    set_it = On(train_begin=lambda model, **_: setattr(model, "loss_function", lambda logits, **_: logits.mean()))
    trainer = trainer_of(tmp_path, model=LlamaForCausalLM(config), data=data, collator=collate, callbacks=[set_it])
    with refused("code-replaced", match="trainer.model.loss_function"):
        trainer.train()
    assert_unspent(trainer)


@pytest.mark.parametrize("event", ["train_begin", "epoch_begin", "step_begin", "step_end"])
@pytest.mark.parametrize("flows", [True, *thorough(False)])
def test_another_handler_of_callbacks_makes_no_uncounted_step(tmp_path, event, flows):
    def replace(trainer):
        own = [DefaultFlowCallback()] if flows else []
        trainer.callback_handler = CallbackHandler(own, trainer.model, None, None, None)

    trainer = replacing(tmp_path, replace, event, step=None if event.endswith("n") and event != "step_begin" else 1)
    with refused("callbacks-removed"):
        trainer.train()
    ledger = trainer.privacy.ledger
    assert trainer.state.global_step <= (0 if ledger is None else ledger.steps_run)


class WithoutKeywords(TrainerCallback):
    def on_step_end(self, args, state, control):
        pass


@pytest.mark.parametrize("event", ["train_begin", *thorough("epoch_begin")])
def test_a_callback_that_is_added_as_the_run_begins_is_checked(tmp_path, event):
    trainer = replacing(tmp_path, lambda trainer: trainer.add_callback(WithoutKeywords), event)
    with refused("callback-signature", match=r"def on_step_end\(self, args, state, control, \*\*kwargs\):"):
        trainer.train()
    assert trainer.state.global_step == 0
    if event == "train_begin":
        assert_unspent(trainer)


def test_a_callback_that_is_added_later_is_checked_before_the_next_step(tmp_path):
    trainer = replacing(tmp_path, lambda trainer: trainer.add_callback(WithoutKeywords), "step_begin", step=1)
    with refused("callback-signature"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_what_is_fine_may_be_replaced_and_added(tmp_path):
    seen = []

    def change(trainer):
        trainer.add_callback(On(step_end=lambda state, **_: seen.append(state.global_step)))
        trainer.log = lambda logs, start_time=None: None
        trainer.data_collator = None
        trainer.callback_handler.callbacks = [*trainer.callback_handler.callbacks]

    trained(replacing(tmp_path, change, "step_end", step=1))
    assert seen == [1, 2, 3, 4] or seen == [2, 3, 4]


@pytest.mark.parametrize("value", [True, {"a": 1}])
def test_what_an_event_returns_in_place_of_the_control_is_told(tmp_path, value):
    class Returns(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return value

    trainer = trainer_of(tmp_path, callbacks=[Returns()])
    with refused("callback-returns", match="Return control, or nothing"):
        trainer.train()
    assert trainer.state.global_step == 1

    class ReturnsControl(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert isinstance(control, TrainerControl)
            return control

    trained(trainer_of(tmp_path / "again", callbacks=[ReturnsControl()]))


def test_what_the_first_event_returns_costs_nothing(tmp_path):
    class Returns(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            return state

    trainer = trainer_of(tmp_path, callbacks=[Returns()])
    with refused("callback-returns"):
        trainer.train()
    assert_unspent(trainer)


@pytest.mark.parametrize("event", ["train_begin", "step_end"])
def test_more_steps_by_the_state_have_no_effect_and_it_is_said(tmp_path, event):
    more = On(**{event: lambda state, **_: setattr(state, "max_steps", 9)})
    with pytest.warns(UserWarning, match="state.max_steps was changed from 4 to 9 .* no effect"):
        trainer = trained(trainer_of(tmp_path, callbacks=[more]))
    assert trainer.state.global_step == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fewer = On(step_end=lambda state, **_: setattr(state, "max_steps", 2))
        assert trained(trainer_of(tmp_path / "fewer", callbacks=[fewer])).state.global_step == 2


@pytest.mark.parametrize("when", ["before train", *thorough("train_begin")])
def test_arguments_that_are_made_after_the_trainer_are_told_of_and_a_new_trainer_works(tmp_path, when):
    make = lambda *_: arguments(tmp_path / "other")  # noqa: E731
    trainer = replacing(tmp_path, make if when == "train_begin" else lambda _: None, "train_begin")
    if when == "before train":
        make()
    with refused("accelerator-reset", match="Make the trainer again"):
        trainer.train()
    trained(trainer_of(tmp_path / "again"))
