"""GaLore in the Trainer: HF's two arguments, and noise in the subspace between refreshes."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from doppler_hf.optim import DopplerOptimizer
from doppler_hf.optim.galore import find_basis, is_wide
from doppler_hf.privacy import GaussianMechanism
from tests.support.tiers import thorough
from tests.support.tiny import tiny_bert
from tests.support.trainers import NoSignal, Recorder, trained, trainer_of, weights

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


def test_without_noise_the_subspace_takes_nothing_away(tmp_path, monkeypatch):
    """A gradient that is projected before the optimizer projects it is the same but for rounding.

    A product over a side of 16 is off by at most 16·eps/2 of the gradient's size, which is below 3 here: 24 examples of norm
    1 over a batch of 8. Three products make the projected gradient. A warm basis is that of G Gᵀ P, whose weakest direction
    takes on such errors as many times over as its condition says. Dividing by the denominator of Adam, 0.01 at least, makes
    of them at most 100 times as much, and seven steps of lr·scale = 0.005 put them into the weights.
    """
    conditions, warm = [1.0], find_basis

    def found(matrix, rank, *, projector, previous=None):
        if previous is not None:
            short = matrix if is_wide(matrix) else matrix.T
            conditions.append(torch.linalg.cond(short @ (short.T @ previous)).item())
        return warm(matrix, rank, projector=projector, previous=previous)

    monkeypatch.setattr("doppler_hf.optim.galore.find_basis", found)
    options = dict(noise_multiplier=0.0, noise_seed=1, max_steps=7, low_pass_filter="second-order", adam_epsilon=0.01)
    ends = []
    for in_subspace in (True, False):
        if not in_subspace:
            monkeypatch.setattr(DopplerOptimizer, "subspaces", lambda self: {})
        trainer = trained(trainer_of(tmp_path, model=tiny_bert().double(), **options, **GALORE))
        ends.append(weights(trainer))
    rounding = 3 * 16 * torch.finfo(torch.float64).eps / 2 * 3
    tolerance = 7 * 0.005 * 100 * max(conditions) * rounding
    moved = ends[0] - torch.cat([p.detach().flatten() for p in tiny_bert().double().parameters()])
    assert tolerance < 1e-3 * moved.abs().max()
    torch.testing.assert_close(ends[0], ends[1], atol=tolerance, rtol=0)


def test_the_step_that_finds_a_basis_has_full_noise_and_the_others_that_of_the_subspace(tmp_path, monkeypatch):
    asked, privatize = [], GaussianMechanism.privatize

    def recorded(self, sums, *, step, subspaces, places):
        asked.append((len(subspaces), {name: basis.clone() for name, basis in subspaces.items()}))
        return privatize(self, sums, step=step, subspaces=subspaces, places=places)

    monkeypatch.setattr(GaussianMechanism, "privatize", recorded)
    recorder = Recorder()
    trainer = trained(trainer_of(
        tmp_path, cls=NoSignal, callbacks=[recorder], max_steps=9, noise_multiplier=1.7, per_sample_max_grad_norm=0.3,
        model=tiny_bert(hidden_size=64, intermediate_size=64), **GALORE,
    ))  # fmt: skip
    assert [number > 0 for number, _ in asked] == [False, True, True] * 3
    std = 1.7 * 0.3 / 8  # σC/B
    names = [(name, p.shape, p.numel()) for name, p in trainer.model.named_parameters()]
    inside, outside = [], []
    for (_, subspaces), gradient in zip(asked, recorder.gradients, strict=True):
        for (name, shape, _), piece in zip(names, gradient.split([numel for *_, numel in names]), strict=True):
            if name in subspaces:
                basis, matrix = subspaces[name].double(), piece.view(shape)
                short = matrix if shape[0] <= shape[1] else matrix.T
                inside.append((basis.T @ short).flatten())
                outside.append((short - basis @ (basis.T @ short)).abs().max())
    noise = torch.cat(inside).numpy() / std
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], noise.size)  # two-sided at 1e-6
    assert low < np.sum(noise**2) < high
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-6
    assert max(outside) < 1e-5 * std * math.sqrt(64)


@pytest.mark.parametrize(
    ("saved_at", "more"),
    [*thorough((2, "")), (3, ",projector_source=filtered"), *thorough((5, ",basis_change=reset,projector=svd"))],
)
def test_resumed_equals_uninterrupted(tmp_path, more, saved_at):
    options = dict(noise_seed=1, max_steps=7, low_pass_filter="second-order", save_strategy="steps", save_steps=saved_at)
    options |= GALORE | {"optim_args": GALORE["optim_args"] + more}
    whole = trained(trainer_of(tmp_path, **options))
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{saved_at}"))
    assert torch.equal(weights(resumed), weights(whole))


def test_a_rank_that_no_matrix_exceeds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rank must be below the shorter side of some matrix, got 128"):
        trainer_of(tmp_path, optim_target_modules="all-linear").train()


def test_every_argument_reaches_the_optimizer(tmp_path):
    given = "rank=4,basis_change=reset,projector=svd,projector_source=filtered"
    options = dict(low_pass_filter="momentum", optim_target_modules="all-linear", optim_args=given)
    optimizer = trainer_of(tmp_path, **options).create_optimizer()
    assert (optimizer.basis_change, optimizer.projector, optimizer.projector_source) == ("reset", "svd", "filtered")
