"""A `training_step` of the user's own is tried before a step is counted, wherever it was set."""

import types

import pytest

from doppler_hf import DopplerTrainer
from doppler_hf.preflight import own_step
from tests.support.refusals import refused
from tests.support.trainers import On, trained, trainer_of, weights
from tests.support.unspent import refusal_unspent

private_step = DopplerTrainer.training_step


def of_batches(self, model, inputs, num_items_in_batch=None):
    loss = self.compute_loss(model, self._prepare_inputs(inputs))
    self.accelerator.backward(loss)
    return loss.detach()


def of_micro_batches(self, model, inputs, num_items_in_batch=None):
    loss = model(**inputs[0].inputs).loss
    loss.backward()
    return loss.detach()


def twice(self, *args):
    private_step(self, *args)
    return private_step(self, *args)


def of_inputs(self, model, inputs, num_items_in_batch=None):
    return private_step(self, model, [each.inputs for each in inputs], num_items_in_batch)


WRONG = {
    of_batches: "gets a list of micro-batches",
    of_micro_batches: "does not call DopplerTrainer.training_step",
    twice: "calls DopplerTrainer.training_step 2 times",
    of_inputs: "gets a list of micro-batches",
}


@pytest.mark.parametrize("step", WRONG)
@pytest.mark.parametrize("how", ["in a subclass", "on the trainer", "on the class"])
def test_a_step_that_makes_no_private_gradient_is_refused(tmp_path, monkeypatch, step, how):
    cls = type("Mine", (DopplerTrainer,), {"training_step": step, "__module__": __name__})
    trainer = trainer_of(tmp_path, cls=cls if how == "in a subclass" else DopplerTrainer, max_steps=1)
    if how == "on the trainer":
        trainer.training_step = types.MethodType(step, trainer)
    if how == "on the class":
        monkeypatch.setattr(DopplerTrainer, "training_step", step)
    before = weights(trainer)
    assert WRONG[step] in refusal_unspent(trainer, "own-training-step")
    assert (weights(trainer) == before).all()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("how", ["in a subclass", "on the trainer", "through another method"])
def test_a_step_that_hands_its_piece_on_trains_and_the_trial_leaves_no_trace(tmp_path, how):
    seen, logs = [], []

    def step(self, model, inputs, num_items_in_batch=None):
        seen.append(len(inputs))
        self.log({"mine": 1.0})
        self.state.epoch += 0.0
        return private_step(self, model, inputs, num_items_in_batch)

    def aside(self, *args):
        return self.inner(*args)

    methods = {"training_step": step} if how == "in a subclass" else {}
    if how == "through another method":
        methods = {"training_step": aside, "inner": step}
    cls = type("Mine", (DopplerTrainer,), methods | {"__module__": __name__})
    callback = On(log=lambda state, **_: logs.append(state.global_step))
    trainer = trainer_of(tmp_path, cls=cls, max_steps=2, gradient_accumulation_steps=1, callbacks=[callback])
    if how == "on the trainer":
        trainer.training_step = types.MethodType(step, trainer)
    trained(trainer)
    assert len(seen) == 3  # the trial's, and two steps'
    assert sum("mine" in each for each in trainer.state.log_history) == 2
    assert trainer.privacy.ledger.steps_run == 2


def test_what_a_trial_shows_of_a_run_is_the_run(tmp_path):
    run = trainer_of(tmp_path).privacy
    counted = own_step._Counted(run)
    assert counted.statement is run.statement
    with pytest.raises(TypeError):
        counted.add_piece([{}])


private_batches = DopplerTrainer.get_batch_samples


def copied_from_transformers(self, epoch_iterator, num_batches, device=None):
    batches = []
    for _ in range(num_batches):
        try:
            batches.append(next(epoch_iterator))
        except StopIteration:
            break
    return batches, None


def without_the_last(self, *args):
    batches, count = private_batches(self, *args)
    return batches[:-1], count


def counting_tokens(self, *args):
    batches, count = private_batches(self, *args)
    self.tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    return batches, count


def without_empty_batches(self, *args):
    batches, count = private_batches(self, *args)
    return [[each for each in batch if each.size > 99] for batch in batches], count


OTHER_BATCHES = {
    copied_from_transformers: "does not call super().get_batch_samples",
    without_the_last: "returns other batches",
    counting_tokens: "failed with a TypeError",
    without_empty_batches: "own-batches",
}


@pytest.mark.parametrize("batches", OTHER_BATCHES)
@pytest.mark.parametrize("how", ["in a subclass", "on the trainer"])
def test_batches_that_are_not_those_of_the_run_are_refused(tmp_path, batches, how):
    methods = {"get_batch_samples": batches} if how == "in a subclass" else {}
    trainer = trainer_of(tmp_path, cls=type("Mine", (DopplerTrainer,), methods | {"__module__": __name__}), max_steps=1)
    if how == "on the trainer":
        trainer.get_batch_samples = types.MethodType(batches, trainer)
    message = refusal_unspent(trainer, "own-batches")
    assert OTHER_BATCHES[batches] in message or OTHER_BATCHES[batches] == "own-batches"


def test_batches_that_are_looked_at_and_passed_on_train(tmp_path):
    seen = []

    class Mine(DopplerTrainer):
        def get_batch_samples(self, *args):
            batches, count = super().get_batch_samples(*args)
            seen.append(len(batches))
            return batches, count

    trainer = trained(trainer_of(tmp_path, cls=Mine, max_steps=2))
    assert trainer.privacy.ledger.steps_run == 2
    assert set(seen) == {2}
    assert len(seen) >= 3  # the trial's, and two steps'


def test_a_count_of_operations_that_fails_on_a_private_batch_is_refused(tmp_path):
    class Mine(DopplerTrainer):
        def floating_point_ops(self, inputs):
            return 6 * inputs["input_ids"].numel()

    trainer = trainer_of(tmp_path, cls=Mine, max_steps=1)
    assert "failed with a TypeError" in refusal_unspent(trainer, "own-count-of-operations")
    del Mine.floating_point_ops
    assert trained(trainer_of(tmp_path, cls=Mine, max_steps=1)).state.total_flos == 0


@pytest.mark.parametrize("count", [lambda inputs: 7, lambda inputs: sum(each.size for each in inputs)])
def test_a_count_of_operations_that_works_is_not_reported(tmp_path, count):
    cls = type("Mine", (DopplerTrainer,), {"floating_point_ops": lambda self, i: count(i), "__module__": __name__})
    trainer = trained(trainer_of(tmp_path, cls=cls, max_steps=2, gradient_accumulation_steps=1))
    assert trainer.privacy.ledger.steps_run == 2
    assert trainer.state.total_flos == 0


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_step_that_hands_a_piece_on_twice_later_in_the_run_is_told_so(tmp_path, pieces):
    class Twice(DopplerTrainer):
        def training_step(self, *args):
            if self.state.global_step >= 1:
                super().training_step(*args)
            return super().training_step(*args)

    trainer = trainer_of(tmp_path, cls=Twice, gradient_accumulation_steps=pieces)
    with refused("piece-added-twice", match="Call it once"):
        trainer.train()
    assert trainer.state.global_step == 1
