"""Images of users are all there, and coefficients are those of the images."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from doppler_hf.privacy.batching.columns import units_of
from doppler_hf.workloads.scattering import Scattering
from scripts.studies.data import apart
from scripts.studies.tasks import SMALL
from tests.support.folders import write_mnist


def test_users_have_ten_images_of_two_digits(sources, monkeypatch):
    folder = sources.cache_dir.parent / "of-users"
    folder.mkdir()
    write_mnist(folder / "mnist", train=1000, test=30)
    sources = dataclasses.replace(sources, data_dir=str(folder))
    order = apart(1000, 100)
    for module in ("data", "images"):
        monkeypatch.setattr(f"scripts.studies.{module}.apart", lambda count, held_out: order)
    whole, shared = (SMALL[name].load(sources) for name in ("mnist", "mnist-users"))
    assert whole.digest != shared.digest
    users = units_of(shared.train, column="user")
    assert np.bincount(users).tolist() == [10] * 90
    images = default_collate(shared.train.remove_columns("user").__getitems__([*range(900)]))
    expected = whole.collator([*whole.train])
    assert torch.equal(images["inputs"], expected["inputs"])
    assert torch.equal(images["labels"], expected["labels"])
    labels = images["labels"].numpy()
    digits = [len(set(labels[users == user])) for user in range(90)]
    assert np.mean(np.array(digits) <= 2) > 0.8  # but for shards in which one digit ends


def test_images_are_scattered_once(sources, small, monkeypatch):
    of_pixels, of_coefficients = (SMALL[name].load(sources) for name in ("mnist", "mnist-scattering"))
    assert of_pixels.digest != of_coefficients.digest
    for part in ("train", "tuning", "report"):
        rows, labels = of_pixels.collator([*getattr(of_pixels, part)]).values()
        found = default_collate([*getattr(of_coefficients, part)])
        torch.testing.assert_close(found["inputs"], Scattering(28)(rows).half().float(), rtol=1e-3, atol=1e-3)
        assert torch.equal(found["labels"], labels)
    monkeypatch.setattr("scripts.studies.images.Scattering", lambda side: pytest.fail("this was done already"))
    again = SMALL["mnist-scattering"].load(sources)
    assert again.digest == of_coefficients.digest
    assert torch.equal(again.train[0]["inputs"], of_coefficients.train[0]["inputs"])
