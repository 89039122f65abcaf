"""A training without the callbacks that count, log and stop, and one whose loader something else reads, do not begin."""

import gc
import threading

import pytest
from torch.utils.data import DataLoader
from transformers import DefaultFlowCallback, TrainerCallback

from doppler_hf.errors import Refusal
from tests.support.tiers import thorough
from tests.support.tiny import text_data
from tests.support.trainers import On, at, trained, trainer_of, weights
from tests.support.unspent import assert_unspent, refusal_unspent


def replaced(handler):
    handler.callbacks = []


def emptied(handler):
    handler.callbacks.clear()


def of_others(handler):
    handler.callbacks = [TrainerCallback()]


def without_flow(handler):
    handler.pop_callback(DefaultFlowCallback)


REMOVE = [replaced, emptied, of_others, without_flow]


@pytest.mark.parametrize("remove", REMOVE)
def test_a_training_without_transformers_flow_is_refused_and_the_fix_works(tmp_path, remove):
    trainer = trainer_of(tmp_path, max_steps=2)
    remove(trainer.callback_handler)
    message = refusal_unspent(trainer, "callbacks-removed")
    assert "trainer.add_callback(transformers.trainer_callback.DefaultFlowCallback)" in message
    trainer.add_callback(DefaultFlowCallback)
    assert trained(trainer).state.global_step == 2


@pytest.mark.parametrize("remove", REMOVE)
@pytest.mark.parametrize("event", ["train_begin", *thorough("epoch_begin")])
def test_callbacks_that_are_removed_as_the_training_begins_end_it(tmp_path, remove, event):
    handlers = []
    trainer = trainer_of(tmp_path, max_steps=2, callbacks=[On(**{event: lambda **_: remove(handlers[0])})])
    handlers.append(trainer.callback_handler)
    before = weights(trainer)
    with pytest.raises(Refusal, match="removed callbacks") as refused:
        trainer.train()
    assert refused.value.code == "callbacks-removed"
    assert (weights(trainer) == before).all()
    if event == "train_begin":
        assert_unspent(trainer)
    assert trainer.privacy.epsilon() == 0.0


@pytest.mark.parametrize("remove", REMOVE)
@pytest.mark.parametrize("event", ["step_begin", *thorough("step_end")])
def test_callbacks_that_are_removed_later_end_it_before_an_uncounted_step(tmp_path, remove, event):
    handlers, moved = [], []
    callback = On(**{event: at(1, lambda **_: (remove(handlers[0]), moved.append(weights(trainer))))})
    trainer = trainer_of(tmp_path, callbacks=[callback])
    handlers.append(trainer.callback_handler)
    with pytest.raises(Refusal, match="removed callbacks"):
        trainer.train()
    steps = trainer.state.global_step
    assert steps <= trainer.privacy.ledger.steps_run
    if remove is not without_flow and event == "step_begin" and remove is emptied:
        assert (weights(trainer) == moved[0]).all()


def look(train_dataloader, **_):
    next(iter(train_dataloader))


# A loader whose first draw is refused leaves torch's thread that feeds its workers without a pipe to write to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("workers", [0, *thorough(1)])
@pytest.mark.parametrize("event", ["train_begin", *thorough("epoch_begin", "step_begin")])
def test_a_callback_that_reads_the_loader_is_told_at_once(tmp_path, event, workers):
    trainer = trainer_of(tmp_path, callbacks=[On(**{event: look})], dataloader_num_workers=workers)
    with pytest.raises(Refusal, match="has read train_dataloader") as refused:
        trainer.train()
    assert refused.value.code == "loader-read"
    assert trainer.privacy.epsilon() == 0.0
    if event == "train_begin":
        assert_unspent(trainer)
    del refused, trainer
    gc.collect()
    for thread in threading.enumerate():  # so that it ends within this test
        if thread.name == "QueueFeederThread":
            thread.join(timeout=10)


def test_the_loader_may_be_read_before_and_after_a_training_and_a_loader_of_ones_own_at_any_time(tmp_path):
    seen = []

    def own(**_):
        batch = next(iter(DataLoader(trainer.train_dataset, batch_size=4, collate_fn=trainer.data_collator)))
        seen.append(len(batch["labels"]))

    events = dict(train_begin=own, step_begin=own, train_end=look)
    trainer = trainer_of(tmp_path, max_steps=2, callbacks=[On(**events)])
    next(iter(trainer.get_train_dataloader()))
    trained(trainer)
    assert seen == [4, 4, 4]
    assert trainer.privacy.ledger.steps_run == 2
    next(iter(trainer.get_train_dataloader()))


def stop(control, **_):
    control.should_training_stop = True


def test_a_training_that_was_stopped_lets_callbacks_look_at_its_end(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=6, data=text_data(48), callbacks=[On(step_end=at(2, stop), train_end=look)])
    assert trained(trainer).state.global_step == 2
