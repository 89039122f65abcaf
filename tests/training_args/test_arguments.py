"""Every contradictory, ineffective or unsafe argument is refused with its value and the fix."""

import dataclasses
import json

import pytest
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

from doppler_hf import DopplerTrainingArguments
from tests.support.refusals import refused


def arguments(tmp_path, **overrides):
    return DopplerTrainingArguments(output_dir=str(tmp_path), **({"target_epsilon": 3.0} | overrides))


OWN = set(DopplerTrainingArguments.__annotations__)

# Of each kind, range and combination one; tests/training_args/test_from_trainer.py has Transformers' arguments.
REFUSED = [
    (dict(target_epsilon=None), "one-of-two", "None and .*None"),
    (dict(noise_multiplier=1.0), "one-of-two", "3.0 and .*1.0"),
    (dict(target_epsilon=0.0), "out-of-range", "^target_epsilon .*0"),
    (dict(target_epsilon=float("inf")), "out-of-range", "inf"),
    (dict(target_delta="1e-5"), "wrong-type", "^target_delta .*'1e-5'.* YAML"),
    (dict(per_sample_max_grad_norm=None), "wrong-type", "^per_sample_max_grad_norm .*None.*1.0"),
    (dict(max_tokens_per_micro_batch=64.5), "wrong-type", "^max_tokens_per_micro_batch .*64.5"),
    (dict(augmentation_multiplicity=True), "wrong-type", "^augmentation_multiplicity .*True"),
    (dict(per_device_train_batch_size="32"), "wrong-type", "^per_device_train_batch_size .*'32'"),
    (dict(seed="a"), "wrong-type", "^seed .*'a'"),
    (dict(num_train_epochs="3"), "wrong-type", "^num_train_epochs .*'3'"),
    (dict(floating_point_safe="yes"), "wrong-type", "^floating_point_safe .*'yes'"),
    (dict(low_pass_filter=None), "wrong-type", "^low_pass_filter .*None.*'auto'"),
    (dict(gradient_accumulation_steps=1.5), "out-of-range", "^gradient_accumulation_steps .*1.5"),
    (dict(per_device_train_batch_size=0), "out-of-range", "^per_device_train_batch_size .*0"),
    (dict(max_steps=0), "out-of-range", "^max_steps .*0"),
    (dict(target_epsilon=None, noise_multiplier=-1.0), "out-of-range", "^noise_multiplier .*-1"),
    (dict(target_delta=1.5), "out-of-range", "^target_delta .*1.5"),
    (dict(target_delta=1e-30), "out-of-range", "^target_delta .*1e-30"),
    (dict(per_sample_max_grad_norm=1e-8), "out-of-range", "^per_sample_max_grad_norm .*0.0001; .*1e-08"),
    (dict(max_tokens_per_micro_batch=0), "out-of-range", "^max_tokens_per_micro_batch .*0"),
    (dict(augmentation_multiplicity=0), "out-of-range", "^augmentation_multiplicity .*0"),
    (dict(adam_bc_floor=0.0), "out-of-range", "^adam_bc_floor .*0"),
    (dict(base_optimizer="AdamBC"), "unknown-value", r"'AdamBC' .*'adam_bc'\?"),
    (dict(noise_shape="band:bands=4"), "not-a-noise-shape", r"'band:bands=4' .*'banded'\?"),
    (dict(low_pass_filter="momentm"), "no-such-filter", r"'momentm' .*'momentum'\?"),
    (dict(optim_target_modules="all-linear", optim_args="rnak=4"), "unknown-option", r"'rnak=4' .*'rank'\?"),
    (dict(low_pass_filter="b=0.1;a=1,-0.8"), "wrong-gain", "b by"),
    (dict(optim="galore_adamw", optim_target_modules="all-linear"), "no-effect", "optim_target_modules"),
    (dict(optim_args="rank=4"), "no-effect", "^optim_args='rank=4' .*optim_target_modules"),
    (dict(base_optimizer="muon", optim_target_modules="all-linear"), "no-effect", "^optim_target_modules .*'muon'"),
    (dict(base_optimizer="sgd", adam_bc_floor=1e-6), "no-effect", "^adam_bc_floor=1e-06"),
    (dict(base_optimizer="sgd", learning_rate=None), "no-learning-rate", "with base_optimizer='sgd'.* Set learning_rate"),
    (dict(optim_target_modules="all-linear", learning_rate=None), "no-learning-rate", "with GaLore.* Set learning_rate"),
    (dict(label_smoothing_factor=0.1), "breaks-privacy", "label_smoothing=0.1, reduction='none'"),
    (
        dict(warmup_steps=0.1, lr_scheduler_type="constant"), "no-effect",
        "^warmup_steps=0.1 .*'constant'. Set lr_scheduler_type='constant_with_warmup'",
    ),
    (
        dict(warmup_steps=5, lr_scheduler_type="greedy", eval_strategy="steps", eval_steps=2),
        "no-effect", "^warmup_steps=5 .*'greedy'",
    ),
    (dict(adam_beta2=0.98, base_optimizer="sgd"), "no-effect", "^adam_beta2=0.98 .*base_optimizer='sgd'"),
    (dict(adam_epsilon=1e-6, base_optimizer="sgd"), "no-effect", "^adam_epsilon=1e-06 .*base_optimizer='sgd'"),
    (dict(adam_epsilon=1e-6, adam_bc_floor=1e-6), "no-effect", "^adam_epsilon=1e-06 .*adam_bc_floor=1e-06"),
    (
        dict(target_epsilon=None, noise_multiplier=0.0, floating_point_safe=True),
        "no-effect", "^floating_point_safe=True .*noise_multiplier=0",
    ),
    (dict(low_pass_filter="auto:order=2"), "no-such-filter", "auto"),
    (dict(report_train_loss="public"), "unknown-value", "raw, private, none"),
    (dict(report_train_loss="raw", per_sample_max_loss=2.0), "no-effect", "report_train_loss='raw'"),
    (dict(report_train_loss="none", train_loss_budget=0.1), "no-effect", "report_train_loss='none'"),
    (dict(report_train_loss="private", per_sample_max_loss=0.0), "out-of-range", "^per_sample_max_loss .*0"),
    (dict(report_train_loss="private", per_sample_max_loss=float("inf")), "out-of-range", "^per_sample_max_loss .*inf"),
    (dict(report_train_loss="private", train_loss_budget=1.0), "out-of-range", "^train_loss_budget .*1"),
    (dict(report_train_loss="private", train_loss_budget=0.0), "out-of-range", "^train_loss_budget .*0"),
    (
        dict(sampling="poisson", noise_shape="banded:bands=2"),
        "poisson-with-shaped-noise", "^sampling='poisson' .*noise_shape='banded:bands=2'",
    ),
    (dict(max_examples_per_unit=3), "no-effect", "^max_examples_per_unit=3"),
    (dict(disable_dp=True, target_epsilon=None, low_pass_filter="momentum"), "no-effect", "noise_multiplier=0"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "code", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(tmp_path, overrides, code, said):
    with refused(code, match=said):
        arguments(tmp_path, **overrides)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("epsilon", "target_epsilon"), ("target_eps", "target_epsilon"), ("delta", "target_delta"),
        ("sigma", "noise_multiplier"), ("noise_multipler", "noise_multiplier"), ("l2_norm_clip", "per_sample_max_grad_norm"),
        ("per_example_max_grad_norm", "per_sample_max_grad_norm"), ("learning_rat", "learning_rate"),
    ],
)  # fmt: skip
def test_an_argument_by_another_librarys_name_is_refused_with_the_name_here(tmp_path, name, meant):
    other = {"target_epsilon": None} if meant == "noise_multiplier" else {}
    with refused("unknown-argument", match=rf"unexpected keyword argument '{name}' \(did you mean '{meant}'\?\)"):
        arguments(tmp_path, **other, **{name: 1e-3})
    assert getattr(arguments(tmp_path, **other | {meant: 1e-3}), meant) == 1e-3  # as proposed


# A value other than the default for every argument of our own that the stock Trainer does not have.
PRIVATE = dict(
    target_epsilon=3.0, noise_multiplier=1.0, target_delta=1e-5, allow_large_delta=True,
    train_unreached_parameters=True,
    per_sample_max_grad_norm=2.0,
    privacy_unit_column="user", max_examples_per_unit=2, clip_unit_mean=False, metrics_per_user=True, clipping="vanilla",
    clipping_granularity="per_layer", augmentation_multiplicity=4, grad_sample_engine="opacus", grad_sample_self_check=False,
    rehearse=False, allow_any_learning_rate=True, max_tokens_per_micro_batch=64, low_pass_filter="momentum",
    base_optimizer="sgd", adam_bc_floor=1e-6, report_train_loss="none", per_sample_max_loss=2.0, train_loss_budget=0.1,
    floating_point_safe=True, noise_seed=1, noise_shape="banded:bands=2", sampling="poisson",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", sorted(OWN - {"disable_dp", "max_grad_norm", "learning_rate", "logging_nan_inf_filter", "plot_training_curve"})
)
def test_without_privacy_every_argument_of_ours_is_refused(tmp_path, name):
    with refused("no-effect", match=f"{name}={PRIVATE[name]!r} .*disable_dp=True"):
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


def test_deepspeed_of_a_launcher_is_refused_by_the_way_that_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with refused("breaks-privacy", match="recipes/accelerate/fsdp2.yaml"):
        arguments(tmp_path)


def test_processes_that_would_train_by_themselves_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("processes-sample-alone", match="use_cpu=True"):
        arguments(tmp_path)


def test_every_field_has_help():
    assert len(OWN) == 33
    for field in dataclasses.fields(DopplerTrainingArguments):
        if field.name in OWN:
            assert field.metadata["help"], field.name


def test_another_optimizer_than_transformers_default_is_refused(tmp_path):
    default = OptimizerNames(TrainingArguments.optim).value
    for name in {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd"} - {default}:
        for given in (name, OptimizerNames(name)):
            with refused("no-effect", match=f"optim='{name}'"):
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
    with refused("no-effect", match="optim='sgd'"):
        parser.parse_args_into_dataclasses([*flags, "--optim=sgd"])


def test_losses_are_tested_for_nan_where_they_can_be_nan(tmp_path):
    assert not arguments(tmp_path).logging_nan_inf_filter
    assert arguments(tmp_path, report_train_loss="raw").logging_nan_inf_filter
    assert arguments(tmp_path, target_epsilon=None, disable_dp=True).logging_nan_inf_filter
    assert arguments(tmp_path, logging_nan_inf_filter=True).logging_nan_inf_filter


def test_max_grad_norm_is_hfs_without_privacy_and_off_with_it(tmp_path):
    assert arguments(tmp_path).max_grad_norm == 0.0
    assert arguments(tmp_path, target_epsilon=None, disable_dp=True).max_grad_norm == 1.0


def test_an_output_dir_that_cannot_be_a_folder_is_refused_with_the_file_in_its_place(tmp_path):
    file, link = tmp_path / "model", tmp_path / "link"
    file.write_text("")
    link.symlink_to(tmp_path / "nowhere")
    for folder, there in ((file, file), (file / "out" / "first", file), (link, link)):
        with refused("output-dir-is-a-file", match=f"because {there} is not one"):
            DopplerTrainingArguments(str(folder), target_epsilon=3.0, use_cpu=True)
        with refused("output-dir-is-a-file"):
            DopplerTrainingArguments(str(folder), disable_dp=True, use_cpu=True)
    (tmp_path / "folder").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "folder")
    for folder in (tmp_path / "new" / "out", tmp_path / "folder", link / "out"):
        assert DopplerTrainingArguments(str(folder), target_epsilon=3.0, use_cpu=True).output_dir == str(folder)
