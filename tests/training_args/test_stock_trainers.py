"""A trainer that would train without privacy is not made with private arguments, whatever way they have come."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import arguments, weights


class Own(Trainer):
    """A trainer of one's own, which forgets to derive from ours."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@dataclasses.dataclass
class Both(DopplerTrainingArguments, Seq2SeqTrainingArguments):
    """Both, in one line."""


def loaded(args, folder):
    torch.save(args, folder / "training_args.bin")
    return torch.load(folder / "training_args.bin", weights_only=False)


def parsed(args, folder):
    given = {name: value for name, value in json.loads(args.to_json_string()).items() if value is not None}
    fields = {field.name for field in dataclasses.fields(args) if field.init}
    (found,) = HfArgumentParser(type(args)).parse_dict({name: given[name] for name in given.keys() & fields})
    return found


# How arguments are passed on.
WAYS = {
    "themselves": lambda args, folder: args,
    "copied": lambda args, folder: copy.copy(args),
    "copied deeply": lambda args, folder: copy.deepcopy(args),
    "replaced": lambda args, folder: dataclasses.replace(args, seed=3),
    "pickled": lambda args, folder: pickle.loads(pickle.dumps(args)),
    "training_args.bin": loaded,
    "parsed": parsed,
}


def made(cls, args):
    return cls(model=tiny_bert(), args=args, train_dataset=text_data(), data_collator=pad)


@pytest.mark.parametrize("way", WAYS)
def test_private_arguments_are_refused_by_other_trainers_and_taken_by_ours(tmp_path, way):
    args = WAYS[way](arguments(tmp_path, max_steps=1), tmp_path)
    for cls in (Trainer, Own):
        with refused("stock-trainer", match="DopplerTrainingArguments"):
            made(cls, args)
    trainer = made(DopplerTrainer, args)
    # Also those that ours has used, before and after it was made.
    with refused("stock-trainer", match="DopplerTrainer, DopplerSFTTrainer or DopplerDPOTrainer"):
        made(Trainer, trainer.args)
    trainer.train()
    assert trainer.privacy.ledger.steps_run == 1
    with refused("stock-trainer", match="disable_dp=True"):
        made(Trainer, WAYS[way](trainer.args, tmp_path))


def test_the_refusal_comes_before_any_step_and_names_the_class(tmp_path):
    model = tiny_bert()
    before = copy.deepcopy(model.state_dict())
    args = Both(str(tmp_path), noise_multiplier=1.0, use_cpu=True, report_to="none", learning_rate=1e-3)
    with refused("stock-trainer", match="^Both"):
        Seq2SeqTrainer(model=model, args=args, train_dataset=text_data(), data_collator=pad)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_trainer_of_ours_that_was_not_made_lets_no_other_one_through(tmp_path):
    args = arguments(tmp_path)
    with refused("loss-of-the-batch", match="compute_loss_func"):
        DopplerTrainer(tiny_bert(), args, pad, text_data(), compute_loss_func=lambda *_: None)
    with pytest.raises(RuntimeError, match="model"):
        DopplerTrainer(None, args, pad, text_data())
    with refused("stock-trainer"):
        made(Trainer, args)


def test_the_mend_of_the_message_trains_without_privacy(tmp_path):
    """As `Trainer` does with its own arguments; of several micro-batches `test_baseline_accumulation` speaks."""
    args = arguments(tmp_path, disable_dp=True, noise_multiplier=None, max_steps=2, gradient_accumulation_steps=1)
    trainers = [made(cls, args) for cls in (Trainer, DopplerTrainer)]
    for trainer in trainers:
        trainer.train()
    torch.testing.assert_close(*map(weights, trainers), rtol=0, atol=0)


def test_what_shows_arguments_is_not_in_the_way(tmp_path):
    args = arguments(tmp_path)
    assert "noise_multiplier=1.0" in str(args)
    assert args.to_dict()["noise_multiplier"] == args.to_sanitized_dict()["noise_multiplier"] == 1.0
    assert args.train_batch_size == 4
    assert args.get_warmup_steps(10) == 0
    assert args == copy.deepcopy(args)
