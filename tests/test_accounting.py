"""ε against Google's dp-accounting, and the calibration against its own target."""

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from doppler_hf.privacy import default_delta, get_epsilon, get_noise_multiplier
from doppler_hf.privacy.accounting import Releases, get_total_epsilon

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


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), CASES)
def test_prv_agrees_with_googles_privacy_loss_distributions(sigma, rate, steps, delta):
    # Google's PLD with pessimistic discretization is an upper bound too. Opacus adds its own error bound of 0.01 to ε.
    ours = get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="prv")
    theirs = google(PLDAccountant(value_discretization_interval=1e-4), sigma, rate, steps).get_epsilon(delta)
    assert theirs - 2e-3 * theirs <= ours <= theirs + 0.02 + 2e-3 * theirs


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), CASES)
def test_rdp_agrees_with_googles(sigma, rate, steps, delta):
    ours = get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="rdp")
    theirs = google(RdpAccountant(), sigma, rate, steps).get_epsilon(delta)
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours > get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="prv")


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
@pytest.mark.parametrize("target", [0.1, 1.0, 3.0, 8.0])
def test_calibration_meets_the_target_from_below(target, accountant):
    mechanism = dict(sample_rate=0.02, steps=165)
    sigma = get_noise_multiplier(target_epsilon=target, target_delta=1e-5, **mechanism, accountant=accountant)
    spent = get_epsilon(noise_multiplier=sigma, delta=1e-5, **mechanism, accountant=accountant)
    assert target * (1 - 1e-3) <= spent <= target


def test_next_to_no_noise_still_has_a_finite_bound():
    assert 500 < get_epsilon(noise_multiplier=0.1, sample_rate=0.25, steps=40, delta=1e-4) < math.inf


def test_no_noise_costs_everything_and_no_step_nothing():
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=1, delta=1e-5) == math.inf
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=0, delta=1e-5) == 0.0


def test_splitting_a_run_changes_nothing_and_mechanisms_add_up():
    whole = get_total_epsilon([Releases(1.0, 0.01, 300)], delta=1e-5)
    split = get_total_epsilon([Releases(1.0, 0.01, 100), Releases(1.0, 0.01, 200)], delta=1e-5)
    assert split == pytest.approx(whole, abs=0.02)
    assert get_total_epsilon([Releases(1.0, 0.01, 300), Releases(2.0, 0.01, 300)], delta=1e-5) > whole


def test_default_delta_is_the_papers():
    assert default_delta(50_000) == pytest.approx(50_000**-1.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sample_rate=0.0), r"sample_rate must lie in \(0, 1\], got 0"),
        (dict(sample_rate=1.0), "use accountant='rdp' or a smaller batch"),
        (dict(noise_multiplier=-0.1), "got -0.1"),
        (dict(delta=1.0), r"delta must lie in \(0, 1\), got 1"),
        (dict(accountant="gdp"), "one of prv, rdp, got 'gdp'"),
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
        (dict(target_epsilon=1e-9, accountant="rdp"), "raise target_epsilon or target_delta"),
    ],
)
def test_unreachable_targets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_noise_multiplier(**(dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=10) | arguments))
