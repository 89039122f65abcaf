"""Noise and steps for a target ε against ε itself."""

import math

import pytest

from doppler_hf.privacy.accounting import accounting, calibration
from doppler_hf.privacy.accounting.accounting import Releases, get_epsilon, get_total_epsilon
from doppler_hf.privacy.accounting.calibration import get_noise_multiplier, get_steps, noise_multiplier_in_turns
from doppler_hf.privacy.accounting.upper_bounds import prv_epsilon
from tests.support.tiers import thorough

ACCOUNTANTS = ["prv", "rdp", "pld"]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    ("target", "rate", "steps"), [(0.1, 0.5, 12), (1.0, 1e-4, 1), (8.0, 0.02, 165), (20.0, 0.1, 3), (20.0, 1e-4, 1000)]
)
def test_calibration_meets_the_target_from_below(target, rate, steps, accountant):
    sigma = get_noise_multiplier(
        target_epsilon=target, target_delta=1e-5, sample_rate=rate, steps=steps, accountant=accountant
    )
    cost = get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=1e-5, accountant=accountant)
    assert target * (1 - 1e-3) <= cost <= target


SPENT = [Releases(1.5, 0.03, 20), Releases(1.2, 0.01, 10)]


@pytest.mark.parametrize(("share", "accountant"), [(0.3, "rdp"), (0.9998, "rdp"), (0.9, "prv"), (0.9998, "pld")])
def test_calibration_counts_what_was_spent(share, accountant):
    already = get_total_epsilon(SPENT, delta=1e-5, accountant=accountant)
    target = already / share
    options = dict(target_epsilon=target, target_delta=1e-5, sample_rate=0.03, steps=5, accountant=accountant)
    sigma = get_noise_multiplier(**options, spent=SPENT)
    total = get_total_epsilon([*SPENT, Releases(sigma, 0.03, 5)], delta=1e-5, accountant=accountant)
    assert max(target * (1 - 1e-3), already) <= total <= target
    assert sigma > get_noise_multiplier(**options)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_groups_that_take_turns_are_calibrated_to_the_same_epsilon(accountant):
    options = dict(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.05, steps=50, accountant=accountant)
    sigmas = [noise_multiplier_in_turns(groups, **options) for groups in (1, 4)]
    for groups, sigma in zip((1, 4), sigmas, strict=True):
        turns = Releases.in_turns(sigma, 0.05, 50, groups=groups)
        assert get_total_epsilon([turns], delta=1e-5, accountant=accountant) == pytest.approx(3.0, rel=2e-3)
    assert sigmas[0] < sigmas[1]


def test_no_noise_is_known_for_a_unit_of_every_turn_or_a_tiny_epsilon():
    options = dict(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.25, steps=50, accountant="rdp")
    assert noise_multiplier_in_turns(4, **options) == math.inf
    assert noise_multiplier_in_turns(3, **options | dict(target_epsilon=1e-9)) == math.inf
    # All of one group's units at every step, which needs no turns.
    assert noise_multiplier_in_turns(1, **options | dict(sample_rate=1.0)) < math.inf


def test_a_target_that_is_spent_already_is_refused():
    already = get_total_epsilon(SPENT, delta=1e-5, accountant="rdp")
    options = dict(target_delta=1e-5, sample_rate=0.03, steps=1, accountant="rdp", spent=SPENT)
    with pytest.raises(ValueError, match=rf"costs ε = {already:.6g}, .* target_epsilon=0.5. Raise target_epsilon"):
        get_noise_multiplier(target_epsilon=0.5, **options)
    with pytest.raises(ValueError, match="which leaves nothing of target_epsilon"):
        get_noise_multiplier(target_epsilon=already, **options)


@pytest.fixture
def calls(monkeypatch):
    """The evaluations of PRV, the slowest."""
    calls = []

    def counted(mechanisms, *, delta):
        calls.append(mechanisms)
        return prv_epsilon(mechanisms, delta=delta)

    monkeypatch.setattr(accounting, "prv_epsilon", counted)
    accounting.bound.cache_clear()
    return calls


@pytest.mark.parametrize(
    ("target", "rate", "steps", "delta", "at_most"),
    [
        (1.0, 0.5, 30, 1e-6, 2),
        (20.0, 1e-4, 1000, 1e-5, 2),  # where PLD stands in for PRV
        (500.0, 0.25, 40, 1e-4, 2),  # next to no noise
        *thorough((0.1, 0.1, 20_000, 1e-5, 3)),
        (1.0, 1e-3, 10_000_000, 1e-5, 3),  # where RDP stands in for PRV
        (0.1, 1e-4, 1, 1e-5, 3),  # RDP's bound is 45 times as large
        *thorough((1e-3, 0.01, 1000, 1e-5, 6)),  # beyond the reach of RDP, close to the least that PRV can say
    ],
)
def test_calibration_asks_prv_a_few_times(target, rate, steps, delta, at_most, calls):
    sigma = get_noise_multiplier(target_epsilon=target, target_delta=delta, sample_rate=rate, steps=steps)
    assert ((sigma, rate, steps),) in calls
    assert len(calls) <= at_most
    assert target * (1 - 1e-3) <= get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta) <= target


def calibrated(epsilon_of, monkeypatch, *, target=2.0):
    """Calibrate where ε is a function of σ alone, and return σ."""
    monkeypatch.setattr(calibration, "bound", lambda mechanisms, **_: epsilon_of(mechanisms[0][0]))
    return get_noise_multiplier(target_epsilon=target, target_delta=1e-5, sample_rate=0.1, steps=10)


@pytest.mark.parametrize(("above", "below"), [(3.0, 1.0), (math.inf, 0.0)])
@pytest.mark.parametrize("jump", [30.0, 1e-3])
def test_a_bound_that_jumps_is_met_from_below_the_jump(jump, above, below, monkeypatch):
    # As where PRV gives way to RDP: no noise multiplier lies in the tolerated range.
    sigma = calibrated(lambda sigma: above if sigma < jump else below, monkeypatch)
    assert jump <= sigma < jump * (1 + 1e-6)


@pytest.mark.parametrize("spent", [(), SPENT], ids=["fresh", "spent"])
@pytest.mark.parametrize("at_most", [1, 300])
def test_affordable_steps_against_counting(at_most, spent):
    mechanism = dict(noise_multiplier=1.1, sample_rate=0.03)

    def total(steps):
        return get_total_epsilon([*spent, Releases(**mechanism, steps=steps)], delta=1e-5, accountant="rdp")

    costs = [total(steps) for steps in range(at_most + 1)]
    targets = [0.2, costs[0] + 1e-9, costs[1], costs[at_most // 2] + 1e-4, costs[-1] * 0.9999, costs[-1], 50.0]
    for target in targets:
        steps = get_steps(target_epsilon=target, **mechanism, delta=1e-5, accountant="rdp", spent=spent, at_most=at_most)
        assert steps == max(0, sum(cost <= target for cost in costs) - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(target_epsilon=math.inf), "target_epsilon must be a finite number > 0, got inf"),
        (dict(at_most=-1), "at_most must be at least 0, got -1"),
    ],
)
def test_bad_questions_about_steps_are_refused(arguments, message):
    options = dict(target_epsilon=1.0, noise_multiplier=1.0, sample_rate=0.1, delta=1e-5, at_most=3) | arguments
    with pytest.raises(ValueError, match=message):
        get_steps(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(target_epsilon=0.0), "target_epsilon must be a finite number > 0, got 0"),
        (dict(steps=0), "steps must be at least 1, got 0"),
        (dict(target_epsilon=1e-9, accountant="rdp"), "Raise target_epsilon or target_delta"),
    ],
)
def test_unreachable_targets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_noise_multiplier(**(dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=10) | arguments))
