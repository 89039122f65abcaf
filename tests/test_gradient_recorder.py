"""What is recorded is a linear image of the gradients that keeps their norms."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from doppler_hf import gradient_recorder
from doppler_hf.gradient_recorder import CountSketch, GradientRecorder
from tests.support.refusals import refused
from tests.support.tiny import text_data
from tests.support.trainers import On, Recorder, at, interrupt, trainer_of

pytestmark = pytest.mark.usefixtures("checked_arrays")


@pytest.mark.parametrize("width", [gradient_recorder.TABLE_WIDTH, 13], ids=["one row", "several rows"])
def test_a_projection_adds_every_coordinate_to_one_sum_under_a_sign(width, monkeypatch):
    monkeypatch.setattr(gradient_recorder, "TABLE_WIDTH", width)
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
    ("options", "run", "code"),
    [
        ({}, {"disable_dp": True, "noise_multiplier": None}, "no-private-gradients"),
        ({}, {"noise_shape": "banded:bands=3"}, "recorder-of-shaped-noise"),
        (
            {},
            {"noise_multiplier": None, "target_epsilon": 8.0, "learning_rate": None, "max_steps": 40},  # chosen
            "recorder-of-shaped-noise",
        ),
        ({"dimensions": 100_000}, {}, "more-dimensions-than-parameters"),
    ],
)
@pytest.mark.parametrize("is_added_later", [False, True])
def test_runs_that_cannot_be_recorded_are_refused_before_a_step_counts(tmp_path, options, run, code, is_added_later):
    recorder = GradientRecorder(**options)
    data = text_data(200) if run.get("max_steps") else None
    trainer = trainer_of(tmp_path, data=data, callbacks=[] if is_added_later else [recorder], **run)
    if is_added_later:
        trainer.add_callback(recorder)
    with refused(code):
        trainer.train()
    assert not list((tmp_path / "out").glob("*.npz"))
    assert not list((tmp_path / "out").glob("*.json"))


def test_a_run_with_galore_is_recorded(tmp_path):
    recorder = GradientRecorder(dimensions=8)
    trainer_of(tmp_path, callbacks=[recorder], optim_target_modules=["query"], optim_args="rank=4", max_steps=2).train()
    assert recorder.private.shape == (2, 8)


def test_the_recording_is_written_with_checkpoints_and_at_the_end_and_a_resumed_one_is_apart(tmp_path):
    options = dict(save_strategy="steps", save_steps=2)
    recorder = GradientRecorder(dimensions=8)
    trainer = trainer_of(tmp_path, callbacks=[recorder, On(step_begin=at(3, interrupt))], max_steps=5, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    path = tmp_path / "out" / "private_gradients.npz"
    with np.load(path) as written:
        np.testing.assert_array_equal(written["private"], recorder.private[:2])  # of the checkpoint
        assert len(recorder.private) == 3
        assert (written["noise_std"], written["low_pass_filter"]) == (recorder.noise_std, str(recorder.low_pass_filter))
    before = path.read_bytes()
    again = GradientRecorder(dimensions=8)
    trainer_of(tmp_path, callbacks=[again], max_steps=5, **options).train(resume_from_checkpoint=True)
    assert path.read_bytes() == before
    with np.load(tmp_path / "out" / "private_gradients-from-3.npz") as written:
        np.testing.assert_array_equal(written["private"], again.private)
    assert again.private.shape == (2, 8)


def test_gradients_of_parts_of_weights_are_not_recorded(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        trainer = trainer_of(tmp_path, noise_shape="white")
        with refused("recorder-of-shards", match=r"recipes/accelerate/ddp\.yaml"):
            GradientRecorder().on_train_begin(
                trainer.args, trainer.state, trainer.control, model=model, optimizer=SimpleNamespace(optimizer=None)
            )
    finally:
        dist.destroy_process_group()
