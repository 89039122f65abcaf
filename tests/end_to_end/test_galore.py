"""GaLore in the Trainer: HF's two arguments."""

import pytest
import torch

from tests.support.trainers import trained, trainer_of, weights

GALORE = {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=3,scale=0.5"}


def test_the_matrices_of_linear_layers_are_updated_at_rank_four(tmp_path):
    trainer = trained(trainer_of(tmp_path, low_pass_filter="second-order", weight_decay=0.1, **GALORE))
    optimizer = trainer.optimizer.optimizer
    assert {(group["rank"], group["weight_decay"]) for group in optimizer.param_groups} == {
        (4, 0.1), (None, 0.1), (None, 0.0),
    }  # fmt: skip
    assert {(group["update_proj_gap"], group["scale"]) for group in optimizer.param_groups} == {(3, 0.5)}
    for name, p in trainer.model.named_parameters():
        # The classifier has two rows, fewer than the rank; embeddings are no linear layers.
        is_projected = p.ndim == 2 and "embeddings" not in name and min(p.shape) > 4
        shapes = {tensor.shape for tensor in optimizer.state[p]["filter_states"]}
        assert shapes == {torch.Size((4, p.shape[1])) if is_projected else p.shape}, name


def test_resumed_equals_uninterrupted(tmp_path):
    options = dict(noise_seed=1, max_steps=5, low_pass_filter="second-order", save_strategy="steps", save_steps=3)
    options |= GALORE | {"optim_args": GALORE["optim_args"] + ",projector_source=filtered"}
    whole = trained(trainer_of(tmp_path, **options))
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert torch.equal(weights(resumed), weights(whole))


def test_a_rank_that_no_matrix_exceeds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rank must be below the shorter side of some matrix, got 128"):
        trainer_of(tmp_path, optim_target_modules="all-linear").train()
