"""Every source of data, and what is said when a piece of it is missing."""

import io

import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage

from scripts.training.data_sources import GLUE_TASKS, load_glue, load_images
from tests.support.refusals import refused

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


def test_a_split_in_one_file_and_in_shards_too_is_refused(tmp_path):
    for name in ("train", "train-00000-of-00001", "validation"):
        write_glue(tmp_path, name, "sst2")
    with refused("split-twice", match=r"train\.parquet .*train-00000-of-00001\.parquet"):
        load_glue("sst2", str(tmp_path))


def test_unknown_task():
    with refused("unknown-value", match="cola, .*, wnli, .*'imdb'"):
        load_glue("imdb")


def test_missing_pieces_are_named(tmp_path):
    with refused("no-such-folder", match="nowhere"):
        load_glue("sst2", str(tmp_path / "nowhere"))
    with refused("split-missing", match=r"train\.parquet"):
        load_glue("sst2", str(tmp_path))
    write_glue(tmp_path, "train", "sst2")
    with refused("split-missing", match=r"validation\.parquet"):
        load_glue("sst2", str(tmp_path))
    with refused("split-missing", match=r"validation_matched\.parquet or validation_mismatched\.parquet"):
        load_glue("mnli", str(tmp_path))
    write_glue(tmp_path, "validation", "sst2")
    with refused("column-missing", match="'question1'.* sentence, label, idx"):
        load_glue("qqp", str(tmp_path))


def test_no_network_names_the_argument(monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with refused("source-not-loaded", match="'nyu-mll/glue' .*--dataset_dir"):
        load_glue("sst2")
    with refused("source-not-loaded", match="'uoft-cs/cifar10' .*--dataset_dir"):
        load_images("cifar10")


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
