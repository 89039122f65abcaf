"""Noise and steps for a target ε against ε itself."""

import itertools
import math

import pytest

from doppler_hf.privacy.accounting import calibration
from doppler_hf.privacy.accounting.accounting import Releases, get_epsilon, get_total_epsilon
from doppler_hf.privacy.accounting.calibration import get_noise_multiplier, most_steps, noise_multiplier_if_any
from tests.support.refusals import refused
from tests.support.tiers import further, thorough

FOUR = (1.0, 0.5, 0.375, 0.3125)


@pytest.mark.parametrize(
    ("target", "rate", "steps", "strategy"),
    further(
        [
            (*run, strategy)
            for run in [(8.0, 0.02, 165), (20.0, 0.1, 3), (0.1, 0.25, 12), (1.0, 1e-4, 1), (20.0, 1e-4, 1000)]
            for strategy in [(1.0,), FOUR]
        ],
        quick=[(8.0, 0.02, 165, (1.0,)), (20.0, 0.1, 3, FOUR)],
    ),
)
def test_calibration_meets_the_target_from_below(target, rate, steps, strategy):
    terms = dict(target_epsilon=target, target_delta=1e-5, sample_rate=rate, steps=steps, strategy=strategy)
    sigma = get_noise_multiplier(**terms)
    unspent = 1e-3 if len(strategy) == 1 else 4e-3
    assert target * (1 - unspent) <= get_total_epsilon([Releases(sigma, rate, steps, strategy)], delta=1e-5) <= target
    assert noise_multiplier_if_any(**terms) == pytest.approx(sigma, rel=0.1)


def test_no_noise_is_known_for_a_unit_of_every_turn_or_a_tiny_epsilon():
    options = dict(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.3, steps=50)
    assert noise_multiplier_if_any(FOUR, **options) == math.inf
    assert noise_multiplier_if_any(FOUR[:3], **options | dict(target_epsilon=1e-9, target_delta=1e-9)) == math.inf
    assert noise_multiplier_if_any(FOUR[:1], **options | dict(sample_rate=1.0)) < math.inf


@pytest.mark.parametrize(
    ("target", "rate", "steps", "delta"), [(500.0, 0.25, 40, 1e-4), *thorough((0.1, 0.1, 20_000, 1e-5))]
)
def test_calibration_at_the_ends(target, rate, steps, delta):
    """Next to no noise, and very much."""
    sigma = get_noise_multiplier(target_epsilon=target, target_delta=delta, sample_rate=rate, steps=steps)
    assert target * (1 - 1e-3) <= get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta) <= target


@pytest.mark.parametrize(("above", "below"), [(3.0, 1.0), (math.inf, 0.0)])
@pytest.mark.parametrize("jump", [30.0, 1e-3])
def test_a_bound_that_jumps_is_met_from_below_the_jump(jump, above, below, monkeypatch):
    # As where amplification gives way to none: no noise multiplier lies in the tolerated range.
    monkeypatch.setattr(calibration, "bound", lambda history, **_: above if history[0][0] < jump else below)
    sigma = get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1, steps=10)
    assert jump <= sigma < jump * (1 + 1e-6)


@pytest.mark.parametrize("at_most", [1, 7, 300])
def test_the_most_steps_against_counting(at_most):
    costs = [0.0, *itertools.accumulate([0.5, 0.0, 0.25] * 100)]
    for target in (0.2, 0.5, 0.74, 0.75, costs[at_most], 1e3):
        steps = most_steps(costs.__getitem__, target_epsilon=target, at_most=at_most)
        assert steps == max(step for step in range(at_most + 1) if costs[step] <= target)


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (dict(target_epsilon=0.0), "out-of-range", "^target_epsilon .*0"),
        (dict(target_epsilon=1e13), "out-of-range", "^target_epsilon must be positive and at most 1e.12; got 1"),
        (dict(steps=0), "out-of-range", "^steps .*0"),
        (dict(target_epsilon=1e-9, target_delta=1e-9), "epsilon-out-of-reach", "target_epsilon"),
        (
            dict(strategy=FOUR, sample_rate=0.3),
            "strategy-too-long",
            "0.25; .*0.3",
        ),
    ],
)
def test_unreachable_targets_are_refused(arguments, code, value):
    with refused(code, match=value):
        get_noise_multiplier(**(dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=10) | arguments))
