"""The two scripts from their command line to the saved model, and every recipe, offline and on tiny data."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from doppler_hf import DopplerTrainingArguments
from doppler_hf.cli_args import parse_args
from doppler_hf.lora import LoraArguments
from doppler_hf.metrics import GLUE_METRICS
from doppler_hf.tasks import GLUE_TASKS
from scripts import glue, image_classification

ROOT = Path(__file__).parent.parent
RECIPES = sorted(ROOT.glob("recipes/*/*.yaml"))
WORDS = ["good", "bad", "fine", "poor", "film", "plot", "the", "a"]
PRIVATE = ["--noise_multiplier=1.0", "--per_sample_max_grad_norm=1.0", "--low_pass_filter=first-order-v1"]


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "cache")


@pytest.fixture
def bert_dir(tmp_path):
    """A BERT of two layers with random weights, and a tokenizer that knows eight words."""
    folder = tmp_path / "bert"
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizerFast(vocab={word: row for row, word in enumerate(vocab)}).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def data_dir(tmp_path):
    """A function that writes random sentences as parquet files of a task's columns."""

    def write(task_name, train=48, validation=12):
        generator = np.random.default_rng(0)
        task = GLUE_TASKS[task_name]
        folder = tmp_path / task_name
        folder.mkdir()
        for split, rows in (("train", train), *((name, validation) for name in task.validation_splits)):
            sentences = [" ".join(generator.choice(WORDS, generator.integers(2, 12))) for _ in range(rows)]
            data = dict.fromkeys(task.text_columns, sentences)
            labels = np.arange(rows) % task.num_labels if task.num_labels > 1 else generator.uniform(0, 5, rows)
            Dataset.from_dict({**data, "label": labels.tolist()}).to_parquet(folder / f"{split}.parquet")
        return folder

    return write


def run_glue(task_name, data, model, out, *flags):
    glue.main(
        [
            *(f"--task_name={task_name}", f"--dataset_dir={data}", f"--model_name_or_path={model}"),
            *(f"--output_dir={out}", "--use_cpu", "--report_to=none", "--max_steps=2", "--per_device_train_batch_size=8"),
            *("--gradient_accumulation_steps=2", "--save_strategy=no", *flags),
        ]
    )
    return json.loads((out / "all_results.json").read_text())


@pytest.mark.parametrize("lora", [(), ("--lora_r=2",), ("--lora_r=2", "--lora_target_modules=key,value")])
@pytest.mark.parametrize("task_name", ["sst2", "stsb"])
def test_glue(tmp_path, bert_dir, data_dir, task_name, lora):
    out = tmp_path / "out"
    results = run_glue(task_name, data_dir(task_name), bert_dir, out, *PRIVATE, *lora)
    assert all(np.isfinite(results[f"eval_{name}"]) for name in GLUE_METRICS[task_name])
    assert (out / "tokenizer.json").is_file()
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (out / weights).is_file()
    if not lora:
        assert BertForSequenceClassification.from_pretrained(out).num_labels == GLUE_TASKS[task_name].num_labels


def test_glue_with_the_mean_head(tmp_path, bert_dir, data_dir):
    flags = (*PRIVATE, "--pooling=mean", "--lora_r=2", "--lora_target_modules=query,value")
    results = run_glue("stsb", data_dir("stsb"), bert_dir, tmp_path / "out", *flags)
    assert np.isfinite(results["eval_pearson"])


def test_glue_without_privacy(tmp_path, bert_dir, data_dir):
    results = run_glue("mrpc", data_dir("mrpc"), bert_dir, tmp_path / "out", "--disable_dp")
    assert {"eval_accuracy", "eval_f1", "train_loss"} <= set(results)


def test_glue_evaluates_both_validation_splits_of_mnli(tmp_path, bert_dir, data_dir):
    results = run_glue("mnli", data_dir("mnli"), bert_dir, tmp_path / "out", *PRIVATE)
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= set(results)


# GPT-2's layers are transposed; PEFT sees it, adapts itself and says so.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_glue_with_a_tokenizer_that_does_not_pad(tmp_path, data_dir):
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2TokenizerFast

    folder = tmp_path / "gpt2"
    letters = "Ġabcdefghijklmnopqrstuvwxyz"
    vocab = {letter: row for row, letter in enumerate([*letters, "<|endoftext|>"])}
    GPT2TokenizerFast(vocab=vocab, merges=[]).save_pretrained(folder)
    config = GPT2Config(vocab_size=len(vocab), n_embd=16, n_layer=1, n_head=2, bos_token_id=27, eos_token_id=27)
    GPT2ForSequenceClassification(config).save_pretrained(folder)
    results = run_glue("sst2", data_dir("sst2"), folder, tmp_path / "out", *PRIVATE, "--lora_r=2")
    assert np.isfinite(results["eval_accuracy"])


def test_glue_without_network_ends_in_one_line(tmp_path, bert_dir, data_dir, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    flags = ["--task_name=sst2", f"--output_dir={tmp_path / 'out'}", "--use_cpu", *PRIVATE]
    with pytest.raises(SystemExit, match=r"^error: cannot load 'nyu-mll/glue' \(.*\); .* with --dataset_dir$"):
        glue.main([*flags, f"--model_name_or_path={bert_dir}"])
    monkeypatch.undo()
    with pytest.raises(SystemExit, match=r"^error: cannot load 'nowhere' \(.*\); .* with --model_name_or_path$"):
        glue.main([*flags, f"--dataset_dir={data_dir('sst2')}", "--model_name_or_path=nowhere"])


def run_digits(out, *flags):
    sizes = ["--image_size=8", "--patch_size=4", "--hidden_size=16", "--num_layers=1", "--num_heads=2"]
    image_classification.main(
        [
            *("--dataset_name=digits", *sizes, f"--output_dir={out}", "--use_cpu", "--report_to=none", "--max_steps=2"),
            *("--per_device_train_batch_size=32", "--per_device_eval_batch_size=355", "--save_strategy=no", *flags),
        ]
    )
    return json.loads((out / "all_results.json").read_text())


@pytest.mark.parametrize("flags", [PRIVATE, ["--disable_dp"], [*PRIVATE, "--lora_r=2", "--lora_target_modules=all-linear"]])
def test_digits(tmp_path, flags):
    results = run_digits(tmp_path / "out", *flags)
    assert 0 <= results["eval_accuracy"] <= 1
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


def test_a_saved_image_model_is_fine_tuned(tmp_path):
    run_digits(tmp_path / "first", "--disable_dp")
    run_digits(tmp_path / "second", f"--model_name_or_path={tmp_path / 'first'}", *PRIVATE)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (config["num_channels"], config["image_size"], config["id2label"]["9"]) == (1, 8, "9")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_and_names_its_own_launch_line(path, tmp_path):
    script = glue if path.parent.name == "glue" else image_classification
    args, _, training_args = parse_args(
        script.ScriptArguments,
        LoraArguments,
        DopplerTrainingArguments,
        argv=[str(path), "--use_cpu", f"--output_dir={tmp_path}"],
    )
    assert training_args.disable_dp != (training_args.target_epsilon is not None)
    assert isinstance(training_args.learning_rate, float)
    assert script is image_classification or args.task_name in GLUE_TASKS
    relative = path.relative_to(ROOT)
    header = path.read_text().splitlines()[:3]
    assert header[0] == f"# Launch:   accelerate launch scripts/{Path(script.__file__).name} {relative}"
    assert header[1].startswith("# Hardware: ")
    assert header[2].startswith("# Metric: ")
    assert f"\noutput_dir: runs/{path.stem}\n" in path.read_text()


def test_there_are_recipes():
    assert len(RECIPES) >= 7
