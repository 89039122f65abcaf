"""What is recorded is a linear image of the gradients that keeps their norms."""

import math

import numpy as np
import pytest
import torch

from doppler_hf.run import count_sketch
from doppler_hf.run.gradient_recorder import CountSketch, GradientRecorder
from tests.support.trainers import Recorder, trainer_of

pytestmark = pytest.mark.usefixtures("checked_arrays")


@pytest.mark.parametrize("width", [count_sketch.TABLE_WIDTH, 13], ids=["one row", "several rows"])
def test_a_projection_adds_every_coordinate_to_one_sum_under_a_sign(width, monkeypatch):
    monkeypatch.setattr(count_sketch, "TABLE_WIDTH", width)
    image = CountSketch(60, dimensions=8, seed=0)
    signs = np.stack([image([unit]) for unit in torch.eye(60)], axis=1)
    assert signs.shape == (8, 60)
    np.testing.assert_array_equal(np.abs(signs).sum(axis=0), 1)
    assert set(np.unique(signs)) == {-1, 0, 1}
    counts = np.abs(signs).sum(axis=1)
    assert counts.sum() == 60
    assert counts.min() >= 4


def test_every_private_gradient_is_recorded(tmp_path):
    recorder, witness = GradientRecorder(dimensions=32), Recorder()
    trainer = trainer_of(
        tmp_path, callbacks=[recorder, witness], low_pass_filter="second-order", base_optimizer="sgd", max_steps=5
    )
    trainer.train()
    image = CountSketch(len(witness.gradients[0]), dimensions=32, seed=0)
    private = np.stack([image([gradient]) for gradient in witness.gradients])
    assert recorder.private.shape == (5, 32)
    np.testing.assert_allclose(recorder.private, private, rtol=1e-4, atol=1e-4)
    optimizer = trainer.optimizer.optimizer
    assert recorder.low_pass_filter == optimizer.low_pass_filter
    assert recorder.noise_std == pytest.approx(optimizer.noise_std * math.sqrt(len(witness.gradients[0]) / 32))


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        ({}, {"disable_dp": True, "noise_multiplier": None}, "disable_dp=True has none"),
        ({}, {"optim_target_modules": ["query"], "optim_args": "rank=4"}, r"which GaLore \(optim_target_modules\) does not"),
        ({}, {"noise_shape": "banded:bands=3"}, r"noise_shape must be 'white' with a GradientRecorder, got banded"),
        ({"dimensions": 100_000}, {}, r"dimensions must be at most the \d+ trained parameters, got 100000"),
    ],
)
def test_runs_that_cannot_be_recorded_are_refused(tmp_path, options, run, message):
    trainer = trainer_of(tmp_path, callbacks=[GradientRecorder(**options)], **run)
    with pytest.raises(ValueError, match=message):
        trainer.train()
