"""Every source of data, and what is said when a piece of it is missing."""

import io

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage

from doppler_hf.workloads.data_sources import GLUE_TASKS, load_glue, load_images, load_rows, selected

pytestmark = pytest.mark.usefixtures("own_caches")


def write_glue(folder, split, task, rows=4, **columns):
    data = {name: [f"{name} {row}" for row in range(rows)] for name in GLUE_TASKS[task].text_columns}
    data |= {"label": [row % 2 for row in range(rows)], "idx": list(range(rows))} | columns
    folder.mkdir(exist_ok=True)
    Dataset.from_dict(data).to_parquet(folder / f"{split}.parquet")


@pytest.mark.parametrize("task", ["mnli", "stsb", "sst2"])
def test_folder_of_a_task(tmp_path, task):
    for split in ("train", *GLUE_TASKS[task].validation_splits):
        write_glue(tmp_path / "data", split, task)
    splits = load_glue(task, str(tmp_path / "data"))
    assert list(splits) == ["train", *GLUE_TASKS[task].validation_splits]
    assert splits["train"][1][GLUE_TASKS[task].text_columns[0]].endswith(" 1")
    assert splits["train"].features["label"] == Value("float32" if task == "stsb" else "int64")


def test_one_mnli_validation_split_is_enough(tmp_path):
    write_glue(tmp_path, "train", "mnli")
    write_glue(tmp_path, "validation_matched", "mnli")
    assert list(load_glue("mnli", str(tmp_path))) == ["train", "validation_matched"]


def test_hub_style_shards(tmp_path):
    write_glue(tmp_path, "train-00000-of-00002", "sst2", rows=3)
    write_glue(tmp_path, "train-00001-of-00002", "sst2", rows=2)
    write_glue(tmp_path, "validation-00000-of-00001", "sst2", rows=1)
    assert load_glue("sst2", str(tmp_path)).num_rows == {"train": 5, "validation": 1}


def test_a_split_in_one_file_and_in_shards_too_is_refused(tmp_path):
    for name in ("train", "train-00000-of-00001", "validation"):
        write_glue(tmp_path, name, "sst2")
    with pytest.raises(ValueError, match=r"must have each split once, got train\.parquet and train-00000-of-00001\.parquet"):
        load_glue("sst2", str(tmp_path))


def test_unknown_task():
    with pytest.raises(ValueError, match=r"task_name must be one of cola, .*, wnli, got 'imdb'\."):
        load_glue("imdb")


def test_missing_pieces_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"--dataset_dir must be a folder, got .*nowhere\."):
        load_glue("sst2", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"has no train\.parquet"):
        load_glue("sst2", str(tmp_path))
    write_glue(tmp_path, "train", "sst2")
    with pytest.raises(ValueError, match=r"has no validation\.parquet"):
        load_glue("sst2", str(tmp_path))
    with pytest.raises(ValueError, match=r"has no validation_matched\.parquet or validation_mismatched\.parquet"):
        load_glue("mnli", str(tmp_path))
    write_glue(tmp_path, "validation", "sst2")
    with pytest.raises(ValueError, match="'train' must have a column 'question1', got sentence, label, idx"):
        load_glue("qqp", str(tmp_path))


@pytest.mark.parametrize(
    ("task", "label", "found"),
    [
        ("wnli", ClassLabel(names=["entailment", "not_entailment"]), "entailment, not_entailment, those of qnli and rte"),
        ("stsb", ClassLabel(names=["not_equivalent", "equivalent"]), "not_equivalent, equivalent, those of mrpc"),
        ("mrpc", Value("float32"), "numbers of type float32"),
    ],
)
def test_labels_of_another_task_are_refused(tmp_path, task, label, found):
    """Other tasks have the same columns of text, and would train in silence."""
    texts = {name: Value("string") for name in GLUE_TASKS[task].text_columns}
    rows = {name: ["a", "b"] for name in texts} | {"label": [0, 1]}
    for split in ("train", "validation"):
        Dataset.from_dict(rows, Features({**texts, "label": label})).to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=f"labels of {task} must be .*, got {found}. Give the folder of {task}, or set"):
        load_glue(task, str(tmp_path))


def test_classes_of_ones_own_are_taken(tmp_path):
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["ham", "spam"])})
    for split in ("train", "validation"):
        Dataset.from_dict({"sentence": ["a", "b"], "label": [0, 1]}, features).to_parquet(tmp_path / f"{split}.parquet")
    assert load_glue("sst2", str(tmp_path))["train"].features == features


def test_no_network_names_the_argument(monkeypatch):
    def unreachable(*args):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"^Cannot load 'nyu-mll/glue' \(.*\)\. .* local folder with --dataset_dir\.$"):
        load_glue("sst2")
    with pytest.raises(ValueError, match=r"^Cannot load 'uoft-cs/cifar10' \(.*\)\. .* local folder with --dataset_dir\.$"):
        load_images("cifar10")


def test_hub_splits_without_labels_are_left_out(monkeypatch):
    def load_dataset(name, task):
        assert (name, task) == ("nyu-mll/glue", "mnli")
        split = Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"], "label": [-1]})
        names = "train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"
        return dict.fromkeys(names, split)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert list(load_glue("mnli")) == ["train", "validation_matched", "validation_mismatched"]


def test_digits_split_is_fixed_and_stratified():
    splits = load_images("digits")
    assert splits.num_rows == {"train": 1442, "test": 355}
    counts = {name: np.bincount(splits[name]["label"], minlength=10) for name in splits}
    fraction = counts["test"] / (counts["train"] + counts["test"])
    assert np.all((fraction > 0.19) & (fraction <= 0.2))
    first = splits["train"][0]
    assert first["label"] == 0
    assert first["image"].size == (8, 8)
    assert first["image"].mode == "L"


def png(value):
    buffer = io.BytesIO()
    PILImage.new("RGB", (4, 4), (value, 0, 0)).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def test_image_folder(tmp_path):
    features = Features({"img": Image(), "label": ClassLabel(names=["dark", "light"])})
    for split in ("train", "test"):
        data = Dataset.from_dict({"img": [png(0), png(200)], "label": [0, 1]}, features=features)
        data.to_parquet(tmp_path / f"{split}.parquet")
    splits = load_images("cifar10", str(tmp_path))
    assert splits["test"].column_names == ["image", "label"]
    assert splits["train"][1]["image"].getpixel((0, 0)) == (200, 0, 0)
    assert splits["train"].features["label"].names == ["dark", "light"]


def test_the_classes_of_cifar100_are_the_fine_ones(tmp_path):
    labels = {"fine_label": ClassLabel(names=["oak", "pine", "cup"]), "coarse_label": ClassLabel(names=["tree", "thing"])}
    rows = {"img": [png(0), png(100), png(200)], "fine_label": [0, 1, 2], "coarse_label": [0, 0, 1]}
    for split in ("train", "test"):
        Dataset.from_dict(rows, features=Features({"img": Image(), **labels})).to_parquet(tmp_path / f"{split}.parquet")
    splits = load_images("cifar100", str(tmp_path))
    assert splits["train"].column_names == ["image", "label"]
    assert splits["test"]["label"][:] == [0, 1, 2]
    assert splits["train"].features["label"].names == ["oak", "pine", "cup"]


def test_image_folder_needs_class_names(tmp_path):
    for split in ("train", "test"):
        Dataset.from_dict({"image": [png(0)], "label": [0]}).to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match="must have class names, got "):
        load_images("cifar10", str(tmp_path))


def test_unknown_image_data_set():
    with pytest.raises(ValueError, match="dataset_name must be one of cifar10, cifar100, mnist, digits, got 'svhn'"):
        load_images("svhn")


def test_text_folder(tmp_path):
    for split, rows in (("train", 3), ("validation", 2)):
        data = {"review": [f"{split} {row}" for row in range(rows)], "stars": list(range(rows))}
        Dataset.from_dict(data).to_parquet(tmp_path / f"{split}.parquet")
    splits = load_rows("unused", str(tmp_path), validation_split="validation")
    assert splits.num_rows == {"train": 3, "validation": 2}
    assert selected(splits, ("review",), "stars")["validation"][:] == {"review": ["validation 0", "validation 1"]}
    assert selected(splits, ("review",), "stars")["train"].column_names == ["review", "stars"]
    with pytest.raises(ValueError, match="'train' must have a column 'text', got review, stars"):
        selected(splits, ("text",), None)


def test_texts_of_the_hub(tmp_path, monkeypatch):
    # A folder stands for the hub: `datasets` treats the splits of both alike.
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split, rows in (("train", 3), ("test", 5)):
        Dataset.from_dict({"text": [f"{split} {row}" for row in range(rows)]}).to_parquet(folder / f"{split}.parquet")
    splits = load_rows(str(folder), validation_split="test[:2]")
    assert splits.num_rows == {"train": 3, "validation": 2}
    assert splits["validation"]["text"][0] == "test 0"
    with pytest.raises(ValueError, match='Unknown split "held_out"'):
        load_rows(str(folder), validation_split="held_out")
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or splits)
    load_rows("some/corpus", dataset_config="en", validation_split="test")
    assert asked == [(("some/corpus", "en"), {"split": {"train": "train", "validation": "test"}})]
