"""The clip norm that follows a quantile: its count, its noise, and what is accounted. False-alarm rates are stated."""

import math
import time

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import nn

from doppler_hf import DopplerTrainer, GradientRecorder
from doppler_hf.audit import neighbour_distances
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import ClippedGradients, GaussianMechanism, PrivacyLedger, get_epsilon
from doppler_hf.privacy.noise import AdaptiveClip, adaptive_clip
from tests.support.ledgers import statement
from tests.support.tiny import head_alone, text_data, tiny_bert
from tests.support.trainers import NoSignal, trained, trainer_of

# Whole trainings, which pass the same arrays again and again; the tests of the modules check shapes.
pytestmark = pytest.mark.usefixtures("unchecked_arrays")

ADAPTIVE = dict(clipping="vanilla", clipping_quantile=0.5)


def linear(norms, *, weights=None, max_grad_norm=1.0):
    """The clipped sums of examples whose gradients have these norms."""
    model = nn.Linear(1, 1, bias=False).double()
    with ClippedGradients(model, max_grad_norm=max_grad_norm) as clipped:
        clipped.backward(model(torch.tensor(norms, dtype=torch.float64)[:, None]).squeeze(1), weights=weights)
        return clipped, clipped.sums["weight"].item()


def test_it_counts_what_is_not_clipped():
    clipped, total = linear([0.1, 0.3, 0.5, 1.5, 7.0, 100.0])
    assert clipped.num_within.item() == pytest.approx(3 - 3, abs=1e-9)
    assert total == pytest.approx(0.1 + 0.3 + 0.5 + 3, rel=2e-3)
    assert linear([0.75, 1.0])[0].num_within.item() == pytest.approx(0.75 + 0.5 - 1)
    assert linear([0.1, 0.2, 0.3, math.inf])[0].num_within.item() == 3 - 2
    assert linear([0.1, 9.0, 9.0], weights=torch.tensor([0.5, 0.25, 0.25]))[0].num_within.item() == 0.5 - 0.5
    clipped.reset()
    assert clipped.num_within.item() == 0


@pytest.mark.parametrize("norm", [0.0, 1.0, 1.02, 1e30, math.inf, math.nan])
def test_an_example_moves_the_count_by_half_at_most(norm):
    def count(norms):
        return linear(norms)[0].num_within.item()

    assert abs(count([norm])) <= 0.5
    assert abs(count([0.3, 5.0, norm]) - count([0.3, 5.0])) <= 0.5


def share_of(clip, norms):
    return np.clip(1.5 - np.asarray(norms) / clip, 0, 1).mean()


@pytest.mark.parametrize(("quantile", "first"), [(0.2, 1e-2), (0.9, 1e2)])
def test_without_noise_it_finds_the_quantile(quantile, first):
    norms = np.exp(np.random.default_rng(0).normal(size=4000))
    mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=len(norms))
    clip = AdaptiveClip(mechanism, quantile=quantile, first=first)
    for step in range(700):
        count = torch.tensor((share_of(clip.max_grad_norm, norms) - 0.5) * len(norms), dtype=torch.float64)
        clip.release(count, step=step)
    found = scipy.optimize.brentq(lambda bound: share_of(bound, norms) - quantile, 1e-3, 1e3)
    assert clip.max_grad_norm == pytest.approx(found, rel=1e-3)
    assert found == pytest.approx(np.quantile(norms, quantile), rel=0.2)  # it is no step


def test_a_step_is_that_of_the_paper_and_stays_near_the_first():
    mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=10)
    clip = AdaptiveClip(mechanism, quantile=0.3, first=2.0)
    assert clip.release(torch.tensor(4.0), step=0) == pytest.approx(2.0 * math.exp(-0.2 * (0.9 - 0.3)))
    for sign, farthest in ((1.0, 2e-3), (-1.0, 2e3)):
        for step in range(3):
            clip.release(torch.tensor(sign * 1e9), step=step)
        assert clip.max_grad_norm == pytest.approx(farthest)
    small = AdaptiveClip(mechanism, quantile=0.3, first=1e-2)
    small.release(torch.tensor(1e9), step=0)
    assert small.max_grad_norm == 1e-4  # above what is nothing but rounding
    kept = AdaptiveClip(mechanism, quantile=0.3, first=2.0, max_grad_norm=3.0)
    assert kept.release(torch.tensor(-2.0), step=0) == pytest.approx(3.0)


def test_in_bfloat16_it_is_refused(tmp_path):
    """Where 200 equal texts moved the count by 13 times its bound, with one longer text beside them."""
    with pytest.raises(ValueError, match=r"^clipping_quantile must be None in bfloat16, got 0\.5: padding"):
        trainer_of(tmp_path, model=tiny_bert(), bf16=True, **ADAPTIVE).train()


@pytest.mark.parametrize("draw_ahead", [False, True])
def test_the_noise_is_that_of_the_clip_norm_of_its_step(draw_ahead):
    number, clip_norms = 40_000, (0.5, 3.0, 3.0, 0.02)
    with GaussianMechanism(
        noise_multiplier=2.0, max_grad_norm=0.5, expected_batch_size=4, draw_ahead=draw_ahead
    ) as mechanism:
        for step, clip_norm in enumerate(clip_norms):
            deadline = time.monotonic() + 60
            while draw_ahead and step and mechanism.prepared < number:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            mechanism.rescale(clip_norm)
            assert mechanism.noise_std(step) == pytest.approx(2.0 * clip_norm / 4)
            noise = mechanism.privatize({"w": torch.zeros(number)}, step=step)["w"].double().numpy()
            # Two-sided, at 1e-7 a step.
            low, high = scipy.stats.chi2.ppf([5e-8, 1 - 5e-8], number)
            assert low < np.sum((noise / mechanism.noise_std(step)) ** 2) < high
            assert scipy.stats.kstest(noise, "norm", (0, mechanism.noise_std(step))).pvalue > 1e-7


def test_shaped_noise_keeps_its_clip_norm():
    mechanism = GaussianMechanism(
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4, shape=NoiseShape.parse("banded:bands=4")
    )
    with pytest.raises(ValueError, match=r"^The noise must be white for a clip norm that changes, got the shape banded"):
        mechanism.rescale(2.0)
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match=r"max_grad_norm must be a finite number > 0"):
            GaussianMechanism(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4).rescale(wrong)


def test_its_count_has_the_promised_noise(tmp_path, monkeypatch):
    for name, value in (("FARTHEST", 1e30), ("SMALLEST_CLIP_NORM", 0.0)):
        monkeypatch.setattr(adaptive_clip, name, value)  # where C stops, the noise does not show
    trainer = trained(trainer_of(
        tmp_path, cls=NoSignal, model=head_alone(), data=text_data(8), per_device_train_batch_size=8, max_steps=100,
        gradient_accumulation_steps=1, noise_multiplier=3.0, **ADAPTIVE,
    ))  # fmt: skip
    run = trainer.private_run
    norms = np.array([1.0] + [logs["clip_norm"] for logs in trainer.state.log_history if "clip_norm" in logs])
    # All eight are drawn at every step, and none is clipped: b̃ = 1 + noise.
    shares = 0.5 - np.diff(np.log(norms)) / 0.2
    std = 0.5 * run.statement.count_noise_multiplier / 8
    assert run.statement.count_noise_multiplier == pytest.approx(3.0 * math.sqrt(99))
    assert scipy.stats.kstest(shares, "norm", (1.0, std)).pvalue > 1e-7


@pytest.mark.parametrize("more", [{}, dict(report_train_loss="private", train_loss_budget=0.2)])
def test_gradient_and_count_are_accounted_as_one_release(tmp_path, more):
    trainer = trainer_of(tmp_path, target_epsilon=3.0, noise_multiplier=None, data=text_data(400), **ADAPTIVE, **more)
    terms = trainer.private_run.statement
    inverse = sum(
        1 / sigma**2
        for sigma in (terms.noise_multiplier, terms.count_noise_multiplier, terms.loss_noise_multiplier)
        if sigma
    )
    assert terms.effective_noise_multiplier == pytest.approx(inverse**-0.5)
    share = 1.0 - more.get("train_loss_budget", 0.0)
    assert terms.count_noise_multiplier**-2 * terms.effective_noise_multiplier**2 == pytest.approx(0.01 * share)
    epsilon = get_epsilon(
        noise_multiplier=inverse**-0.5, sample_rate=terms.sample_rate, steps=terms.steps_planned, delta=terms.target_delta
    )
    assert 2.97 < epsilon <= 3.0 + 1e-9
    trainer.train()
    assert trainer.privacy.epsilon() == pytest.approx(epsilon, rel=1e-6)
    ledger = PrivacyLedger.load(tmp_path / "out")
    words = ledger.statement.clipping_in_words
    assert words.startswith("1 at first, then the quantile 0.5 of the norms, by a count with noise multiplier ")
    others = "the loss and the count" if more else "the count"
    assert f"with {others} σ₀ =" in ledger.statement.noise_multiplier_in_words
    trainer.create_model_card()
    assert words in (tmp_path / "out" / "README.md").read_text()


def test_gradients_are_clipped_to_the_norm_of_their_step_and_the_optimizer_knows(tmp_path):
    seen = []

    class Watching(DopplerTrainer):
        def training_step(self, *args, **kwargs):
            before = self.private_run.mechanism.max_grad_norm
            loss = super().training_step(*args, **kwargs)
            seen.append((before, self.optimizer.optimizer.noise_std, self.private_run._clipped.max_grad_norm))
            return loss

    trainer = trainer_of(tmp_path, cls=Watching, noise_seed=1, gradient_accumulation_steps=1, max_steps=8, **ADAPTIVE)
    trainer.train()
    logged = [logs["clip_norm"] for logs in trainer.state.log_history if "clip_norm" in logs]
    assert [after for *_, after in seen] == logged
    assert [before for before, *_ in seen] == [1.0, *logged[:-1]]
    assert len(set(logged)) == 8
    assert [std for _, std, _ in seen] == pytest.approx([before / 4 for before, *_ in seen])


@pytest.mark.parametrize("options", [{}, dict(privacy_unit_column="user", per_device_train_batch_size=2)])
def test_one_unit_moves_sum_and_count_as_claimed(tmp_path, options):
    data = text_data().map(lambda row, index: {"user": index % 9}, with_indices=True)
    if not options:
        data = data.remove_columns("user")
    trainer = trainer_of(
        tmp_path, model=tiny_bert().double(), data=data, per_sample_max_grad_norm=0.5, remove_unused_columns=True,
        **ADAPTIVE, **options,
    )  # fmt: skip
    result = neighbour_distances(trainer, pairs=6, tolerance=1e-6)
    assert 0.9 < result.distances.max() <= 1.0 + 1e-6
    assert result.couplings.max() < 1e-9


def test_a_resumed_run_goes_on_with_the_clip_norm_of_its_checkpoint(tmp_path):
    options = dict(noise_seed=1, max_steps=4, save_strategy="steps", save_steps=2, grad_sample_self_check=False, **ADAPTIVE)
    whole = trained(trainer_of(tmp_path, **options))
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    logs = [[each["clip_norm"] for each in trainer.state.log_history if "clip_norm" in each] for trainer in (whole, resumed)]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert PrivacyLedger.load(tmp_path / "out" / "checkpoint-2").max_grad_norm_at(2) == logs[0][1]


def test_a_ledger_with_a_quantile_needs_the_noise_of_its_count(tmp_path):
    with_quantile = dict(clipping_quantile=0.5)
    for name, terms in {"none": {}, "both": with_quantile | dict(count_noise_multiplier=9.0), "one": with_quantile}.items():
        ledger = PrivacyLedger.open(statement(**terms))
        ledger.save(tmp_path / name)
        if name != "one":
            assert PrivacyLedger.load(tmp_path / name).statement == statement(**terms)
            continue
        with pytest.raises(ValueError, match="count_noise_multiplier"):
            PrivacyLedger.load(tmp_path / name)


def test_a_recorder_is_refused_and_auto_noise_is_white(tmp_path):
    with pytest.raises(ValueError, match=r"^clipping_quantile must be None with a GradientRecorder, got 0\.5"):
        trainer_of(tmp_path, callbacks=[GradientRecorder()], **ADAPTIVE).train()
    options = dict(target_epsilon=8.0, noise_multiplier=None, data=text_data(400), max_steps=100, learning_rate=None)
    assert trainer_of(tmp_path, **options).private_run.statement.noise_shape != "white"
    assert trainer_of(tmp_path, **options, **ADAPTIVE).private_run.statement.noise_shape == "white"
