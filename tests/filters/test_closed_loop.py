"""The loss is that of a quadratic which is trained with the filter and the noise, and the best strategy is the best."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.signal

from doppler_hf.filters import ClosedLoop, LowPassFilter, NoiseShape, filter_figures, stability_limit
from doppler_hf.filters import closed_loop as module
from tests.support.pairwise import pairwise
from tests.support.refusals import refused
from tests.support.tiers import further

NONE = LowPassFilter.parse("none")
LINEAR = (1 - np.arange(120) / 120).tolist()


def settled_loss(x, low_pass_filter, shape):
    """Return λ E w² / (η noise_std²) of w_{t+1} = w_t - η m_t, m = κ * (λw + y), y = c⁻¹ z, by Lyapunov's equation."""
    order, bands = max(len(low_pass_filter.b), len(low_pass_filter.a)) - 1, shape.bands
    # State: w, the filter's states (transposed direct form II), and y of the last b - 1 steps. Unit η, λ = x.
    size = 1 + order + bands - 1
    b, a = (np.pad(each, (0, order + 1 - len(each))) for each in (low_pass_filter.b, low_pass_filter.a))
    gradient = np.zeros(size + 1)  # of the state, and of z
    gradient[0], gradient[size] = x, shape.norm
    noise = np.zeros(size + 1)
    noise[size] = shape.norm
    for lag in range(1, bands):
        for row in (gradient, noise):
            row[order + lag] -= shape.c[lag]
    first = np.eye(1, size + 1, 1)[0] if order else np.zeros(size + 1)
    filtered = b[0] * gradient + first
    following = [np.eye(1, size + 1, 0)[0] - filtered]
    for state in range(order):
        after = np.eye(1, size + 1, state + 2)[0] if state + 1 < order else np.zeros(size + 1)
        following.append(after + b[state + 1] * gradient - a[state + 1] * filtered)
    if bands > 1:
        following.append(noise)
    following += [np.eye(1, size + 1, order + lag)[0] for lag in range(1, bands - 1)]
    transition = np.array(following)
    moves, driven = transition[:, :size], transition[:, size:]
    return x * scipy.linalg.solve_discrete_lyapunov(moves, driven @ driven.T)[0, 0]


def expected_loss(rates, low_pass_filter, shape):
    """Return the mean over the directions and rates that the module's docstring names."""
    rates = np.array(rates) / max(rates)
    middles = (np.arange(16) + 0.5) / 16
    curvatures = (10 / rates.sum()) ** (1 - middles)
    shares = np.quantile(rates, (np.arange(10) + 0.5) / 10)
    losses = [[settled_loss(share * x, low_pass_filter, shape) for x in curvatures] for share in shares]
    return float(np.average(np.mean(losses, axis=1), weights=shares))


@pytest.mark.parametrize("rates", [[1.0] * 120, LINEAR], ids=["constant", "linear"])
@pytest.mark.parametrize("shape", ["white", "banded:bands=4", "banded:c=1,-0.5"])
@pytest.mark.parametrize("low_pass_filter", ["none", "first-order-v1", "moving-average:taps=3"])
def test_the_loss_is_that_of_a_quadratic(rates, shape, low_pass_filter):
    shape, low_pass_filter = NoiseShape.parse(shape), LowPassFilter.parse(low_pass_filter)
    expected = expected_loss(rates, low_pass_filter, shape)
    # 2048 frequencies, of which the lowest is a thousandth of the slowest direction.
    np.testing.assert_allclose(ClosedLoop.of_run(120, rates).loss(low_pass_filter, shape), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("x", [1.0, 0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.9999])
def test_the_loss_behind_a_long_delay_is_right_to_what_is_said(beta, x):
    """Where the loop rings, too: that of momentum has a narrow resonance."""
    low_pass_filter = LowPassFilter(b=(1 - beta,), a=(1.0, -beta))
    expected = settled_loss(x, low_pass_filter, NoiseShape())
    np.testing.assert_allclose(ClosedLoop(np.array([x])).loss(low_pass_filter), expected, rtol=2e-3, atol=0)


def test_a_learning_rate_of_zero_costs_nothing():
    assert ClosedLoop.of_run(100, [0.0] * 99 + [1.0]).loss(NONE) == pytest.approx(ClosedLoop.of_run(1).loss(NONE), rel=1e-6)
    warm_up = [0.0] * 60 + [1.0] * 60
    assert math.isfinite(ClosedLoop.of_run(120, warm_up).loss(NONE))
    assert ClosedLoop.of_run(120, warm_up).loss(NONE) == pytest.approx(ClosedLoop.of_run(60).loss(NONE), rel=1e-6)


@pytest.mark.parametrize(("name", "is_stable"), [("second-order", False), ("momentum", True), ("f1", True)])
def test_a_loop_that_is_unstable_costs_without_bound(name, is_stable):
    loop, low_pass_filter = ClosedLoop.of_run(300), LowPassFilter.parse(name)
    assert math.isfinite(loop.loss(low_pass_filter)) is is_stable
    if not is_stable:
        assert loop.best_shape(4, low_pass_filter) == NoiseShape.banded(4)


@pytest.mark.parametrize(
    ("low_pass_filter", "bands", "steps"),
    further(pairwise(["none", "momentum"], [2, 3, 6], [60, 2000]), quick=[("none", 2, 60), ("momentum", 6, 2000)]),
)
def test_no_strategy_beats_the_best(low_pass_filter, bands, steps, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_ROOTS", {0.999: 0.0})
    loop, rng = ClosedLoop.of_run(steps, np.linspace(1, 0, steps, endpoint=False).tolist()), np.random.default_rng(0)
    low_pass_filter = LowPassFilter.parse(low_pass_filter)
    best = loop.best_shape(bands, low_pass_filter)
    assert best.bands == bands
    least = loop.loss(low_pass_filter, best)
    assert least < loop.loss(low_pass_filter, NoiseShape.banded(bands))
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(15):  # Of an optimum that is missed, every other direction leads nearer to it.
            tried = np.array(best.c) + scale * np.pad(rng.normal(size=bands - 1), (1, 0))
            if max(abs(np.roots(tried))) < 0.999:
                # Its coefficients are rounded to four decimals.
                assert loop.loss(low_pass_filter, NoiseShape(tuple(tried))) > least * (1 - 1e-5)


@pytest.mark.parametrize("x", [[], [0.1, 0.0], [math.nan]])
def test_directions_must_have_a_curvature(x):
    with refused("out-of-range"):
        ClosedLoop(np.array(x))


@pytest.mark.parametrize(
    ("steps", "rates", "code"),
    [
        (0, None, "out-of-range"),
        (3, [1.0] * 2, "other-lengths"),
        (2, [0.0, 0.0], "all-rates-zero"),
    ],
)
def test_bad_input_is_refused(steps, rates, code):
    with refused(code):
        ClosedLoop.of_run(steps, rates)


@pytest.mark.parametrize("beta", [0.1, 0.9, 0.999, 0.99999])
def test_momentum_is_stable_up_to_a_known_limit(beta):
    limit = stability_limit(LowPassFilter.parse(f"momentum:beta={beta}"))
    np.testing.assert_allclose(limit, (2 * (1 + beta) / (1 - beta), 2.0), rtol=1e-9)


def trained(low_pass_filter, x, steps):
    """Return the weight of a quadratic at each step of SGD, from 1, for η = 1 and λ = x."""
    order = max(len(low_pass_filter.b), len(low_pass_filter.a))
    b, a = (np.pad(each, (0, order - len(each))) for each in (low_pass_filter.b, low_pass_filter.a))
    weights, gradients, outputs = [1.0], np.zeros(order), np.zeros(order)
    for _ in range(steps):
        gradients = np.concatenate([[x * weights[-1]], gradients[:-1]])
        outputs = np.concatenate([[b @ gradients - a[1:] @ outputs[:-1]], outputs[:-1]])
        weights.append(weights[-1] - outputs[0])
    return np.array(weights)


@pytest.mark.parametrize(
    "name",
    [
        "none", "momentum", "first-order-v1", "first-order-v2", "second-order", "f1", "f2", "f6",
        "moving-average:taps=7", "hann:length=9", "butterworth:order=1,cutoff=0.03", "butterworth:order=4,cutoff=0.5",
        "b=0.6,0,0.4;a=1", "b=1,-0.5,0.5;a=1",
    ],
)  # fmt: skip
def test_training_is_stable_below_the_limit_and_oscillates_as_it_says(name):
    low_pass_filter = LowPassFilter.parse(name)
    limit = stability_limit(low_pass_filter)
    steps = math.ceil(600 * limit.period)
    below, at, above = (np.abs(trained(low_pass_filter, share * limit.x, steps)) for share in (0.97, 1.0, 1.03))
    parts = (slice(steps // 2, 3 * steps // 4), slice(3 * steps // 4, None))
    first, last = (np.array([each[part].max() for each in (below, at, above)]) for part in parts)
    assert last[0] < first[0] / 2
    assert last[1] == pytest.approx(first[1], rel=0.02)
    assert last[2] > 2 * first[2]
    signs = np.sign(trained(low_pass_filter, limit.x, steps)[steps // 2 :])
    assert 2 * len(signs) / np.count_nonzero(signs[1:] != signs[:-1]) == pytest.approx(limit.period, rel=0.02)


def test_a_slow_filter_has_a_low_limit():
    """Its delay of d steps is a quarter of a period at the limit, where the weights lag behind by another quarter."""
    slow = LowPassFilter.parse("butterworth:order=4,cutoff=0.001")
    limit = stability_limit(slow)
    delay = filter_figures(slow).delay
    assert limit.x == pytest.approx(math.pi / 2 / delay, rel=0.05)
    assert limit.period == pytest.approx(4 * delay, rel=0.06)


@pytest.mark.parametrize(
    ("b", "a", "limit"),
    [
        (
            (0.9966391361671602, 2.0381857966609025, 0.9596155908899375),
            (1, 1.9944580476291172, 0.999982476088882),
            (0.000433971, 2.0486),
        ),
        (
            (0.49983615525, 0.99089912922, 1.56091511171, 1.56073018925, 0.98779399139, 0.49691593988),
            (1, 0.98204840668, 2.14026357844, 0.98060313743, 0.99417535416),
            (1.98515, 4.0172),
        ),
    ],
)
def test_a_limit_beside_a_sharp_resonance_is_found(b, a, limit):
    """Their poles are so near to the circle that the resonance is between two frequencies of an even grid."""
    np.testing.assert_allclose(stability_limit(LowPassFilter(b=b, a=a)), limit, rtol=1e-4)


@pytest.mark.parametrize(
    ("modulus", "angle", "share", "turned"),
    [
        (0.9999, 2.0, 0.1, 0.0),
        (0.99996, 0.22819, -0.00015, -0.86),
        (0.9999967, 0.71018, -0.0034, -0.07),
        (0.9999959, 0.66989, -0.00145, -0.37),
    ],
)
def test_a_resonance_between_two_frequencies_of_the_grid_is_found(modulus, angle, share, turned):
    """Both crossings of a weak one are between two frequencies of the even grid, whose ends then have the same sign."""
    a = np.array([1.0, -2 * modulus * math.cos(angle), modulus**2])
    b = a + share * np.array([1.0, -modulus * math.cos(angle + turned), 0.0])
    low_pass_filter = LowPassFilter(b=tuple(b * a.sum() / b.sum()), a=tuple(a))
    x = stability_limit(low_pass_filter).x
    assert is_stable(low_pass_filter, 0.98 * x)
    assert not is_stable(low_pass_filter, 1.0001 * x)


def is_stable(low_pass_filter, x):
    order = max(len(low_pass_filter.b), len(low_pass_filter.a))
    b, a = (np.pad(each, (0, order - len(each))) for each in (low_pass_filter.b, low_pass_filter.a))
    return np.abs(np.roots(np.convolve([1.0, -1.0], a) + x * np.concatenate([[0.0], b]))).max() < 1


def test_it_is_right_for_filters_of_all_kinds():
    generator, tried = np.random.default_rng(0), 0
    while tried < 60:
        pairs = generator.integers(1, 3)
        angles = generator.uniform(0.05, 3.1, pairs)
        moduli = [1 - 10 ** generator.uniform(lowest, -0.5, pairs) for lowest in (-5.5, -4)]
        poles, zeros = (modulus * np.exp(1j * each) for modulus, each in zip(moduli, (angles, angles + 0.05), strict=True))
        a, b = (np.poly([*each, *each.conj()]).real for each in (poles, zeros))
        try:
            low_pass_filter = LowPassFilter(b=tuple(b * a.sum() / b.sum()), a=tuple(a))
        except ValueError:  # its step response is negative somewhere
            continue
        tried += 1
        x = stability_limit(low_pass_filter).x
        assert x > 0
        assert is_stable(low_pass_filter, 0.98 * x)
        assert not is_stable(low_pass_filter, 1.0001 * x)  # far above x it may be stable again


@pytest.mark.parametrize("name", ["first-order-v1", "f3", "f4", "b=0.01,0.01;a=1,-0.98"])
def test_a_filter_of_first_order_that_blocks_the_highest_frequency_leaves_the_loss_as_it_is(name):
    """With s = (z - 1)/(z + 1) it is 1/(1 + Ts), and E w² = η² σ²/(x(2 - x)) for every T."""
    low_pass_filter = LowPassFilter.parse(name)
    for x in (0.001, 0.1, 0.9, 1.9):
        assert settled_loss(x, low_pass_filter, NoiseShape.parse("white")) == pytest.approx(1 / (2 - x), rel=1e-6)
    assert settled_loss(1.9, LowPassFilter.parse("momentum"), NoiseShape.parse("white")) < 0.6
