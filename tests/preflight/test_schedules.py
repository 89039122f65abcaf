"""Schedules that never reach the learning rate, or that end before the run, are found before the first step."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from doppler_hf import DopplerTrainer
from tests.support.tiers import thorough
from tests.support.trainers import trained, trainer_of
from tests.support.unspent import refusal_unspent


def with_schedule(make):
    class Scheduled(DopplerTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = make(self.optimizer, num_training_steps)
            return self.lr_scheduler

    return Scheduled


class Warmup(lr_scheduler.LRScheduler):
    """A schedule of the user's own."""

    def __init__(self, optimizer, steps):
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self):
        return [base * min(1.0, (self.last_epoch + 1) / self.steps) for base in self.base_lrs]


def sequential(optimizer, steps):
    parts = [lr_scheduler.LinearLR(optimizer, 1e-4, total_iters=steps), lr_scheduler.ConstantLR(optimizer, 1.0)]
    return lr_scheduler.SequentialLR(optimizer, parts, [steps])


def chained(optimizer, steps):
    return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(optimizer, 1e-4, total_iters=steps)], optimizer)


def one_cycle(optimizer, steps):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=max(4, steps), cycle_momentum=False)


# A schedule that warms up for so many steps.
WARMUPS = {"own": Warmup, "sequential": sequential, "one cycle": one_cycle, "chained": chained}


@pytest.mark.parametrize("name", ["own", *thorough("sequential", "one cycle", "chained")])
def test_a_warmup_of_any_kind_that_is_far_longer_than_the_run_is_refused_and_a_short_one_trains(tmp_path, name):
    trainer = trainer_of(tmp_path, cls=with_schedule(lambda optimizer, _: WARMUPS[name](optimizer, 1000)))
    assert "allow_any_learning_rate=True" in refusal_unspent(trainer, "rate-never-arrives")
    allowed = trainer_of(tmp_path / "b", cls=type(trainer), allow_any_learning_rate=True)
    assert trained(allowed).state.global_step == 4
    short = trainer_of(tmp_path / "c", cls=with_schedule(lambda optimizer, _: WARMUPS[name](optimizer, 2)))
    assert trained(short).state.global_step == 4


@pytest.mark.parametrize("steps", [2, *thorough(3)])
def test_a_schedule_that_ends_before_the_run_is_refused_and_one_of_its_length_trains(tmp_path, steps):
    def of(number):
        return with_schedule(
            lambda optimizer, total: lr_scheduler.OneCycleLR(
                optimizer, max_lr=1e-2, total_steps=number or total + 1, cycle_momentum=False
            )
        )

    message = refusal_unspent(trainer_of(tmp_path, cls=of(steps)), "schedule-fails")
    assert "num_training_steps" in message
    assert trained(trainer_of(tmp_path / "b", cls=of(None))).state.global_step == 4


def test_a_schedule_that_was_tried_is_as_before(tmp_path):
    made = []

    def make(optimizer, steps):
        made.append(sequential(optimizer, 2))
        before.append((copy.deepcopy(made[0].state_dict()), [group["lr"] for group in optimizer.param_groups]))
        return made[0]

    before, rates = [], []

    class Seen(with_schedule(make)):
        def training_step(self, *args, **kwargs):
            rates.append(self.optimizer.param_groups[0]["lr"])
            return super().training_step(*args, **kwargs)

    trained(trainer_of(tmp_path, cls=Seen, gradient_accumulation_steps=1))
    parameter = torch.nn.Parameter(torch.zeros(1))
    alone = torch.optim.SGD([parameter], lr=1e-2)
    schedule, expected = sequential(alone, 2), []
    for _ in range(4):
        expected.append(alone.param_groups[0]["lr"])
        alone.step()
        schedule.step()
    assert rates[-4:] == pytest.approx(expected)


class NeedsTrainer(lr_scheduler.LRScheduler):
    def __init__(self, optimizer, trainer):
        self.trainer = trainer
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs


def test_a_schedule_that_refers_to_more_is_not_tried(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("copied")

    monkeypatch.setattr(DopplerTrainer, "__deepcopy__", refuse, raising=False)
    trainers = []
    trainer = trainer_of(tmp_path, cls=with_schedule(lambda optimizer, _: NeedsTrainer(optimizer, trainers[0])))
    trainers.append(trainer)
    assert trained(trainer).state.global_step == 4
