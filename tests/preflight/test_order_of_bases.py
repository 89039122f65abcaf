"""A class whose bases are in the wrong order is refused where it is defined, and the order of the message trains."""

import re
from dataclasses import dataclass

import pytest
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from trl import SFTTrainer

from doppler_hf import DopplerSFTTrainer, DopplerTrainer, DopplerTrainingArguments
from tests.support.refusals import refused
from tests.support.trainers import arguments, trained, trainer_of


class Theirs(Trainer):
    def log(self, logs, start_time=None):
        super().log(logs | {"their": 1.0}, start_time)


class Further(Theirs):
    pass


class Ours(DopplerTrainer):
    pass


class Mixin:
    """No trainer: it may come first."""

    def log(self, logs, start_time=None):
        super().log(logs | {"their": 1.0}, start_time)


class Silent(Trainer):
    def __init_subclass__(cls, **options):
        """Hide the __init_subclass__ of the next class."""


class SFT(SFTTrainer):
    pass


NAMES = {
    each.__name__: each for each in (Theirs, Further, Ours, Mixin, Seq2SeqTrainer, SFT, DopplerTrainer, DopplerSFTTrainer)
}


@pytest.mark.parametrize(
    ("bases", "first", "line"),
    [
        ((Theirs, DopplerTrainer), "Theirs comes before DopplerTrainer", "(DopplerTrainer, Theirs)"),
        ((Seq2SeqTrainer, DopplerTrainer), "Seq2SeqTrainer comes before", "(DopplerTrainer, Seq2SeqTrainer)"),
        ((Further, Ours), "Further comes before", "(Ours, Further)"),
        ((Mixin, Theirs, DopplerTrainer), "Theirs comes before", "(DopplerTrainer, Mixin, Theirs)"),
        ((SFT, DopplerSFTTrainer), "SFT comes before DopplerSFTTrainer", "(DopplerSFTTrainer, SFT)"),
    ],
)
def test_a_trainer_in_front_is_refused_and_the_other_order_is_not(tmp_path, bases, first, line):
    with refused("order-of-bases", match=first) as refusal:
        type("Mine", bases, {})
    assert isinstance(refusal.value, TypeError)
    assert f"Write `class Mine{line}`" in str(refusal.value)
    mended = type("Mine", tuple(NAMES[name] for name in re.findall(r"\w+", line)), {"__module__": "script"})
    if "S" not in line:  # Seq2SeqTrainer and SFTTrainer need arguments of their own; docs/guides/your-trainer.md has them
        trainer = trained(trainer_of(tmp_path, cls=mended, max_steps=1))
        assert trainer.privacy.ledger.steps_run == 1


def test_it_is_refused_below_such_a_class_too():
    """The class is the wrong one wherever it is in the order of bases."""

    class Fine(DopplerTrainer, Theirs):
        pass

    with refused("order-of-bases", match="Further comes before DopplerTrainer"):
        type("Mine", (Further, Fine), {})


def test_a_base_that_hides_our_check_is_refused_when_the_trainer_is_made(tmp_path):
    mine = type("Mine", (Silent, DopplerTrainer), {"__module__": "script"})
    with refused("order-of-bases", match=r"class Mine\(DopplerTrainer, Silent\)"):
        trainer_of(tmp_path, cls=mine)
    assert not (tmp_path / "out").exists()


def test_what_is_no_trainer_may_come_first(tmp_path):
    class Mine(Mixin, DopplerTrainer):
        pass

    assert all("their" in log for log in trained(trainer_of(tmp_path, cls=Mine, max_steps=1)).state.log_history)


def test_arguments_in_front_are_refused_and_the_other_order_is_not(tmp_path):
    with refused("order-of-bases", match=r"class Mine\(DopplerTrainingArguments, Seq2SeqTrainingArguments\)"):
        dataclass(type("Mine", (Seq2SeqTrainingArguments, DopplerTrainingArguments), {}))

    @dataclass
    class Mine(DopplerTrainingArguments, Seq2SeqTrainingArguments):
        pass

    args = Mine(output_dir=str(tmp_path), target_epsilon=3.0, use_cpu=True)
    assert args.max_grad_norm == arguments(tmp_path).max_grad_norm
    assert isinstance(args, TrainingArguments)
