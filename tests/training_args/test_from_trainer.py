"""The page "From `Trainer`" names what there is, and each refusal on it is raised, for the reason that it gives."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.training_args import checks
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import ON_CPU, arguments

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "from-trainer.md").read_text()
FIELDS = {field.name: field for field in dataclasses.fields(DopplerTrainingArguments)}
# Argument → a value that is refused, and the code of the refusal.
ARGUMENTS = {
    "fp16": (True, "breaks-privacy"),
    # Transformers would first miss a package.
    "deepspeed": ({"zero_optimization": {"stage": 2}}, "breaks-privacy"),
    "parallelism_config": (object(), "breaks-privacy"),
    "torch_compile": (True, "breaks-privacy"),
    "use_liger_kernel": (True, "breaks-privacy"),
    "train_sampling_strategy": ("group_by_length", "breaks-privacy"),
    "label_smoothing_factor": (0.1, "breaks-privacy"),
    "neftune_noise_alpha": (5.0, "breaks-privacy"),
    "dataloader_drop_last": (True, "breaks-privacy"),
    "auto_find_batch_size": (True, "breaks-privacy"),
    "debug": ("underflow_overflow", "breaks-privacy"),
    "include_num_input_tokens_seen": ("all", "breaks-privacy"),
    "ignore_data_skip": (True, "breaks-privacy"),
    "skip_memory_metrics": (False, "memory-is-logged"),
    "max_grad_norm": (1.0, "gradient-rescaled"),
    "optim": ("sgd", "no-effect"),
    "enable_jit_checkpoint": (True, "jit-checkpoint"),
    "adam_beta1": (0.8, "no-effect"),
    "data_seed": (1, "no-effect"),
    "full_determinism": (True, "no-effect"),
    "torch_empty_cache_steps": (10, "no-effect"),
    "split_batches": (True, "no-effect"),
    "use_seedable_sampler": (False, "no-effect"),
    "average_tokens_across_devices": (False, "no-effect"),
    "dataloader_in_order": (False, "no-effect"),
    "length_column_name": ("words", "no-effect"),
    "ddp_find_unused_parameters": (True, "no-effect"),
    "ddp_bucket_cap_mb": (25, "no-effect"),
    "ddp_broadcast_buffers": (False, "no-effect"),
    "ddp_static_graph": (True, "no-effect"),
    "sortish_sampler": (True, "no-effect"),
}
REASONS = checks._BREAKS_PRIVACY | checks._WITHOUT_EFFECT


def with_optimizer(scheduled):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return dict(optimizers=(None, torch.optim.lr_scheduler.StepLR(optimizer, 1)) if scheduled else (optimizer, None))


@dataclasses.dataclass
class Seq2SeqArguments(DopplerTrainingArguments, Seq2SeqTrainingArguments):
    """As docs/guides/your-trainer.md makes them."""


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


# What is refused of a trainer, and its code.
OF_TRAINER = [
    ("loss-of-the-batch", dict(compute_loss_func=lambda *args, **kwargs: None)),
    ("another-optimizer", with_optimizer(False)),
    ("another-scheduler", with_optimizer(True)),
    ("streamed-data", dict(train_dataset=Dataset.from_list([{"x": 1}]).to_iterable_dataset())),
    ("repeated-rows", dict(train_dataset=Dataset.from_list([{"x": 1}]).repeat(2), trains=True)),
    ("method-without-effect", dict(cls=OwnLoss)),
    ("method-without-effect", dict(cls=OwnSampler)),
    ("method-without-effect", dict(cls=OwnBoth)),
    ("own-training-step", dict(cls=OwnStep, trains=True)),
    ("own-training-step", dict(cls=OwnBatches, trains=True)),
    ("method-without-effect", dict(cls=OwnOptimizer)),
    ("public-seed", dict(data_collator=Seeded(), trains=True)),
]


def test_every_name_on_the_page_is_there():
    known = {*FIELDS, *inspect.signature(Trainer.__init__).parameters, *dir(DopplerTrainer)}
    known |= {"Trainer", "TrainingArguments", "DopplerTrainer", "DopplerTrainingArguments"}
    known |= {
        "loss",
        "group_by_length",
        "seed",
        "resume_from_checkpoint",
        "torchrun",
        "split_batches",
        "use_seedable_sampler",
        "sortish_sampler",
        "Seq2SeqTrainingArguments",
    }
    names = re.findall(r"`([a-zA-Z_]\w*)(?:=\w+)?`", PAGE)
    assert len(names) > 60
    assert set(names) - {"True", "False"} <= known


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_that_the_page_refuses_is_refused_for_its_reason(tmp_path, name):
    value, code = ARGUMENTS[name]
    given = {"accelerator_config": {name: value}} if name in ("split_batches", "use_seedable_sampler") else {name: value}
    cls = DopplerTrainingArguments if name in {*FIELDS, *given.get("accelerator_config", ())} else Seq2SeqArguments
    with refused(code, match=f"^{name}") as refusal:
        cls(output_dir=str(tmp_path), noise_multiplier=1.0, use_cpu=ON_CPU, **given)
    if name in REASONS:
        assert REASONS[name] in str(refusal.value)


def test_all_refused_arguments_are_named_together_and_without_them_the_arguments_are_made(tmp_path):
    refused_together = dict(
        train_sampling_strategy="group_by_length", dataloader_drop_last=True, max_grad_norm=1.0, data_seed=3,
        length_column_name="words", optim="adafactor", enable_jit_checkpoint=True,
    )  # fmt: skip
    with refused("breaks-privacy") as refusal:
        arguments(tmp_path, **refused_together)
    lines = str(refusal.value).splitlines()
    assert {line.partition("=")[0] for line in lines} == set(refused_together)
    assert all(re.search(rf"leave {line.partition('=')[0]} out", line, re.IGNORECASE) for line in lines)
    arguments(tmp_path)


def test_fp16_on_a_cpu_is_replaced_as_the_message_says(tmp_path):
    with refused("breaks-privacy", match=r"set bf16=True in its place \(on a CPU, together with use_cpu=True\)"):
        arguments(tmp_path, fp16=True, use_cpu=False)
    assert arguments(tmp_path, bf16=True, use_cpu=True).bf16


def test_the_page_has_every_argument_that_is_refused():
    page = PAGE.split("## What is refused")[1]
    assert set(ARGUMENTS) >= set(REASONS)
    assert [name for name in ARGUMENTS if f"`{name}" not in page and not name.startswith("ddp_")] == []


@pytest.mark.parametrize(("code", "options"), OF_TRAINER)
def test_everything_that_the_page_refuses_of_a_trainer_is_refused_for_its_reason(tmp_path, code, options):
    options = dict(cls=DopplerTrainer, trains=False, train_dataset=text_data(), data_collator=pad) | options
    cls, then = options.pop("cls"), DopplerTrainer.train if options.pop("trains") else id
    with refused(code):
        then(cls(model=tiny_bert(), args=arguments(tmp_path, max_steps=1), **options))


def test_a_search_with_a_backend_is_refused_since_its_trials_would_depend_on_each_other(tmp_path):
    trainer = DopplerTrainer(tiny_bert(), arguments(tmp_path, max_steps=1), pad, text_data())
    with refused("search-backend"):
        trainer.hyperparameter_search(backend="optuna")


def test_a_step_that_hands_on_a_batch_is_refused_and_an_error_of_ones_own_loss_is_not_taken_for_it(tmp_path):
    options = dict(train_dataset=text_data(), data_collator=pad)
    with refused("own-training-step", match=r"OwnWeights\.training_step"):
        OwnWeights(model=tiny_bert(), args=arguments(tmp_path, max_steps=1), **options).train()

    class OwnError(OwnSteps):
        def compute_per_sample_loss(self, model, inputs):
            return inputs["nowhere"]

    with pytest.raises(KeyError, match="nowhere"):
        OwnError(model=tiny_bert(), args=arguments(tmp_path, max_steps=1), **options).train()


def test_arguments_that_lose_their_privacy_later_are_refused_and_others_have_transformers_defaults(tmp_path):
    """Such as the learning rate, which was chosen for a private run or left to be."""
    options = dict(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    later = DopplerTrainingArguments(**options, target_epsilon=3.0)
    later.disable_dp = True
    with refused("no-effect", match="^target_epsilon=3.0 .*disable_dp=True"):
        DopplerTrainer(tiny_bert(), later, pad, text_data())
    without = DopplerTrainingArguments(**options, disable_dp=True)
    stock = TrainingArguments(**options)
    for name in ("learning_rate", "max_grad_norm", "optim"):
        assert getattr(without, name) == getattr(stock, name)
    DopplerTrainer(tiny_bert(), without, pad, text_data())
