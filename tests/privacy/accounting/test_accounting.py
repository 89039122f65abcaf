"""ε against Google's dp-accounting, and what it is turned into (noise, steps) against ε itself."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from doppler_hf.privacy.accounting import accounting
from doppler_hf.privacy.accounting.accounting import (
    Releases,
    default_delta,
    get_epsilon,
    get_epsilons,
    get_noise_multiplier,
    get_steps,
    get_total_epsilon,
    joint_noise_multiplier,
)
from doppler_hf.privacy.accounting.upper_bounds import prv_epsilon
from tests.support.tiers import further, thorough

ACCOUNTANTS = ["prv", "rdp", "pld"]

CASES = [
    # noise multiplier, sample rate, steps, δ
    (0.8, 0.0184, 165, 6e-6),
    (1.0, 0.01, 1000, 1e-5),
    (2.0, 0.1, 300, 1e-5),
    (5.0, 0.5, 20, 1e-6),
    (0.6, 0.002, 3000, 1e-6),
]


def google(accountant, sigma, rate, steps):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), further(CASES, quick=CASES[:3]))
def test_prv_and_pld_agree_with_googles_privacy_loss_distributions(sigma, rate, steps, delta):
    mechanism = dict(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta)
    # Pessimistic, on a grid of its own: too large by less than one part in a thousand here.
    theirs = google(PLDAccountant(value_discretization_interval=1e-4), sigma, rate, steps).get_epsilon(delta)
    assert get_epsilon(**mechanism, accountant="pld") == pytest.approx(theirs, rel=1e-3)
    assert theirs * (1 - 1e-3) < get_epsilon(**mechanism) < theirs * 1.005


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), CASES)
def test_rdp_agrees_with_googles(sigma, rate, steps, delta):
    ours = get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="rdp")
    theirs = google(RdpAccountant(), sigma, rate, steps).get_epsilon(delta)
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours > get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="prv")


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    ("target", "rate", "steps"), [(0.1, 0.5, 12), (1.0, 1e-4, 1), (8.0, 0.02, 165), (20.0, 0.1, 3), (20.0, 1e-4, 1000)]
)
def test_calibration_meets_the_target_from_below(target, rate, steps, accountant):
    check_calibration(target, rate, steps, accountant)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 20.0])
@pytest.mark.parametrize("steps", [1, 30, 1000, 20_000])
@pytest.mark.parametrize("rate", [1e-4, 1e-3, 0.01, 0.1, 0.5])
def test_calibration_meets_the_target_from_below_over_a_wide_grid(rate, steps, target, accountant):
    check_calibration(target, rate, steps, accountant)


def check_calibration(target, rate, steps, accountant):
    sigma = get_noise_multiplier(
        target_epsilon=target, target_delta=1e-5, sample_rate=rate, steps=steps, accountant=accountant
    )
    cost = get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=1e-5, accountant=accountant)
    assert target * (1 - 1e-3) <= cost <= target


def test_full_batches_are_calibrated_to_the_exact_gaussian():
    # Noise 5 for 50 steps is noise 5/√50 once.
    target = get_epsilon_gaussian(5.0 / math.sqrt(50), 1e-6)
    options = dict(target_epsilon=target, target_delta=1e-6, sample_rate=1.0, steps=50, accountant="pld")
    assert 5.0 < get_noise_multiplier(**options) < 5.0 * 1.002


SPENT = [Releases(1.5, 0.03, 20), Releases(1.2, 0.01, 10)]


@pytest.mark.parametrize(
    ("share", "accountant"), [(0.3, "rdp"), (0.9, "rdp"), (0.9998, "rdp"), (0.9, "prv"), (0.3, "pld"), (0.9998, "pld")]
)
def test_calibration_counts_what_was_spent(share, accountant):
    already = get_total_epsilon(SPENT, delta=1e-5, accountant=accountant)
    target = already / share
    options = dict(target_epsilon=target, target_delta=1e-5, sample_rate=0.03, steps=5, accountant=accountant)
    sigma = get_noise_multiplier(**options, spent=SPENT)
    total = get_total_epsilon([*SPENT, Releases(sigma, 0.03, 5)], delta=1e-5, accountant=accountant)
    assert max(target * (1 - 1e-3), already) <= total <= target
    assert sigma > get_noise_multiplier(**options)


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
    accounting._bound.cache_clear()
    return calls


@pytest.mark.parametrize(
    ("target", "rate", "steps", "delta", "at_most"),
    [
        (3.0, 1000 / 67_349, 204, 67_349**-1.1, 2),
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


def test_a_target_out_of_reach_is_given_up_after_a_few_times(calls):
    with pytest.raises(ValueError, match="No noise multiplier up to 1e6 reaches target_epsilon=1e-09"):
        get_noise_multiplier(target_epsilon=1e-9, target_delta=1e-5, sample_rate=0.01, steps=3)
    assert len(calls) <= 8
    assert max(sigma for ((sigma, _, _),) in calls) == pytest.approx(1e6)


def calibrated(epsilon_of, monkeypatch, *, target=2.0):
    """Calibrate where ε is a function of σ alone, and return σ."""
    monkeypatch.setattr(accounting, "_bound", lambda mechanisms, **_: epsilon_of(mechanisms[0][0]))
    return get_noise_multiplier(target_epsilon=target, target_delta=1e-5, sample_rate=0.1, steps=10)


@pytest.mark.parametrize("root", [1e-3, 0.3, 1.0, 7.0, 4e4])
@pytest.mark.parametrize("power", [0.9, 2.0, 15.0])
def test_a_power_of_the_noise_is_inverted(root, power, monkeypatch):
    sigma = calibrated(lambda sigma: 2.0 * (root / sigma) ** power, monkeypatch)
    assert 0.0 <= math.log(sigma / root) * power <= 1e-3


def test_infinite_and_vanishing_bounds_do_not_lead_astray(monkeypatch):
    sigma = calibrated(lambda sigma: math.inf if sigma < 0.8 else 0.0 if sigma > 1.5 else 2.2 / sigma, monkeypatch)
    assert 1.1 <= sigma <= 1.1 * (1 + 1e-3)


@pytest.mark.parametrize(("above", "below"), [(3.0, 1.0), (math.inf, 1.0), (3.0, 0.0), (math.inf, 0.0)])
@pytest.mark.parametrize("jump", [1.7, 30.0, 1e-3])
def test_a_bound_that_jumps_is_met_from_below_the_jump(jump, above, below, monkeypatch):
    # As where PRV gives way to RDP: no noise multiplier lies in the tolerated range.
    sigma = calibrated(lambda sigma: above if sigma < jump else below, monkeypatch)
    assert jump <= sigma < jump * (1 + 1e-6)


@pytest.mark.parametrize("spent", [(), SPENT], ids=["fresh", "spent"])
@pytest.mark.parametrize("at_most", [1, 7, 300])
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
    "cost",
    [
        math.sqrt,
        float,
        lambda n: n**2.0,
        lambda n: 3 + math.log1p(n),
        lambda n: n // 5,
        lambda n: math.inf if n > 7 else 0.0,
    ],
)
@pytest.mark.parametrize("at_most", [0, 1, 2, 17, 300])
def test_affordable_steps_of_any_cost_against_counting(cost, at_most, monkeypatch):
    monkeypatch.setattr(accounting, "get_total_epsilon", lambda history, **_: cost(sum(entry.steps for entry in history)))
    for target in (0.5, 1.0, 3.0, 4.1, 17.0, 1e9):
        affordable = [count for count in range(at_most + 1) if cost(count) <= target]
        steps = get_steps(target_epsilon=target, noise_multiplier=2.0, sample_rate=0.1, delta=1e-5, at_most=at_most)
        assert steps == max(affordable, default=0)


@pytest.mark.parametrize("accountant", ["prv", "pld"])
@pytest.mark.parametrize(
    ("sigma", "rate", "target", "at_most"), [(0.8, 0.1, 5.0, 500), (4.0, 0.3, 1.0, 500), *thorough((2.0, 1e-3, 0.5, 10**6))]
)
def test_one_step_more_than_affordable_overruns(sigma, rate, target, at_most, accountant, calls):
    mechanism = dict(noise_multiplier=sigma, sample_rate=rate, delta=1e-5, accountant=accountant)
    steps = get_steps(target_epsilon=target, **mechanism, at_most=at_most)
    assert 0 < steps < at_most
    assert len(calls) <= 10
    assert get_epsilon(**mechanism, steps=steps) <= target < get_epsilon(**mechanism, steps=steps + 1)


def test_no_step_is_affordable_without_noise_and_none_is_asked_for():
    mechanism = dict(target_epsilon=1.0, sample_rate=0.1, delta=1e-5)
    assert get_steps(**mechanism, noise_multiplier=0.0, at_most=10) == 0
    assert get_steps(**mechanism, noise_multiplier=1e-3, at_most=10) == 0
    assert get_steps(**mechanism, noise_multiplier=5.0, at_most=0) == 0


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


def test_all_accountants_in_their_order():
    history = [Releases(1.0, 0.01, 300), Releases(2.0, 0.01, 300), Releases(1.0, 0.01, 20)]
    epsilons = get_epsilons(iter(history), delta=1e-5)
    assert list(epsilons) == ["prv", "rdp", "pld"]
    assert epsilons == {name: get_total_epsilon(history, delta=1e-5, accountant=name) for name in ACCOUNTANTS}
    assert epsilons["pld"] < epsilons["prv"] < epsilons["rdp"]


def test_prv_is_left_out_for_full_batches():
    epsilons = get_epsilons([Releases(5.0, 1.0, 10), Releases(5.0, 0.1, 10)], delta=1e-5)
    assert list(epsilons) == ["rdp", "pld"]
    assert epsilons["pld"] > get_epsilon_gaussian(5.0 / math.sqrt(10), 1e-5)


def largest_gain(sigmas, rate, epsilon):
    """∫ (P − e^ε Q)₊ over the plane, P = (1 − q) N(0, I) + q N((1/σ₁, 1/σ₂), I), Q = N(0, I): δ of two joint releases."""
    step = 0.02
    axis = np.arange(-8, 14, step)
    base = norm.pdf(axis)[:, None] * norm.pdf(axis)
    shifted = norm.pdf(axis - 1 / sigmas[0])[:, None] * norm.pdf(axis - 1 / sigmas[1])
    return np.maximum((1 - rate) * base + rate * shifted - math.exp(epsilon) * base, 0).sum() * step**2


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("sigmas", [(1.0, 1.0), (0.7, 3.0), (2.0, 0.5)])
def test_two_releases_of_one_draw_against_the_plane(sigmas, rate):
    joint = joint_noise_multiplier(*sigmas)
    epsilon = get_epsilon(noise_multiplier=joint, sample_rate=rate, steps=1, delta=1e-3, accountant="pld")
    assert largest_gain(sigmas, rate, epsilon) == pytest.approx(1e-3, rel=0.01)
    # Nothing less would do.
    smaller = get_epsilon(noise_multiplier=min(sigmas), sample_rate=rate, steps=1, delta=1e-3, accountant="pld")
    assert largest_gain(sigmas, rate, smaller) > 1.2e-3


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_joint_noise_multiplier(sigmas):
    joint = joint_noise_multiplier(*sigmas)
    assert joint == pytest.approx(np.linalg.norm([1 / sigma for sigma in sigmas]) ** -1, rel=1e-12)
    assert joint == pytest.approx(joint_noise_multiplier(*reversed(sigmas), math.inf), rel=1e-12)
    # In full batches the draw is the same in every step, so one joint release is as good as one after the other.
    apart = get_total_epsilon([Releases(sigma, 1.0, 1) for sigma in sigmas], delta=1e-5, accountant="rdp")
    together = get_epsilon(noise_multiplier=joint, sample_rate=1.0, steps=1, delta=1e-5, accountant="rdp")
    assert together == pytest.approx(apart, rel=1e-9)


def test_joint_noise_multiplier_at_its_limits():
    assert joint_noise_multiplier(0.0, 2.0, math.inf) == 0.0
    assert joint_noise_multiplier(math.inf, math.inf) == math.inf
    assert joint_noise_multiplier(1e-200) == 1e-200
    with pytest.raises(ValueError, match="at least one"):
        joint_noise_multiplier()
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"≥ 0, got {wrong}"):
            joint_noise_multiplier(1.0, wrong)


def test_next_to_no_noise_still_has_a_finite_bound():
    assert 500 < get_epsilon(noise_multiplier=0.1, sample_rate=0.25, steps=40, delta=1e-4) < math.inf


def test_no_noise_costs_everything_and_no_step_nothing():
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=1, delta=1e-5) == math.inf
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=0, delta=1e-5) == 0.0


def test_splitting_a_run_changes_nothing_and_mechanisms_add_up():
    def total(*history):
        return get_total_epsilon(history, delta=1e-5, accountant="rdp")

    whole = total(Releases(1.0, 0.01, 300))
    assert total(Releases(1.0, 0.01, 100), Releases(1.0, 0.01, 200)) == whole
    assert total(Releases(1.0, 0.01, 300), Releases(2.0, 0.01, 300)) > whole


def test_default_delta_is_the_papers():
    assert default_delta(50_000) == pytest.approx(50_000**-1.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sample_rate=0.0), r"sample_rate must lie in \(0, 1\], got 0"),
        (dict(sample_rate=1.0), "Use accountant='pld' or 'rdp', or a smaller batch"),
        (dict(steps=-1), "steps must be at least 0, got -1"),
        (dict(noise_multiplier=-0.1), "got -0.1"),
        (dict(delta=1.0), r"delta must lie in \(0, 1\), got 1"),
        (dict(accountant="gdp"), "one of prv, rdp, pld, got 'gdp'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_epsilon(**(dict(noise_multiplier=1.0, sample_rate=0.1, steps=10, delta=1e-5) | arguments))


def test_full_batches_are_accounted_by_rdp():
    ours = get_epsilon(noise_multiplier=5.0, sample_rate=1.0, steps=10, delta=1e-5, accountant="rdp")
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(5.0), 10)
    assert ours == pytest.approx(RdpAccountant().compose(event).get_epsilon(1e-5), rel=0.01)


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
