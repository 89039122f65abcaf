"""What a training script makes of a recipe and flags: model, data, and what goes with them."""

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from peft.tuners.lora import LoraLayer
from sklearn.datasets import load_digits
from transformers import AutoTokenizer, EvalPrediction

from scripts import causal_lm, glue, image_classification
from tests.support.folders import END, write_bert, write_glue, write_gpt2, write_mnist, write_texts
from tests.support.scripts import made_by

DIGITS = ["--dataset_name=digits", "--image_size=8", "--patch_size=4", "--hidden_size=16", "--num_layers=1", "--num_heads=2"]

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def common(tmp_path):
    return ["--use_cpu", "--report_to=none", "--noise_multiplier=1", f"--output_dir={tmp_path / 'out'}"]


def test_flags_override_the_recipe(common, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("image_size: 16\nlr_scheduler_kwargs: {min_lr: 1}\n")
    trainer, _ = made_by(image_classification, str(path), *DIGITS, *common)
    assert trainer.args.lr_scheduler_kwargs == {"min_lr": 1}
    assert trainer.processing_class.size["height"] == 8
    path.write_text("stray: [1]\n")
    with pytest.raises(SystemExit, match=r"^error: The recipe .*recipe\.yaml has unknown arguments: 'stray'\."):
        image_classification.main([str(path), *common])
    with pytest.raises(SystemExit, match=r"^error: .*unknown arguments: 'lerning_rate' \(did you mean learning_rate"):
        image_classification.main([*common, "--lerning_rate=1"])


def test_images(common):
    trainer, evaluated = made_by(image_classification, *DIGITS, *common)
    assert (len(trainer.train_dataset), {name: len(rows) for name, rows in evaluated.items()}) == (1442, {"eval": 355})
    digits = load_digits()
    batch = trainer.train_dataset[:3]
    assert batch["labels"] == digits.target[:3].tolist()
    grey = torch.tensor(np.rint(digits.images[:3, None] * 255 / 16), dtype=torch.float32)
    torch.testing.assert_close(batch["pixel_values"], grey / 127.5 - 1, rtol=0, atol=1e-6)  # mean and deviation one half
    assert not trainer.args.remove_unused_columns
    assert trainer.processing_class.size["height"] == 8
    config = trainer.model.config
    assert (config.num_labels, config.label2id["9"], config.id2label[9]) == (10, 9, "9")
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.patch_size) == (16, 64, 1, 4)
    prediction = EvalPrediction(predictions=np.eye(10)[[1, 2]], label_ids=np.array([1, 3]))
    assert trainer.compute_metrics(prediction) == {"accuracy": 0.5}


@pytest.mark.parametrize(("more", "scaling"), [([], 3.0), (["--use_rslora=true"], 6.0)])
def test_adapters_are_scaled(common, tmp_path, more, scaling):
    flags = [
        f"--dataset_dir={write_glue(tmp_path / 'sst2', 'sst2')}",
        f"--model_name_or_path={write_bert(tmp_path / 'bert')}",
    ]
    adapters = ["--lora_r=4", "--lora_alpha=12", "--lora_target_modules=query", *more]
    trainer, _ = made_by(glue, "--task_name=sst2", *flags, *adapters, *common)
    layers = [module for module in trainer.model.modules() if isinstance(module, LoraLayer)]
    assert [layer.scaling["default"] for layer in layers] == [pytest.approx(scaling)] * 2


def test_glue(common, tmp_path):
    folder = write_glue(tmp_path / "mnli", "mnli")
    names = ["entailment", "neutral", "contradiction"]
    for path in folder.glob("*.parquet"):
        rows = Dataset.from_parquet(str(path), keep_in_memory=True)
        rows.cast_column("label", ClassLabel(names=names)).to_parquet(path)
    flags = ["--task_name=mnli", f"--dataset_dir={folder}", f"--model_name_or_path={write_bert(tmp_path / 'bert')}"]
    trainer, evaluated = made_by(glue, *flags, "--max_seq_length=10", *common)
    assert list(evaluated) == ["eval_matched", "eval_mismatched"]
    assert trainer.eval_dataset is evaluated["eval_matched"]
    assert [len(rows) for rows in (trainer.train_dataset, *evaluated.values())] == [48, 12, 12]
    for rows in (trainer.train_dataset, *evaluated.values()):
        assert set(rows.column_names) == {"label", "input_ids", "token_type_ids", "attention_mask"}
    lengths = {len(tokens) for tokens in trainer.train_dataset["input_ids"]}
    assert max(lengths) == 10  # cut
    assert len(lengths) > 1  # and not padded
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(8)])
    assert batch["input_ids"].shape == (8, 10)
    config = trainer.model.config
    assert (config.num_labels, config.problem_type, config.pad_token_id) == (3, "single_label_classification", 0)
    assert (list(config.id2label.values()), config.label2id["contradiction"]) == (names, 2)
    assert trainer.args.remove_unused_columns
    prediction = EvalPrediction(predictions=np.eye(3), label_ids=np.array([0, 1, 1]))
    assert trainer.compute_metrics(prediction) == {"accuracy": pytest.approx(2 / 3)}

    (folder / "validation_matched.parquet").unlink()
    _, evaluated = made_by(glue, *flags, *common)
    assert list(evaluated) == ["eval_mismatched"]


def test_glue_pads_on_the_right_whatever_the_tokenizer_was_saved_with(common, tmp_path):
    bert = write_bert(tmp_path / "bert")
    AutoTokenizer.from_pretrained(bert, padding_side="left").save_pretrained(bert)
    flags = ["--task_name=rte", f"--dataset_dir={write_glue(tmp_path / 'rte', 'rte')}", f"--model_name_or_path={bert}"]
    trainer, _ = made_by(glue, *flags, *common)
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(8)])
    assert not batch["attention_mask"].all()  # some are padded
    assert batch["attention_mask"][:, 0].all()


def test_causal_lm(common, tmp_path):
    flags = [f"--dataset_dir={write_texts(tmp_path / 'texts')}", f"--model_name_or_path={write_gpt2(tmp_path / 'gpt2')}"]
    trainer, evaluated = made_by(
        causal_lm, *flags, "--text_column=review", "--max_seq_length=16", "--dtype=bfloat16", *common
    )
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    assert (len(trainer.train_dataset), [*evaluated], len(evaluated["eval"])) == (24, ["eval"], 6)
    assert set(trainer.train_dataset.column_names) == {"input_ids", "attention_mask", "labels"}
    empty, long, short = (trainer.train_dataset[row] for row in range(3))
    assert empty["labels"] == [END]
    assert (len(long["labels"]), END in long["labels"]) == (16, False)
    assert (short["labels"], short["labels"][-1]) == (short["input_ids"], END)
    batch = trainer.data_collator([empty, long])
    assert batch["labels"][0].tolist() == [END] + [-100] * 15
    assert trainer.compute_metrics is None
    assert trainer.processing_class.padding_side == "right"


def test_the_perplexity_of_a_training_that_diverged_is_infinite():
    assert causal_lm.perplexity(0.0) == 1.0
    assert causal_lm.perplexity(1e4) == float("inf")


def test_the_column_of_units_reaches_the_trainer(common, tmp_path):
    write_texts(tmp_path / "texts")
    flags = [
        f"--dataset_dir={tmp_path / 'texts'}",
        "--text_column=review",
        f"--model_name_or_path={write_gpt2(tmp_path / 'gpt2')}",
    ]
    trainer, evaluated = made_by(causal_lm, *common, *flags, "--privacy_unit_column=stars", "--max_seq_length=16")
    assert set(trainer.train_dataset.column_names) == {"input_ids", "attention_mask", "labels", "stars"}
    assert set(evaluated["eval"].column_names) == {"input_ids", "attention_mask", "labels"}
    with pytest.raises(SystemExit, match=r"^error: .* must have a column 'user'"):
        causal_lm.main([*common, *flags, "--privacy_unit_column=user"])


def test_the_column_of_units_of_images_reaches_the_trainer(common, tmp_path):
    folder = write_mnist(tmp_path / "images", train=12, test=4, writer=[*"aabbccddeeff"])
    flags = [f"--dataset_dir={folder}", "--image_size=8", "--privacy_unit_column=writer", *DIGITS[2:], *common]
    flags += ["--max_examples_per_unit=1", "--per_device_train_batch_size=3", "--max_steps=1"]
    trainer, evaluated = made_by(image_classification, *flags)
    assert "writer" not in evaluated["eval"].column_names
    trainer.train()
    assert trainer.privacy.ledger.statement.num_units == 6
