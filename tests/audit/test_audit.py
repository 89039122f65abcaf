"""The audit stays below the claim of the real trainer, comes near it, and catches every bug that is planted.

Bounds are at a confidence of 1 − 1e-6, so a test that expects a bound below the claim is wrong once in a million. A planted
bug is told apart with a wide margin (the bounds of 10,000 canaries vary by about 0.1).
"""

import itertools

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from datasets import Dataset
from torch import nn

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.audit import AuditTrainer
from doppler_hf.audit.canaries import CANARY_COLUMN, ORDINARY, numbered_rows
from doppler_hf.audit.likelihood import LikelihoodRatios
from doppler_hf.audit.lower_bounds import clopper_pearson_epsilon, one_run_epsilon
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import AllocationSampler, GaussianMechanism
from doppler_hf.privacy.clipping import clipped_gradients as clipping
from tests.support.refusals import refused
from tests.support.tiers import thorough

SURE = 1 - 1e-6
CANARIES = 10_000


class Line(nn.Module):
    """Three weights, so that a step of ten thousand canaries takes no time."""

    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return self.layer(x).squeeze(1)


class LineTrainer(DopplerTrainer):
    """A trainer with a loss of its own, as users write it."""

    def compute_per_sample_loss(self, model, inputs):
        return (model(inputs["x"]) - inputs["labels"]) ** 2


class AuditOfLine(AuditTrainer, LineTrainer):
    pass


def points(number=200):
    generator = np.random.default_rng(0)
    return Dataset.from_dict({"x": generator.normal(size=(number, 2)).tolist(), "labels": generator.normal(size=number)})


def stack(examples):
    return {name: torch.tensor([example[name] for example in examples], dtype=torch.float32) for name in examples[0]}


def arguments(tmp_path, **overrides):
    # About half of the canaries are in: with B = 5,000 the sample rate is near 1, and the bound near its best. The larger δ,
    # the more canaries speak for a bound.
    options = dict(
        output_dir=str(tmp_path), noise_multiplier=1.0, target_delta=1e-2, allow_large_delta=True,
        clipping="vanilla", per_device_train_batch_size=5000, max_steps=1, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_strategy="no", use_cpu=True, grad_sample_self_check=False,
    )  # fmt: skip
    return DopplerTrainingArguments(**(options | overrides))


def audit_of(tmp_path, *, number=200, num_canaries=CANARIES, **overrides):
    return AuditOfLine(
        model=Line(), args=arguments(tmp_path, **overrides), train_dataset=points(number), num_canaries=num_canaries,
        data_collator=stack,
    )  # fmt: skip


def audited(tmp_path, **options):
    return audit_of(tmp_path, **options).audit(confidence=SURE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipping": "automatic", "gradient_accumulation_steps": 5, "per_device_train_batch_size": 1000},
        # C/√2 for each of two layers would do for σ√2; the claim does not know that the other one is empty.
        {"clipping_granularity": "per_layer", "noise_multiplier": 0.7},
        {"max_steps": 4, "per_device_train_batch_size": 1500, "per_sample_max_grad_norm": 0.01},
    ],
    ids=["vanilla", "automatic", "per_layer", "four steps, q = 0.3"],
)
def test_audit_of_the_real_trainer_is_below_the_claim_and_near_it(options, tmp_path):
    result = audited(tmp_path, **options)
    assert not result.contradicts_claim
    both = {"delta": 1e-2, "confidence": 1 - (1 - SURE) / 2}  # each may be wrong with half the error allowed
    assert result.lower_bounds == {
        "one run": one_run_epsilon(result.scores, result.included, **both),
        "independent trials": clopper_pearson_epsilon(result.scores, result.included, **both),
    }
    assert 0.2 * result.claimed_epsilon < result.lower_bound < result.claimed_epsilon
    assert result.claimed_epsilon < 4.0


@pytest.mark.parametrize(("granularity", "parts"), [("flat", 1), ("per_layer", 2)])
def test_scores_have_the_distribution_that_the_accountant_bounds(granularity, parts, tmp_path):
    # One step: the score is an increasing function of x ~ 𝒩(0, σ²), or (1 − q)·𝒩(0, σ²) + q·𝒩(1, σ²) with the canary, σ in
    # units of what a canary may contribute: C, or C/√2 where the canaries' weights are one of two layers.
    batch, sigma = 2000, 0.6 * parts**0.5
    result = audited(
        tmp_path, per_device_train_batch_size=batch, noise_multiplier=0.6, clipping="automatic",
        clipping_granularity=granularity,
    )  # fmt: skip
    rate = batch / (200 + result.included.sum())
    # Far to the left the logarithm has lost all digits; nothing has been lost of the order.
    x = 0.5 + sigma**2 * np.log(np.maximum(np.exp(result.scores) - (1 - rate), 1e-300) / rate)
    cdf = lambda q, shift: scipy.stats.norm.cdf(q, loc=shift, scale=sigma)  # noqa: E731
    out = scipy.stats.kstest(x[~result.included], lambda q: cdf(q, 0.0))
    inside = scipy.stats.kstest(x[result.included], lambda q: (1 - rate) * cdf(q, 0.0) + rate * cdf(q, 1.0))
    assert min(out.pvalue, inside.pvalue) > 5e-7  # false alarm 1e-6


def test_turns_are_read_as_their_densities_say():
    # b = 3, rounds of two turns, the last one cut short: the mean over groups of the densities over all patterns of turns.
    shape, rate, sigma, steps = NoiseShape.banded(3), 0.4, 0.8, 8
    strategy = scipy.linalg.toeplitz(np.pad(shape.c, (0, steps - 3)), np.zeros(steps))
    observed = np.random.default_rng(0).normal(size=(4, steps))
    ratio = np.zeros(4)
    for group in range(3):
        turns = range(group, steps, 3)
        rounds = [turns[start : start + 2] for start in range(0, len(turns), 2)]
        for chosen in itertools.product(*([*turns_of, None] for turns_of in rounds)):
            taken = np.isin(np.arange(steps), [step for step in chosen if step is not None])
            chances = (1 - rate * len(of) if step is None else rate for step, of in zip(chosen, rounds, strict=True))
            mean, chance = strategy @ taken, np.prod([*chances]) / 3
            white = observed @ strategy.T
            ratio += chance * np.exp((np.square(white) - np.square(white - mean)).sum(axis=1) / (2 * sigma**2))
    attack = LikelihoodRatios(4, shape=shape, sample_rate=rate, turns_per_round=2)
    for step in range(steps):
        attack.see(observed[:, step], sigma=sigma)
    np.testing.assert_allclose(attack.scores(), np.log(ratio), rtol=1e-10)


def test_halved_noise_is_caught(monkeypatch, tmp_path):
    privatize = GaussianMechanism.privatize

    def with_half_the_noise(self, sums, **options):
        means = {name: total / self.expected_batch_size for name, total in sums.items()}
        return {name: (means[name] + released) / 2 for name, released in privatize(self, sums, **options).items()}

    monkeypatch.setattr(GaussianMechanism, "privatize", with_half_the_noise)
    assert audited(tmp_path).contradicts_claim


def test_clipping_to_twice_the_norm_is_caught(monkeypatch, tmp_path):
    right = clipping.clip_factors
    monkeypatch.setattr(clipping, "clip_factors", lambda norms, **options: 2.0 * right(norms, **options))
    assert audited(tmp_path, grad_sample_self_check=False).contradicts_claim


def shuffle_with_repeats(self, step):
    """Batches of B from a shuffled order, each filled up with repetitions of its own first half."""
    batch = np.random.default_rng(step).permutation(self.num_examples)[: self.expected_batch_size]
    return np.tile(batch[: len(batch) // 4], 4)


def everything(self, step):
    return np.arange(self.num_examples)


@pytest.mark.parametrize(
    ("draw", "batch", "steps"),
    [*thorough((shuffle_with_repeats, 4000, 1)), (everything, 1300, 4)],
    ids=["a shuffle with repeats", "larger inclusion"],
)
def test_another_sampling_is_caught(draw, batch, steps, monkeypatch, tmp_path):
    monkeypatch.setattr(AllocationSampler, "draw", draw)
    assert audited(tmp_path, per_device_train_batch_size=batch, max_steps=steps).contradicts_claim


# Nearly every canary takes part in all turns of its group. Which group that is the attacker has to find out too.
SHAPED = dict(
    noise_shape="banded:c=1,0.99,0.98,0.97,0.96,0.95,0.94,0.93", max_steps=64, per_device_train_batch_size=610,
    noise_multiplier=2.5,
)  # fmt: skip


def test_audit_of_shaped_noise_is_below_the_claim_and_near_it(tmp_path):
    result = audited(tmp_path, **SHAPED)
    assert not result.contradicts_claim
    assert 0.1 * result.claimed_epsilon < result.lower_bound < result.claimed_epsilon


@pytest.mark.thorough
def test_white_noise_that_is_not_raised_by_the_norm_of_the_strategy_is_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(NoiseShape, "norm", property(lambda self: 1.0))  # It is 2.73.
    assert audited(tmp_path, **SHAPED).contradicts_claim


def test_training_set_has_the_ordinary_rows_and_the_included_canaries(tmp_path):
    trainer = audit_of(tmp_path, number=50, num_canaries=30)
    numbers = np.array(trainer.train_dataset[CANARY_COLUMN])
    assert numbers[:50].tolist() == [ORDINARY] * 50
    assert numbers[50:].tolist() == np.flatnonzero(trainer.included).tolist()
    assert trainer.train_dataset[:50]["x"] == points(50)[:]["x"]
    assert all(row in points(50)[:]["x"] for row in trainer.train_dataset[50:]["x"])


def test_coins_are_fair_independent_and_new_each_time(tmp_path):
    first, second = (audit_of(tmp_path, num_canaries=4000).included for _ in range(2))
    # Binomial(4000, ½), two-sided at 3e-7 each: together 1e-6.
    low, high = scipy.stats.binom.ppf([1.5e-7, 1 - 1.5e-7], 4000, 0.5)
    for heads in (first.sum(), second.sum(), np.sum(first == second)):
        assert low <= heads <= high


def test_a_canary_is_a_unit_of_its_own():
    data = Dataset.from_dict({"user": [7, 7, 8], "a": [0, 1, 2]})
    chosen = numbered_rows(data, rows=np.array([0, 1, 2, 0]), canaries=np.array([-1, -1, -1, 3]), unit_column="user")
    owners = chosen["user"]
    assert owners[0] == owners[1] != owners[2]
    assert owners[3] not in owners[:3]


@pytest.mark.parametrize(("name", "value"), [("noise_multiplier", 0.0), ("disable_dp", True), ("noise_seed", 1)])
def test_runs_that_claim_nothing_are_refused(name, value, tmp_path):
    args = arguments(tmp_path)
    setattr(args, name, value)
    with refused("no-privacy-to-test"):
        AuditOfLine(model=Line(), args=args, train_dataset=points(), num_canaries=20)


def test_other_bad_input_is_refused(tmp_path):
    good = dict(model=Line(), args=arguments(tmp_path), train_dataset=points(), num_canaries=20, data_collator=stack)
    with refused("out-of-range", match="num_canaries"):
        AuditOfLine(**(good | {"num_canaries": 19}))
    with refused("not-our-arguments", match="NoneType"):
        AuditOfLine(**(good | {"args": None}))
    with refused("not-a-dataset"):
        AuditOfLine(**(good | {"train_dataset": [{"x": [0.0, 0.0], "labels": 0.0}] * 9}))
    with refused("column-is-taken", match="'canary'"):
        AuditOfLine(**(good | {"train_dataset": points().rename_column("x", CANARY_COLUMN)}))
    with refused("out-of-range", match="confidence"):
        AuditOfLine(**good).audit(confidence=1.5)
    with refused("audited-before"):
        AuditOfLine(**good)
