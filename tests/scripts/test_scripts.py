"""The scripts from their command line to the saved model, and every recipe, offline and on tiny data."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, BertForSequenceClassification

import doppler_hf
from doppler_hf.privacy import PrivacyLedger
from scripts import causal_lm, dpo, glue, image_classification, sft, synthesize
from scripts.training.arguments import parse_args
from scripts.training.data_sources import GLUE_TASKS
from scripts.training.lora import LoraArguments
from tests.support.folders import END, write_bert, write_glue, write_gpt2, write_mnist, write_texts
from tests.support.tiers import further, thorough

ROOT = Path(__file__).parents[2]
# By the folder of a script's recipes.
SCRIPTS = {
    "glue": (glue, glue.GlueArguments),
    "image": (image_classification, image_classification.ImageArguments),
    "causal_lm": (causal_lm, causal_lm.CausalLMArguments),
    "sft": (sft, sft.SFTArguments),
    "dpo": (dpo, dpo.DPOArguments),
    "synthesize": (synthesize, synthesize.SynthesisArguments),
}
RECIPES = [path for path in sorted(ROOT.glob("recipes/*/*.yaml")) if path.parent.name in SCRIPTS]
# GPT-2's layers are transposed; PEFT sees it, adapts itself and says so.
ADAPTED_GPT2 = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
SIZES = ["--image_size=8", "--patch_size=4", "--hidden_size=16", "--num_layers=1", "--num_heads=2"]
PRIVATE = ["--noise_multiplier=1.0", "--per_sample_max_grad_norm=1.0", "--low_pass_filter=first-order-v1"]


pytestmark = pytest.mark.usefixtures("own_caches")


def results_of(script, out, *flags):
    """Return what a script finds in two steps."""
    script.main([*flags, f"--output_dir={out}", "--use_cpu", "--report_to=none", "--max_steps=2", "--save_strategy=no"])
    return json.loads((out / "all_results.json").read_text())


# Runs each script as a file, with the paths and the modules of this repository that a new process has.
AS_FILES = """
import contextlib, io, runpy, sys
paths = list(sys.path)
for name in sys.argv[1:]:
    sys.path[:], sys.argv = paths, [name, "--help"]
    for module in [each for each in sys.modules if each.partition(".")[0] in ("doppler_hf", "scripts")]:
        del sys.modules[module]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(name, run_name="__main__")
    assert "--target_epsilon" in printed.getvalue(), name
"""


def test_scripts_are_started_as_files_from_anywhere_without_an_installation(tmp_path):
    """As `accelerate launch` starts them; -I: no path but those of Python and of its packages."""
    names = [str(ROOT / "scripts" / Path(script.__file__).name) for script, _ in SCRIPTS.values()]
    done = subprocess.run([sys.executable, "-I", "-c", AS_FILES, *names], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LORA = [(), ("--lora_r=2",), ("--lora_r=2", "--lora_target_modules=key,value")]


@pytest.mark.parametrize(
    ("task_name", "lora"),
    further([*itertools.product(["sst2", "stsb"], LORA)], quick=[("sst2", LORA[0]), ("stsb", LORA[1])]),
)
def test_glue(tmp_path, task_name, lora):
    out, data, bert = tmp_path / "out", write_glue(tmp_path / "data", task_name), write_bert(tmp_path / "bert")
    flags = [f"--task_name={task_name}", f"--dataset_dir={data}", f"--model_name_or_path={bert}"]
    sizes = ["--per_device_train_batch_size=8", "--gradient_accumulation_steps=2"]
    results = results_of(glue, out, *flags, *sizes, *PRIVATE, *lora)
    assert all(np.isfinite(results[f"eval_{name}"]) for name in GLUE_TASKS[task_name].metrics)
    assert (out / "tokenizer.json").is_file()
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (out / weights).is_file()
    if not lora:
        assert BertForSequenceClassification.from_pretrained(out).num_labels == GLUE_TASKS[task_name].num_labels


@pytest.mark.parametrize(
    "flags", [PRIVATE, *thorough(["--disable_dp"], [*PRIVATE, "--lora_r=2", "--lora_target_modules=all-linear"])]
)
def test_image_classification(tmp_path, flags):
    images = write_mnist(tmp_path / "images", train=96, test=12, shape=(8, 8))
    sizes = ["--per_device_train_batch_size=32", *SIZES]
    results = results_of(image_classification, tmp_path / "out", f"--dataset_dir={images}", *sizes, *flags)
    assert 0 <= results["eval_accuracy"] <= 1
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(
    "flags", [("--lora_r=2",), *thorough(((),), (("--lora_r=2", "--lora_target_modules=c_attn,c_proj"),))]
)
@ADAPTED_GPT2
def test_causal_lm(tmp_path, flags):
    out, texts, gpt2 = tmp_path / "out", write_texts(tmp_path / "texts"), write_gpt2(tmp_path / "gpt2")
    given = [f"--dataset_dir={texts}", "--text_column=review", f"--model_name_or_path={gpt2}", "--max_seq_length=16"]
    sizes = ["--per_device_train_batch_size=4", "--gradient_accumulation_steps=2"]
    results = results_of(causal_lm, out, *given, *sizes, *PRIVATE, *flags)
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert PrivacyLedger.load(out).statement.num_units == 24  # a row is an example
    load = AutoPeftModelForCausalLM if flags else AutoModelForCausalLM
    assert (out / ("adapter_model.safetensors" if flags else "model.safetensors")).is_file()
    state, start = (loader.from_pretrained(folder).state_dict() for loader, folder in
                    ((load, out), (AutoModelForCausalLM, gpt2)))  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.pad_token_id, tokenizer.padding_side) == (END, "right")
    if flags:
        assert all(torch.any(weight != 0) for name, weight in state.items() if "lora_B" in name)
        assert sum("lora_B" in name for name in state) == (1 if len(flags) == 1 else 3)
    else:
        assert not torch.equal(state["lm_head.weight"], start["lm_head.weight"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_and_names_its_own_launch_line(path, tmp_path):
    script, arguments = SCRIPTS[path.parent.name]
    config = {sft: "DopplerSFTConfig", dpo: "DopplerDPOConfig"}.get(script, "DopplerTrainingArguments")
    if script in (sft, dpo):
        pytest.importorskip("trl", reason="the extra trl is not installed")
    args, _, training_args = parse_args(
        arguments, LoraArguments, getattr(doppler_hf, config), argv=[str(path), "--use_cpu", f"--output_dir={tmp_path}"]
    )
    assert training_args.disable_dp != (training_args.target_epsilon is not None)
    assert isinstance(training_args.learning_rate, float) or "learning_rate" not in path.read_text()
    assert script is not glue or args.task_name in GLUE_TASKS
    relative = path.relative_to(ROOT)
    header = path.read_text().splitlines()[:3]
    assert header[0] == f"# Launch:   accelerate launch scripts/{Path(script.__file__).name} {relative}"
    assert header[1].startswith("# Hardware: ")
    assert header[2].startswith("# Metric: ")
    assert f"\noutput_dir: runs/{path.stem}\n" in path.read_text()
