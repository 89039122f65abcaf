"""A run without the callbacks that count, log and stop does not begin; callbacks look at batches that are not its own."""

import functools
import gc
import threading

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DefaultFlowCallback, TrainerCallback

from doppler_hf import DopplerTrainer
from doppler_hf.errors import Refusal
from tests.support.tiers import thorough
from tests.support.tiny import numbered, text_data
from tests.support.trainers import On, Sees, assert_trained_alike, at, trained, trainer_of, weights
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
    return next(iter(train_dataloader))


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    """Runs without a look, by the number of workers."""

    @functools.cache
    def run(workers):
        folder = tmp_path_factory.mktemp("unseen")
        return trained(trainer_of(folder, cls=Sees, data=numbered(), noise_seed=1, dataloader_num_workers=workers))

    return run


@pytest.mark.parametrize("workers", [0, *thorough(1)])
@pytest.mark.parametrize(
    "event",
    ["train_begin", "step_begin", "step_end", *thorough("epoch_begin", "substep_end", "optimizer_step", "log", "epoch_end")],
)
@pytest.mark.parametrize("how", ["loader", "trainer", *thorough("all of it")])
def test_a_callback_may_look_at_batches_and_changes_nothing_of_the_run(tmp_path, unseen, event, workers, how):
    """The batches are of the collator, as in Transformers, and the run's own batches are the same as without a look."""
    as_planned, seen = unseen(workers), []

    def callback(train_dataloader, **_):
        loader = trainer.get_train_dataloader() if how == "trainer" else train_dataloader
        seen.extend([*loader] if how == "all of it" else [next(iter(loader))])

    trainer = trainer_of(
        tmp_path, cls=Sees, data=numbered(), callbacks=[On(**{event: callback})], noise_seed=1,
        dataloader_num_workers=workers,
    )  # fmt: skip
    assert_trained_alike(trained(trainer), as_planned)
    assert trainer.seen == as_planned.seen
    assert trainer.privacy.ledger.steps_run == 4
    assert seen
    for batch in seen:
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        assert batch["input_ids"].shape[0] == 4
        assert all(value.device == trainer.args.device for value in batch.values())


def test_what_a_callback_sees_is_independent_of_the_batches_of_the_run(tmp_path):
    """Every row is as likely, whether it is in the batch of this step or not; and no generator of the run is touched."""
    own, looked_at, states = [], [], []

    def callback(train_dataloader, **_):
        own.append({text[0] for text in trainer.seen})
        trainer.seen.clear()
        before = torch.get_rng_state()
        looked_at.append({int(row[0]) for batch in train_dataloader for row in batch["input_ids"][:2]})
        states.append(torch.equal(before, torch.get_rng_state()))

    data = numbered(48).select(range(40))
    trainer = trainer_of(tmp_path, cls=Sees, data=data, callbacks=[On(step_end=callback)], max_steps=50)
    trained(trainer)
    assert all(states)
    # Half of 40 rows are looked at after each step, and a fifth are in its batch.
    both = sum(len(rows & seen) for rows, seen in zip(own, looked_at, strict=True))
    expected = sum(len(rows) for rows in own) / 2
    assert abs(both - expected) < 5 * (expected / 2) ** 0.5
    assert len({frozenset(rows) for rows in looked_at}) == 50


def test_the_loader_that_callbacks_get_has_the_length_that_transformers_has(tmp_path):
    lengths = []
    callback = On(step_end=lambda train_dataloader, **_: lengths.append((len(train_dataloader), len([*train_dataloader]))))
    trained(trainer_of(tmp_path, callbacks=[callback]))
    stock = trainer_of(tmp_path / "stock", disable_dp=True, noise_multiplier=None)
    assert lengths == [(len(stock.get_train_dataloader()),) * 2] * 4


# A loader whose first draw is refused leaves torch's thread that feeds its workers without a pipe to write to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("workers", [0, *thorough(1)])
@pytest.mark.parametrize("event", ["train_begin", *thorough("epoch_begin", "step_begin")])
def test_who_keeps_the_loader_of_the_run_cannot_take_its_batches(tmp_path, event, workers):
    class Keeps(DopplerTrainer):
        def get_train_dataloader(self):
            self.kept = super().get_train_dataloader()
            return self.kept

    trainer = trainer_of(tmp_path, cls=Keeps, dataloader_num_workers=workers)
    trainer.add_callback(On(**{event: lambda **_: next(iter(trainer.kept))}))
    with pytest.raises(Refusal, match="read outside of its training loop") as refused:
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


def test_a_run_that_a_callback_ends_is_saved_and_goes_on(tmp_path):
    """Whatever a callback raises in the middle, no step is lost."""
    kept = []

    class Keeps(DopplerTrainer):
        def get_train_dataloader(self):
            kept.append(super().get_train_dataloader())
            return kept[-1]

    options = dict(cls=Keeps, max_steps=6, data=text_data(48), noise_multiplier=None, target_epsilon=8.0)
    trainer = trainer_of(tmp_path, callbacks=[On(step_end=at(2, lambda **_: next(iter(kept[-1]))))], **options)
    with pytest.raises(Refusal, match="read outside"):
        trainer.train()
    again = trainer_of(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.privacy.ledger.steps_run == 6
    assert again.privacy.epsilon() == trainer.privacy.epsilon()


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
