"""Small data and small tasks for the tests of the studies, imported late: see `pytest_sessionstart` of all tests."""

import dataclasses

import pytest


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Random images, random sentences, and an encoder of three layers."""
    from scripts.studies.data import Sources
    from tests.support.folders import write_bert, write_glue, write_mnist

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_mnist(tmp_path / "mnist", train=60, test=30)
    (tmp_path / "glue").mkdir()
    for name in ("sst2", "qnli", "qqp", "mnli"):
        write_glue(tmp_path / "glue" / name, name, train=60)
    for name in ("cifar10", "cifar100"):
        write_mnist(tmp_path / name, train=60, test=30, shape=(32, 32, 3))
    return Sources(str(tmp_path), str(write_bert(tmp_path / "bert", num_hidden_layers=3)), tmp_path / "out")


@pytest.fixture
def small(monkeypatch):
    """Tasks of three steps, of which twenty examples are held out."""
    from scripts.studies.data import apart
    from scripts.studies.tasks import SMALL

    for name, task in SMALL.items():
        settings = task.settings | {"per_device_train_batch_size": 10, "max_steps": 3}
        monkeypatch.setitem(SMALL, name, dataclasses.replace(task, settings=settings))
    order = apart(60, 20)
    for module in ("data", "images", "texts"):
        monkeypatch.setattr(f"scripts.studies.{module}.apart", lambda count, held_out: order)
