"""Every contradictory, ineffective or unsafe argument is refused with its value and the fix."""

import dataclasses
import json
import re

import pytest
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

from doppler_hf import DopplerTrainingArguments
from doppler_hf.training_args.checks import _BREAKS_PRIVACY, refuse_what_breaks_privacy


def arguments(tmp_path, **overrides):
    return DopplerTrainingArguments(output_dir=str(tmp_path), **({"target_epsilon": 3.0} | overrides))


OWN = set(DopplerTrainingArguments.__annotations__)

# Of each kind, range and combination one; tests/training_args/test_from_trainer.py has Transformers' arguments.
REFUSED = [
    (dict(target_epsilon=None), "Exactly one of target_epsilon and noise_multiplier must be set, got None and None"),
    (dict(noise_multiplier=1.0), "must be set, got 3.0 and 1.0"),
    (dict(target_epsilon=0.0), "target_epsilon must be a finite number > 0, got 0"),
    (dict(target_epsilon=float("inf")), "got inf"),
    (dict(target_delta="1e-5"), r"target_delta must be a number, got '1e-5'\. .*, in YAML with a point"),
    (dict(per_sample_max_grad_norm=None), "per_sample_max_grad_norm must be a number, got None.*leave it out for 1.0"),
    (dict(max_tokens_per_micro_batch=64.5), "max_tokens_per_micro_batch must be a whole number, got 64.5"),
    (dict(augmentation_multiplicity=True), "augmentation_multiplicity must be a whole number, got True"),
    (dict(per_device_train_batch_size="32"), "per_device_train_batch_size must be a whole number, got '32'"),
    (dict(floating_point_safe="yes"), "floating_point_safe must be True or False, got 'yes'"),
    (dict(low_pass_filter=None), r"must be a string, got None\. .*, or leave it out for 'auto'"),
    (dict(gradient_accumulation_steps=1.5), "gradient_accumulation_steps must be a whole number ≥ 1, got 1.5. Usual is 1"),
    (dict(per_device_train_batch_size=0), "per_device_train_batch_size must be at least 1, got 0"),
    (dict(max_steps=0), "max_steps must be positive, or -1, got 0. Leave it out"),
    (dict(target_epsilon=None, noise_multiplier=-1.0), "noise_multiplier must be a finite number ≥ 0, got -1"),
    (dict(target_delta=1.5), r"target_delta must lie in \[1e-10, 1\), got 1.5"),
    (dict(target_delta=1e-30), r"target_delta must lie in \[1e-10, 1\), got 1e-30\. Set a little less than 1/N, or leave"),
    (dict(per_sample_max_grad_norm=1e-8), "per_sample_max_grad_norm must be .* ≥ 0.0001, got 1e-08"),
    (dict(max_tokens_per_micro_batch=0), "max_tokens_per_micro_batch must be at least 1, got 0"),
    (dict(augmentation_multiplicity=0), "augmentation_multiplicity must be at least 1, got 0. Leave it out"),
    (dict(adam_bc_floor=0.0), "adam_bc_floor must be a finite number > 0, got 0"),
    (dict(base_optimizer="AdamBC"), r"got 'AdamBC' \(did you mean 'adam_bc'\?\)\."),
    (dict(noise_shape="band:bands=4"), r"got 'band:bands=4' \(did you mean 'banded'\?\)\."),
    (dict(low_pass_filter="momentm"), r"got 'momentm' \(did you mean 'momentum'\?\)\."),
    (dict(optim_target_modules="all-linear", optim_args="rnak=4"), r"got 'rnak=4' \(did you mean 'rank'\?\) in"),
    (dict(low_pass_filter="b=0.1;a=1,-0.8"), "Multiply b by"),
    (dict(optim="galore_adamw", optim_target_modules="all-linear"), "Leave optim out, and switch GaLore on"),
    (dict(optim_args="rank=4"), "optim_args='rank=4' has no effect without GaLore. Switch GaLore on"),
    (dict(base_optimizer="muon", optim_target_modules="all-linear"), "optim_target_modules has no effect with .*'muon'"),
    (dict(base_optimizer="sgd", adam_bc_floor=1e-6), "adam_bc_floor=1e-06 has no effect"),
    (dict(adam_beta2=0.98, base_optimizer="sgd"), "adam_beta2=0.98 has no effect with base_optimizer='sgd'"),
    (dict(adam_epsilon=1e-6, base_optimizer="sgd"), "adam_epsilon=1e-06 has no effect with base_optimizer='sgd'"),
    (dict(adam_epsilon=1e-6, adam_bc_floor=1e-6), "adam_epsilon=1e-06 has no effect with adam_bc_floor=1e-06. Leave it out"),
    (
        dict(target_epsilon=None, noise_multiplier=0.0, floating_point_safe=True),
        "floating_point_safe=True has no effect with noise_multiplier=0. Set target_epsilon, or leave it out",
    ),
    (dict(low_pass_filter="auto:order=2"), "auto"),
    (dict(report_train_loss="public"), "one of raw, private, none"),
    (dict(report_train_loss="raw", per_sample_max_loss=2.0), "no effect with report_train_loss='raw'"),
    (dict(report_train_loss="none", train_loss_budget=0.1), "no effect with report_train_loss='none'"),
    (dict(report_train_loss="private", per_sample_max_loss=0.0), "finite number > 0, got 0"),
    (dict(report_train_loss="private", per_sample_max_loss=float("inf")), "finite number > 0, got inf"),
    (dict(report_train_loss="private", train_loss_budget=1.0), r"must lie in \(0, 1\), got 1"),
    (dict(report_train_loss="private", train_loss_budget=0.0), r"must lie in \(0, 1\), got 0"),
    (
        dict(sampling="poisson", noise_shape="banded:bands=2"),
        "sampling='poisson' cannot be used with noise_shape='banded:bands=2': .* Leave one of them out",
    ),
    (dict(max_examples_per_unit=3), "max_examples_per_unit=3 has no effect if every example is a unit"),
    (dict(disable_dp=True, target_epsilon=None, low_pass_filter="momentum"), "noise_multiplier=0"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **overrides)


# A value other than the default for every argument of our own that the stock Trainer does not have.
PRIVATE = dict(
    target_epsilon=3.0, noise_multiplier=1.0, target_delta=1e-5, allow_large_delta=True,
    train_unreached_parameters=True,
    per_sample_max_grad_norm=2.0,
    privacy_unit_column="user", max_examples_per_unit=2, clip_unit_mean=False, clipping="vanilla",
    clipping_granularity="per_layer", augmentation_multiplicity=4, grad_sample_engine="opacus", grad_sample_self_check=False,
    rehearse=False, allow_any_learning_rate=True, max_tokens_per_micro_batch=64, low_pass_filter="momentum",
    base_optimizer="sgd", adam_bc_floor=1e-6, report_train_loss="none", per_sample_max_loss=2.0, train_loss_budget=0.1,
    floating_point_safe=True, noise_seed=1, noise_shape="banded:bands=2", sampling="poisson",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(OWN - {"disable_dp", "max_grad_norm", "learning_rate"}))
def test_without_privacy_every_argument_of_ours_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}={PRIVATE[name]!r} has no effect with disable_dp=True"):
        arguments(tmp_path, **{"target_epsilon": None, "disable_dp": True, name: PRIVATE[name]})


@pytest.mark.parametrize(
    "given",
    [
        dict(max_grad_norm=0.5, data_seed=1, adam_beta2=0.98, max_steps=0),
        dict(optim="galore_adamw", optim_target_modules=["attn"], optim_args="rank=4,proj_type=reverse_std"),
    ],
)
def test_without_privacy_arguments_are_transformers(tmp_path, given):
    args = arguments(tmp_path, target_epsilon=None, disable_dp=True, **given)
    assert {name: getattr(args, name) for name in given} == given


@pytest.mark.parametrize("name", ["deepspeed", "parallelism_config"])
def test_what_this_machine_may_not_be_able_to_set_up_is_refused_too(tmp_path, name):
    args = arguments(tmp_path)
    setattr(args, name, True)
    with pytest.raises(ValueError, match=rf"{name}.*{re.escape(_BREAKS_PRIVACY[name])}"):
        refuse_what_breaks_privacy(args)


def test_deepspeed_of_a_launcher_is_refused_by_the_way_that_there_is(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"DeepSpeed cannot be used .* use FSDP \(recipes/accelerate/fsdp2.yaml\)"):
        refuse_what_breaks_privacy(args)


def test_processes_that_would_train_by_themselves_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"train together, got 2 \(WORLD_SIZE\) that would each .* On a CPU set use_cpu=True"
    ):
        arguments(tmp_path)


def test_every_field_has_help():
    assert len(OWN) == 30
    for field in dataclasses.fields(DopplerTrainingArguments):
        if field.name in OWN:
            assert field.metadata["help"], field.name


def test_another_optimizer_than_transformers_default_is_refused(tmp_path):
    default = OptimizerNames(TrainingArguments.optim).value
    for name in {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd"} - {default}:
        for given in (name, OptimizerNames(name)):
            with pytest.raises(ValueError, match=f"optim='{name}' has no effect: .*Leave optim out"):
                arguments(tmp_path, optim=given)
    assert arguments(tmp_path, target_epsilon=None, disable_dp=True, optim="sgd").optim == "sgd"
    assert arguments(tmp_path).optim is OptimizerNames(default)  # the fix


def test_an_optimizer_that_is_left_out_is_left_out_however_arguments_are_read(tmp_path):
    parser, words = HfArgumentParser(DopplerTrainingArguments), dict(output_dir=str(tmp_path), target_epsilon=3.0)
    flags = [f"--{name}={value}" for name, value in words.items()]
    (tmp_path / "args.json").write_text(json.dumps(words))
    (tmp_path / "args.yaml").write_text("".join(f"{name}: {value}\n" for name, value in words.items()))
    for read in (
        lambda: parser.parse_args_into_dataclasses(flags),
        lambda: parser.parse_dict(words),
        lambda: parser.parse_json_file(str(tmp_path / "args.json")),
        lambda: parser.parse_yaml_file(str(tmp_path / "args.yaml")),
    ):
        (args,) = read()
        assert args.optim == args.to_dict()["optim"] == TrainingArguments.optim
        assert dataclasses.replace(args, max_grad_norm=None).optim == TrainingArguments.optim
    parser.parse_dict({**words, "optim": args.to_dict()["optim"]})  # saved with all others: read again, they are no mistake
    with pytest.raises(ValueError, match="optim='sgd' has no effect"):
        parser.parse_args_into_dataclasses([*flags, "--optim=sgd"])


def test_max_grad_norm_is_hfs_without_privacy_and_off_with_it(tmp_path):
    assert arguments(tmp_path).max_grad_norm == 0.0
    assert arguments(tmp_path, target_epsilon=None, disable_dp=True).max_grad_norm == 1.0
