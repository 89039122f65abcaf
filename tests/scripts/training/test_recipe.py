"""Which script a recipe is for, and what a flag overrules in it."""

import dataclasses
import re
from pathlib import Path

import pytest

from doppler_hf import DopplerTrainingArguments
from scripts.causal_lm import CausalLMArguments
from scripts.image_classification import ImageArguments
from scripts.training.arguments import parse_args
from scripts.training.lora import LoraArguments
from scripts.training.recipe import KINDS, command_of
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]
OF_PRIVACY = ["clipping", "low_pass_filter", "noise_shape", "per_sample_max_grad_norm", "target_epsilon"]


def test_flags_count_beside_the_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: bert\nmax_seq_length: 8\nlr_scheduler_kwargs: {min_lr: 1}\n")
    with refused("script-not-clear", match="fit glue and causal_lm alike"):
        command_of([str(path), "--use_cpu"])
    words = [str(path), "--use_cpu", "--max_seq_length=4", "--task_name=rte"]
    assert command_of(words) == [str(ROOT / "scripts" / "glue.py"), *words]
    for former, name in (("causal_lm", "causal_lm"), ("images", "image_classification")):
        with pytest.warns(FutureWarning, match=rf"--script scripts/{name}\.py"):
            assert command_of([*words[:-1], f"--workload={former}"]) == [str(ROOT / "scripts" / f"{name}.py"), *words[:-1]]


RECIPES = sorted(path for path in ROOT.glob("recipes/*/*.yaml") if path.parent.name != "accelerate")
# These fit several of the scripts that are told apart, or none of them.
NAMED = {"cifar10-vit-eps2", *(path.stem for path in RECIPES if path.parent.name in ("dpo", "sft", "synthesize"))}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_finds_the_script_of_its_launch_line_or_says_to_name_it(path):
    (of_header,) = re.findall(r"accelerate launch (scripts/\w+\.py) ", path.read_text())
    assert (ROOT / of_header).is_file()
    if path.stem in NAMED:
        with refused("script-not-clear", match=r"--script scripts/NAME\.py RECIPE"):
            command_of([str(path)])
    else:
        assert command_of([str(path)]) == [str(ROOT / of_header), str(path)]


def test_what_no_script_has_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("task_name: sst2\npooling: mean\nmodel_name_or_path: bert\nstray: [1]\n")
    with refused(
        "script-not-clear", match="none of glue, causal_lm, image_classification, and none of them has stray, pairs"
    ):
        command_of([str(path), "--image_size=8", "--pairs=3"])
    with refused("script-not-clear", match="glue and causal_lm and image_classification alike"):
        command_of([])
    with refused("recipe-not-yaml", match=r"nowhere\.yaml"):
        command_of([str(tmp_path / "nowhere.yaml")])


@pytest.mark.parametrize(
    ("kind", "path", "flag", "left_out"),
    [
        ("image_classification", "image/digits-eps8", "dataset_dir=here", ["dataset_name"]),
        ("causal_lm", "causal_lm/yelp-gpt2-lora-eps8", "dataset_dir=here", ["validation_split"]),
        ("glue", "glue/sst2-minilm-lora-all-eps3", "lora_r=0", ["lora_target_modules"]),
        (
            "image_classification",
            "image/digits-eps8",
            "model_name_or_path=vit",
            ["hidden_size", "image_size", "num_heads", "num_layers", "patch_size"],
        ),
        ("glue", "glue/sst2-lp-adambc-eps3", "disable_dp=true", OF_PRIVACY),
    ],
)
def test_a_flag_overrules_what_it_leaves_without_effect_in_the_recipe(caplog, tmp_path, kind, path, flag, left_out):
    path = ROOT / "recipes" / f"{path}.yaml"
    flags = ["--use_cpu", f"--output_dir={tmp_path}"]
    types = (KINDS[kind][1], LoraArguments, DopplerTrainingArguments)
    owners = parse_args(*types, argv=[str(path), *flags, f"--{flag}"])
    said = [message.split("=")[0] for message in caplog.messages if "of the recipe is left out: it has no effect" in message]
    assert sorted(said) == left_out
    for owner in owners:
        for field in dataclasses.fields(owner):
            assert field.name not in left_out or getattr(owner, field.name) == field.default
    # Inside one recipe, or on one command line, it can be fixed, and is refused.
    beside = tmp_path / "recipe.yaml"
    beside.write_text(f"{path.read_text()}\n{flag.replace('=', ': ')}\n")
    with refused("no-effect", match=f"^({'|'.join(left_out)})=.*{flag.split('=')[0]}="):
        parse_args(*types, argv=[str(beside), *flags])


@pytest.mark.parametrize(
    ("arguments", "options", "names"),
    [
        (LoraArguments, {"lora_alpha": 32}, "lora_alpha=32 .*lora_r=0"),
        (
            ImageArguments,
            {"num_heads": 4, "model_name_or_path": "vit"},
            "num_heads=4 .*model_name_or_path='vit'",
        ),
        (
            CausalLMArguments,
            {"model_name_or_path": "gpt2", "validation_split": "test[:9]", "dataset_dir": "here"},
            "validation_split=.*dataset_dir='here'",
        ),
    ],
)
def test_what_another_argument_overrules_is_refused(arguments, options, names):
    with refused("no-effect", match=names):
        arguments(**options)
