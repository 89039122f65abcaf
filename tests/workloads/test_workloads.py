"""Which kind a recipe is of, and what each kind builds: model, data, and what goes with them."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from peft.tuners.lora import LoraLayer
from sklearn.datasets import load_digits
from transformers import AutoTokenizer, EvalPrediction

from doppler_hf import DopplerTrainer
from doppler_hf.training_args.checks import NoEffectError
from doppler_hf.workloads import glue, images, language_model, recipe
from doppler_hf.workloads.lora import LoraArguments
from doppler_hf.workloads.recipe import parse_recipe
from tests.support.folders import END, write_bert, write_glue, write_gpt2, write_mnist, write_texts

ROOT = Path(__file__).parents[2]
OF_PRIVACY = ["clipping", "low_pass_filter", "noise_shape", "per_sample_max_grad_norm", "target_epsilon"]
DIGITS = ["--dataset_name=digits", "--image_size=8", "--patch_size=4", "--hidden_size=16", "--num_layers=1", "--num_heads=2"]


pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def common(tmp_path):
    return ["--use_cpu", "--report_to=none", "--noise_multiplier=1", f"--output_dir={tmp_path / 'out'}"]


@pytest.fixture
def kinds_only(monkeypatch):
    """Each kind builds its own name and arguments."""
    for kind, (arguments, _) in recipe.KINDS.items():
        monkeypatch.setitem(recipe.KINDS, kind, (arguments, lambda args, *_, kind=kind: (kind, args)))


@pytest.mark.usefixtures("kinds_only")
def test_flags_count_beside_the_recipe_and_override_it(common, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: bert\nmax_seq_length: 8\nlr_scheduler_kwargs: {min_lr: 1}\n")
    with pytest.raises(ValueError, match=r"fit several workloads: glue, causal_lm\."):
        parse_recipe([str(path), *common])
    (kind, args), training_args = parse_recipe([str(path), *common, "--max_seq_length=4", "--task_name=rte"])
    assert (kind, args) == ("glue", glue.GlueArguments("rte", "bert", max_seq_length=4))
    assert training_args.lr_scheduler_kwargs == {"min_lr": 1}


@pytest.mark.usefixtures("kinds_only")
def test_what_no_kind_has_is_named(common, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("task_name: sst2\npooling: mean\nmodel_name_or_path: bert\nstray: [1]\n")
    message = r"^Recipe and flags fit no workload\. Choose one of glue, causal_lm, images with --workload\.$"
    with pytest.raises(ValueError, match=message):
        parse_recipe([str(path), *common, "--image_size=8"])
    with pytest.raises(ValueError, match=r"recipe\.yaml has unknown arguments: 'stray'\."):
        parse_recipe(["--workload=glue", str(path), *common])
    with pytest.raises(ValueError, match=r"unknown arguments: 'lerning_rate' \(did you mean learning_rate"):
        parse_recipe(["--workload=images", *common, "--lerning_rate=1"])
    with pytest.raises(ValueError, match=r"^--workload must be one of glue, causal_lm, images, got 'audio'\.$"):
        parse_recipe(["--workload=audio", *common])
    with pytest.raises(ValueError, match=r"several workloads: glue, causal_lm, images\. Choose one of"):
        parse_recipe([])
    with pytest.raises(ValueError, match=r"The recipe must be a YAML file, got .*nowhere\.yaml\."):
        parse_recipe([str(tmp_path / "nowhere.yaml"), *common])


def test_images(common):
    workload, training_args = parse_recipe([*DIGITS, *common])
    assert (len(workload.train_dataset), {name: len(rows) for name, rows in workload.eval_datasets.items()}) == (
        1442,
        {"eval": 355},
    )
    assert workload.eval_dataset is workload.eval_datasets["eval"]
    digits = load_digits()
    batch = workload.train_dataset[:3]
    assert batch["labels"] == digits.target[:3].tolist()
    grey = torch.tensor(np.rint(digits.images[:3, None] * 255 / 16), dtype=torch.float32)
    torch.testing.assert_close(batch["pixel_values"], grey / 127.5 - 1, rtol=0, atol=1e-6)  # mean and deviation one half
    assert not training_args.remove_unused_columns
    assert workload.data_collator is None
    assert workload.processing_class.size["height"] == 8
    config = workload.model.config
    assert (config.num_labels, config.label2id["9"], config.id2label[9]) == (10, 9, "9")
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.patch_size) == (16, 64, 1, 4)
    prediction = EvalPrediction(predictions=np.eye(10)[[1, 2]], label_ids=np.array([1, 3]))
    assert workload.compute_metrics(prediction) == {"accuracy": 0.5}


@pytest.mark.parametrize(("more", "scaling"), [([], 3.0), (["--use_rslora=true"], 6.0)])
def test_adapters_are_scaled(common, tmp_path, more, scaling):
    flags = [
        f"--dataset_dir={write_glue(tmp_path / 'sst2', 'sst2')}",
        f"--model_name_or_path={write_bert(tmp_path / 'bert')}",
    ]
    adapters = ["--lora_r=4", "--lora_alpha=12", "--lora_target_modules=query", *more]
    workload, _ = parse_recipe(["--task_name=sst2", *flags, *adapters, *common])
    layers = [module for module in workload.model.modules() if isinstance(module, LoraLayer)]
    assert [layer.scaling["default"] for layer in layers] == [pytest.approx(scaling)] * 2


def test_glue(common, tmp_path):
    folder = write_glue(tmp_path / "mnli", "mnli")
    names = ["entailment", "neutral", "contradiction"]
    for path in folder.glob("*.parquet"):
        rows = Dataset.from_parquet(str(path), keep_in_memory=True)
        rows.cast_column("label", ClassLabel(names=names)).to_parquet(path)
    flags = ["--task_name=mnli", f"--dataset_dir={folder}", f"--model_name_or_path={write_bert(tmp_path / 'bert')}"]
    workload, training_args = parse_recipe([*flags, "--max_seq_length=10", *common])
    assert list(workload.eval_datasets) == ["eval_matched", "eval_mismatched"]
    assert workload.eval_dataset is workload.eval_datasets["eval_matched"]
    assert [len(rows) for rows in (workload.train_dataset, *workload.eval_datasets.values())] == [48, 12, 12]
    for rows in (workload.train_dataset, *workload.eval_datasets.values()):
        assert set(rows.column_names) == {"label", "input_ids", "token_type_ids", "attention_mask"}
    lengths = {len(tokens) for tokens in workload.train_dataset["input_ids"]}
    assert max(lengths) == 10  # cut
    assert len(lengths) > 1  # and not padded
    batch = workload.data_collator([workload.train_dataset[row] for row in range(8)])
    assert batch["input_ids"].shape == (8, 10)
    config = workload.model.config
    assert (config.num_labels, config.problem_type, config.pad_token_id) == (3, "single_label_classification", 0)
    assert (list(config.id2label.values()), config.label2id["contradiction"]) == (names, 2)
    assert training_args.remove_unused_columns
    prediction = EvalPrediction(predictions=np.eye(3), label_ids=np.array([0, 1, 1]))
    assert workload.compute_metrics(prediction) == {"accuracy": pytest.approx(2 / 3)}

    (folder / "validation_matched.parquet").unlink()
    workload, _ = parse_recipe([*flags, *common])
    assert list(workload.eval_datasets) == ["eval_mismatched"]


def test_glue_pads_on_the_right_whatever_the_tokenizer_was_saved_with(common, tmp_path):
    bert = write_bert(tmp_path / "bert")
    AutoTokenizer.from_pretrained(bert, padding_side="left").save_pretrained(bert)
    flags = ["--task_name=rte", f"--dataset_dir={write_glue(tmp_path / 'rte', 'rte')}", f"--model_name_or_path={bert}"]
    workload, _ = parse_recipe([*flags, *common])
    batch = workload.data_collator([workload.train_dataset[row] for row in range(8)])
    assert not batch["attention_mask"].all()  # some are padded
    assert batch["attention_mask"][:, 0].all()


def test_causal_lm(common, tmp_path):
    flags = [f"--dataset_dir={write_texts(tmp_path / 'texts')}", f"--model_name_or_path={write_gpt2(tmp_path / 'gpt2')}"]
    workload, _ = parse_recipe([*flags, "--text_column=review", "--max_seq_length=16", "--dtype=bfloat16", *common])
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.bfloat16}
    assert (len(workload.train_dataset), [*workload.eval_datasets], len(workload.eval_dataset)) == (24, ["eval"], 6)
    assert set(workload.train_dataset.column_names) == {"input_ids", "attention_mask", "labels"}
    empty, long, short = (workload.train_dataset[row] for row in range(3))
    assert empty["labels"] == [END]
    assert (len(long["labels"]), END in long["labels"]) == (16, False)
    assert (short["labels"], short["labels"][-1]) == (short["input_ids"], END)
    batch = workload.data_collator([empty, long])
    assert batch["labels"][0].tolist() == [END] + [-100] * 15
    assert workload.compute_metrics is None
    assert workload.processing_class.padding_side == "right"


def test_the_column_of_units_reaches_the_trainer(common, tmp_path):
    write_texts(tmp_path / "texts")
    flags = [
        f"--dataset_dir={tmp_path / 'texts'}",
        "--text_column=review",
        f"--model_name_or_path={write_gpt2(tmp_path / 'gpt2')}",
    ]
    workload, _ = parse_recipe([*common, *flags, "--privacy_unit_column=stars", "--max_seq_length=16"])
    assert set(workload.train_dataset.column_names) == {"input_ids", "attention_mask", "labels", "stars"}
    assert set(workload.eval_dataset.column_names) == {"input_ids", "attention_mask", "labels"}
    with pytest.raises(ValueError, match="must have a column 'user'"):
        parse_recipe([*common, *flags, "--privacy_unit_column=user"])


def test_the_column_of_units_of_images_reaches_the_trainer(common, tmp_path):
    folder = write_mnist(tmp_path / "images", train=12, test=4, writer=[*"aabbccddeeff"])
    flags = [f"--dataset_dir={folder}", "--image_size=8", "--privacy_unit_column=writer", *DIGITS[2:], *common]
    flags += ["--max_examples_per_unit=1", "--per_device_train_batch_size=3", "--max_steps=1"]
    workload, training_args = parse_recipe(flags)
    assert "writer" not in workload.eval_dataset.column_names
    trainer = DopplerTrainer(args=training_args, **workload.for_trainer())
    trainer.train()
    assert trainer.privacy.ledger.statement.num_units == 6


@pytest.mark.usefixtures("kinds_only")
@pytest.mark.parametrize(
    ("path", "flag", "left_out"),
    [
        ("image/digits-eps8", "dataset_dir=here", ["dataset_name"]),
        ("causal_lm/yelp-gpt2-lora-eps8", "dataset_dir=here", ["validation_split"]),
        ("glue/sst2-minilm-lora-all-eps3", "lora_r=0", ["lora_target_modules"]),
        (
            "image/digits-eps8",
            "model_name_or_path=vit",
            ["hidden_size", "image_size", "num_heads", "num_layers", "patch_size"],
        ),
        ("glue/sst2-lp-adambc-eps3", "disable_dp=true", OF_PRIVACY),
    ],
)
def test_a_flag_overrules_what_it_leaves_without_effect_in_the_recipe(caplog, tmp_path, path, flag, left_out):
    path = ROOT / "recipes" / f"{path}.yaml"
    flags = ["--use_cpu", f"--output_dir={tmp_path}"]
    (_, args), training_args = parse_recipe([str(path), *flags, f"--{flag}"])
    said = [message.split("=")[0] for message in caplog.messages if "of the recipe is left out: it has no effect" in message]
    assert sorted(said) == left_out
    for owner in (args, training_args):
        for field in dataclasses.fields(owner):
            assert field.name not in left_out or getattr(owner, field.name) == field.default
    # Inside one recipe, or on one command line, it can be fixed, and is refused.
    beside = tmp_path / "recipe.yaml"
    beside.write_text(f"{path.read_text()}\n{flag.replace('=', ': ')}\n")
    with pytest.raises(NoEffectError, match=f"^({'|'.join(left_out)})=.* has no effect with {flag.split('=')[0]}="):
        parse_recipe([str(beside), *flags])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (LoraArguments, {"lora_alpha": 32}, "lora_alpha=32 has no effect with lora_r=0. Leave lora_alpha out, or change"),
        (
            images.ImageArguments,
            {"num_heads": 4, "model_name_or_path": "vit"},
            "num_heads=4 has no effect with model_name_or_path='vit'",
        ),
        (
            language_model.CausalLMArguments,
            {"model_name_or_path": "gpt2", "validation_split": "test[:9]", "dataset_dir": "here"},
            "validation_split='test[:9]' has no effect with dataset_dir='here'",
        ),
    ],
)
def test_what_another_argument_overrules_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments(**options)
