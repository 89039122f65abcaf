"""The page "From `Trainer`" names what there is, and each refusal on it is raised, for the reason that it gives."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.training_args import checks
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import arguments

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "from-trainer.md").read_text()
FIELDS = {field.name: field for field in dataclasses.fields(DopplerTrainingArguments)}
# Said in prose, since they need another library, or a machine with several GPUs.
IN_PROSE = {"deepspeed", "parallelism_config"}


def rows(header):
    """Return the cells of the table under a header."""
    table = PAGE.split(header + "\n", 1)[1].split("\n\n", 1)[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]


ARGUMENTS = [[cell.strip("`") for cell in row] for row in rows("| argument | such as | because |")]


def with_optimizer(scheduled):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return dict(optimizers=(None, torch.optim.lr_scheduler.StepLR(optimizer, 1)) if scheduled else (optimizer, None))


class OwnLoss(DopplerTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnSampler(DopplerTrainer):
    def _get_train_sampler(self, *args):
        return None


class OwnStep(DopplerTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class OwnBoth(DopplerTrainer):
    def create_optimizer_and_scheduler(self, num_training_steps):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)


class OwnSteps(DopplerTrainer):
    def training_step(self, *args):
        return super().training_step(*args)


class OwnWeights(DopplerTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs.pop("weights", None)
        return super().training_step(model, inputs, num_items_in_batch)


class OwnBatches(DopplerTrainer):
    def training_step(self, *args):
        super().training_step(*args)
        return super().training_step(*args)


class OwnOptimizer(DopplerTrainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.SGD, {"lr": 1.0}


class Seeded:
    seed = 1
    __call__ = staticmethod(pad)


OF_TRAINER = {
    "`compute_loss_func`": dict(compute_loss_func=lambda *args, **kwargs: None),
    "an optimizer in `optimizers`": with_optimizer(False),
    "a scheduler in `optimizers`": with_optimizer(True),
    "a streaming `train_dataset`": dict(train_dataset=Dataset.from_list([{"x": 1}]).to_iterable_dataset()),
    "rows that stand in `train_dataset` more than once, without `privacy_unit_column`": dict(
        train_dataset=Dataset.from_list([{"x": 1}]).repeat(2), then=lambda trainer: trainer.train()
    ),
    "an override of `compute_loss` alone": dict(cls=OwnLoss),
    "an override of `_get_train_sampler`": dict(cls=OwnSampler),
    "an override of `create_optimizer_and_scheduler`": dict(cls=OwnBoth),
    "an override of `training_step` that takes its inputs for a batch": dict(
        cls=OwnStep, then=lambda trainer: trainer.train()
    ),
    "an override of `training_step` that adds a piece twice": dict(cls=OwnBatches, then=lambda trainer: trainer.train()),
    "an override of `get_optimizer_cls_and_kwargs`": dict(cls=OwnOptimizer),
    "`hyperparameter_search`": dict(then=lambda trainer: trainer.hyperparameter_search()),
    "a collator with a `seed`": dict(data_collator=Seeded(), then=lambda trainer: trainer.train()),
}


def test_every_name_on_the_page_is_there():
    known = {*FIELDS, *inspect.signature(Trainer.__init__).parameters, *dir(DopplerTrainer)}
    known |= {"Trainer", "TrainingArguments", "DopplerTrainer", "DopplerTrainingArguments"}
    known |= {"group_by_length", "seed", "resume_from_checkpoint", "torchrun"}
    names = re.findall(r"`([a-zA-Z_]\w*)(?:=\w+)?`", PAGE)
    assert len(names) > 60
    assert set(names) - {"True", "False"} <= known


@pytest.mark.parametrize(("name", "value", "reason"), ARGUMENTS, ids=lambda cell: cell)
def test_every_argument_that_the_page_refuses_is_refused_for_its_reason(tmp_path, name, value, reason):
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        arguments(tmp_path, **{name: ast.literal_eval(value)})
    # What is one of several settings is named by itself.
    assert re.match(rf"{name}|(split_batches|use_seedable_sampler)=", str(refused.value))


def test_the_page_has_every_argument_that_is_refused():
    named = {name for name, _, _ in ARGUMENTS}
    within = {key for name, value, _ in ARGUMENTS if name == "accelerator_config" for key in ast.literal_eval(value)}
    assert set(checks._WITHOUT_EFFECT) <= named | within
    assert set(checks._BREAKS_PRIVACY) - named == IN_PROSE
    for name in IN_PROSE:
        assert f"`{name}` ({checks._BREAKS_PRIVACY[name]})" in PAGE


@pytest.mark.parametrize(("what", "reason"), rows("| what | because |"), ids=lambda cell: cell)
def test_everything_that_the_page_refuses_of_a_trainer_is_refused_for_its_reason(tmp_path, what, reason):
    options = dict(OF_TRAINER[what])
    cls, then = options.pop("cls", DopplerTrainer), options.pop("then", lambda trainer: None)
    options = dict(train_dataset=text_data(), data_collator=pad) | options
    with pytest.raises(ValueError, match=re.escape(reason)):
        then(cls(model=tiny_bert(), args=arguments(tmp_path, max_steps=1), **options))


def test_a_step_that_hands_on_a_batch_is_refused_and_an_error_of_ones_own_loss_is_not_taken_for_it(tmp_path):
    options = dict(train_dataset=text_data(), data_collator=pad)
    with pytest.raises(
        ValueError, match=r"OwnWeights\.training_step must take a list .* got a TypeError from it\. Override"
    ):
        OwnWeights(model=tiny_bert(), args=arguments(tmp_path, max_steps=1), **options).train()

    class OwnError(OwnSteps):
        def compute_per_sample_loss(self, model, inputs):
            return inputs["nowhere"]

    with pytest.raises(KeyError, match="nowhere"):
        OwnError(model=tiny_bert(), args=arguments(tmp_path, max_steps=1), **options).train()


def test_the_page_has_all_of_them():
    assert [what for what, _ in rows("| what | because |")] == list(OF_TRAINER)


def test_arguments_that_lose_their_privacy_later_are_refused_and_others_have_transformers_defaults(tmp_path):
    """Such as the learning rate, which was chosen for a private run or left to be."""
    options = dict(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    later = DopplerTrainingArguments(**options, target_epsilon=3.0)
    later.disable_dp = True
    with pytest.raises(ValueError, match=r"^target_epsilon=3.0 has no effect with disable_dp=True.* Leave one of them out"):
        DopplerTrainer(tiny_bert(), later, pad, text_data())
    without = DopplerTrainingArguments(**options, disable_dp=True)
    stock = TrainingArguments(**options)
    for name in ("learning_rate", "max_grad_norm", "optim"):
        assert getattr(without, name) == getattr(stock, name)
    DopplerTrainer(tiny_bert(), without, pad, text_data())
