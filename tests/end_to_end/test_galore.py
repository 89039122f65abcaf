"""GaLore in the Trainer: HF's two arguments."""

import torch

from tests.support.trainers import trained, trainer_of


def test_the_matrices_of_linear_layers_are_updated_at_rank_four(tmp_path):
    galore = {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=3,scale=0.5"}
    trainer = trained(trainer_of(tmp_path, low_pass_filter="second-order", weight_decay=0.1, **galore))
    optimizer = trainer.optimizer.optimizer
    assert {(group["rank"], group["weight_decay"]) for group in optimizer.param_groups} == {
        (4, 0.1), (None, 0.1), (None, 0.0),
    }  # fmt: skip
    assert {(group["update_proj_gap"], group["scale"]) for group in optimizer.param_groups if group["rank"]} == {(3, 0.5)}
    for name, p in trainer.model.named_parameters():
        # The classifier has two rows, fewer than the rank; embeddings are no linear layers.
        is_projected = p.ndim == 2 and "embeddings" not in name and min(p.shape) > 4
        shapes = {tensor.shape for tensor in optimizer.state[p]["filter_states"]}
        assert shapes == {torch.Size((4, p.shape[1])) if is_projected else p.shape}, name
