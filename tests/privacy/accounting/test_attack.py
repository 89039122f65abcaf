"""The best attack: against the exact curves of a Gaussian and of one sampled step, and against attacks that are run."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy.accounting import Releases, secret_groups
from doppler_hf.privacy.accounting.attack import TradeOff, attack_in_words, percent, trade_off
from doppler_hf.privacy.accounting.composition import delta_curve

RATES = [1e-3, 1e-2, 0.1, 0.5]


def gaussian_rates(mu, rates):
    return norm.cdf(norm.ppf(rates) + mu)


def sampled_rates(sigma, rate, rates):
    """The most powerful test of N(0, σ²) against (1 − q) N(0, σ²) + q N(1, σ²): above a threshold it says "member"."""
    thresholds = norm.isf(rates, scale=sigma)
    return (1 - rate) * np.array(rates) + rate * norm.sf(thresholds, loc=1, scale=sigma)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 100])
def test_full_batches_against_the_exact_gaussian(mu, steps):
    found = trade_off([Releases(math.sqrt(steps) / mu, 1.0, steps)])
    reached, exact = np.array([found.true_positive_rate(rate) for rate in RATES]), gaussian_rates(mu, RATES)
    advantage = 2 * norm.cdf(mu / 2) - 1
    assert np.all(reached >= exact * (1 - 1e-9))
    assert found.advantage >= advantage * (1 - 1e-9)
    np.testing.assert_allclose(reached, exact, rtol=5e-3)
    assert found.advantage == pytest.approx(advantage, rel=5e-3)


@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.01), (2.0, 0.5), (1.0, 0.1)])
def test_one_sampled_step_against_the_most_powerful_test(sigma, rate):
    found = trade_off([Releases(sigma, rate, 1)])
    # Where the curve is steeper than 1; beyond it, telling non-members is easier, which the bound covers, too.
    rates = [each for each in (1e-3, 1e-2, 0.1) if each < norm.sf(0.5, scale=sigma)]
    exact = sampled_rates(sigma, rate, rates)
    reached = [found.true_positive_rate(each) for each in rates]
    assert np.all(reached >= exact * (1 - 1e-9))
    np.testing.assert_allclose(reached, exact, rtol=5e-3)
    total_variation = rate * (2 * norm.cdf(0.5 / sigma) - 1)
    assert total_variation * (1 - 1e-9) <= found.advantage <= total_variation * 1.01


@pytest.mark.parametrize("rate", [0.1, 0.55])
def test_no_attack_that_is_run_does_better(rate):
    """By the sum of the privacy losses of two rounds of ten turns, or of ten steps drawn each for itself."""
    sigma, size, generator = 0.8, 200_000, np.random.default_rng(0)
    turns = 10 if rate == 0.1 else 1
    rounds = 2 if turns == 10 else 10

    def losses(is_member):
        outputs = sigma * generator.standard_normal((size * rounds, turns))
        if is_member:
            takes_part = generator.random(len(outputs)) < rate * turns
            outputs[takes_part, generator.integers(turns, size=takes_part.sum())] += 1
        ratio = 1 - turns * rate + rate * np.exp((2 * outputs - 1) / (2 * sigma**2)).sum(axis=1)
        return np.log(ratio).reshape(size, rounds).sum(axis=1)

    non_members, members = losses(False), losses(True)
    found = trade_off([Releases(sigma, rate, turns * rounds)])
    for false_positive_rate in (1e-3, 1e-2, 0.1):
        reached = np.mean(members > np.quantile(non_members, 1 - false_positive_rate))
        # Five standard errors, of both rates.
        error = 5 * (math.sqrt(reached / size) + reached / math.sqrt(false_positive_rate * size))
        assert reached == pytest.approx(found.true_positive_rate(false_positive_rate), abs=error + 5e-3 * reached)


def test_no_attack_that_is_run_on_a_secret_group_does_better_and_none_is_thought_to_know_it():
    """By the mean ratio of four groups, each with one of two steps a round: 18 steps, of which the last two are of two."""
    sigma, size, generator = 1.0, 200_000, np.random.default_rng(0)
    c = np.array(NoiseShape.banded(4).c) / np.linalg.norm(NoiseShape.banded(4).c)
    columns = np.array([np.pad(c, (step, 17 - step)) for step in range(18)])

    def losses(is_member):
        z = generator.standard_normal((size, 21))
        if is_member:
            group = generator.integers(4, size=size)
            for first in (0, 8, 16):
                step = first + group + 4 * generator.integers(2, size=size)
                takes_part = np.flatnonzero(step < 18)
                z[takes_part] += columns[step[takes_part]] / sigma
        ratios = np.exp((z @ columns.T) / sigma - 1 / (2 * sigma**2))
        of_groups = []
        for group in range(4):
            first, second, third = (ratios[:, group + start : start + 8 : 4] for start in (0, 8, 16))
            last = 1 - third.shape[1] / 2 + third.sum(axis=1) / 2
            of_groups.append(first.mean(axis=1) * second.mean(axis=1) * last)
        return np.log(np.mean(of_groups, axis=0))

    non_members, members = losses(False), losses(True)
    found = trade_off([Releases(sigma, 1 / 8, 18, NoiseShape.banded(4).c)])
    known = TradeOff(*delta_curve([*Releases(sigma, 1 / 8, 18, NoiseShape.banded(4).c).rounds()]))
    for false_positive_rate in (1e-2, 0.1):
        reached = np.mean(members > np.quantile(non_members, 1 - false_positive_rate))
        error = 5 * (math.sqrt(reached / size) + reached / math.sqrt(false_positive_rate * size))
        bound = found.true_positive_rate(false_positive_rate)
        assert reached - error < bound < 1.15 * reached + error
        assert bound < 0.9 * known.true_positive_rate(false_positive_rate)


def test_the_bounds_of_both_directions_fail_together_with_the_probability_that_each_delta_contains(monkeypatch):
    failures = []
    bound = lambda epsilon, failure: failures.append(failure) or 0.0  # noqa: E731
    monkeypatch.setattr(secret_groups, "_simulated", lambda *_, **__: bound)
    trade_off([Releases(1.0, 1 / 8, 16, NoiseShape.banded(2).c)])
    contained = secret_groups.deltas_of_runs([], np.zeros(1), is_removal=True)[0]
    failures.pop()
    assert len(failures) > 2
    assert sum(failures) <= contained * (1 + 1e-9)


@pytest.mark.parametrize(
    ("history", "rate", "advantage"),
    [
        ([], 0.01, 0.0),
        ([Releases(1.0, 0.1, 0)], 0.01, 0.0),
        ([Releases(1.0, 0.1, 5), Releases(0.0, 0.1, 1)], 1.0, 1.0),
        ([Releases(1e-4, 0.5, 3)], 1.0, 1.0),  # where the distribution overflows
    ],
)
def test_nothing_released_is_guessing_and_no_noise_is_everything(history, rate, advantage):
    found = trade_off(history)
    assert found.true_positive_rate(0.01) == pytest.approx(rate)
    assert found.advantage == pytest.approx(advantage)


def test_the_sentence_rounds_up():
    assert [percent(share) for share in (0.0341, 0.034, 0.00561, 1.0)] == ["3.5 %", "3.4 %", "0.6 %", "100 %"]
    history = [Releases(0.746384, 1000 / 67349, 204)]
    assert attack_in_words(trade_off(history), epsilon=2.9978) == (
        "In this run (ε = 3), an attack on the model with 1 % false positives recognises a training record with a "
        "probability of at most 3.5 %; guessing recognises it with a probability of 1 %."
    )
